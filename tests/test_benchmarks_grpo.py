"""Both sides of the comparison with TRL's GRPOTrainer are asked for the same: numbers by hand, settings read back from the trainers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmark_modules import load

pytest.importorskip("trl")

task = load("grpo_task")
SETTING = task.Setting(name="tiny", hidden=16, layers=2, words=8, prompt_words=4, new_tokens=4, prompts=2, group=4, trl_rows=4)


def test_reward_and_advantages_by_hand() -> None:
    assert task.share("a1 b2 a3 a0", 4) == 3 / 4
    assert task.share("a1", 4) == 1 / 4, "an early end leaves three words out"
    # Rewards 0, 1, 1: mean 2/3, sample variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
    scale = (1 / 3) ** 0.5 + 1e-4
    advantages = task.sample_std_advantages(np.array([0.0, 1.0, 1.0, 9.0]), np.array([True, True, True, False]))
    np.testing.assert_allclose(advantages, [-2 / 3 / scale, 1 / 3 / scale, 1 / 3 / scale, 0.0])


@pytest.mark.filterwarnings("ignore")
def test_both_trainers_hold_the_same_settings_weights_and_prompts(tmp_path: Path) -> None:
    ours, theirs = task.make_ours(SETTING, tmp_path / "ours"), task.make_trl(SETTING, tmp_path / "trl")
    assert task.settings_of_ours(ours) == task.settings_of_trl(theirs)
    assert all(bool((mine == other).all()) for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True))
    groups = [theirs.train_dataset[n]["prompt"][-1]["content"] for n in range(4)]
    assert groups == [option["task"].question for option in ours.order.options(0, 4)]
    prompts, *_ = theirs._tokenize_prompts([theirs.train_dataset[0]["prompt"]])
    assert prompts[0] == ours.codec.prompt([{"role": "user", "content": groups[0]}])


def test_trl_reads_and_continues_a_conversation_in_world_as_our_environment_does() -> None:
    tokenizer = task.build_tokenizer(task.world_vocabulary(task.WorldConfig()))
    task.speak_world(tokenizer)
    env = task.WorldEnv(split="train")
    question = task.WorldTasks(task.WorldConfig(split="train"))[0]
    _, _ = env.reset(options={"task": question})
    name = next(iter(question.metadata["lists"]))
    turn = f"<search> {name} </search>"
    message = tokenizer.parse_response(tokenizer.encode(turn))
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "search", "arguments": {"query": name}}]
    observation, *_ = env.step(turn)
    text = observation.split("<result>")[1].split("</result>")[0].strip()
    opening = [{"role": "user", "content": question.question}, message]
    before = tokenizer.apply_chat_template(opening, return_dict=False)
    after = tokenizer.apply_chat_template([*opening, {"role": "tool", "name": "search", "content": text}], return_dict=False)
    assert after[: len(before)] == before
    assert after[len(before) :] == tokenizer.encode(observation)
    assert "tool_calls" not in tokenizer.parse_response(tokenizer.encode("<answer> 4 2 </answer>"))

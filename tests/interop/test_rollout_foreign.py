"""``arpo rollout`` on environments of other libraries: trees that branch, from the command line, with a tiny random model.

Their observations are user messages, so the tokenizer needs a chat template (else ``--codec plain``). They name no stop strings: a turn ends with the end
token, or with ``stop_strings`` of one's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import build_model, build_tokenizer

from arpo_algo.cli import main
from arpo_algo.recording import read_rollouts

TEMPLATE = (
    "{% for message in messages %}{{ '<user> ' if message['role'] == 'user' else '' }}{{ message['content'] }} {{ '<eos> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
ROWS = ", ".join(f'{{prompt = "What is 2 + {n} ?", reward_spec = {{ground_truth = "{n + 2}"}}, extra_info = {{max_turns = 4}}}}' for n in range(3))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights that speaks numbers in the three notations."""
    folder = tmp_path_factory.mktemp("model")
    numbers = range(1, 11)
    words = [f"\\boxed{{{n}}}" for n in numbers] + [f"[{n}]" for n in numbers] + ["####", "3", "<user>", "<assistant>"]
    tokenizer = build_tokenizer(words)
    tokenizer.chat_template = TEMPLATE
    build_model(tokenizer, hidden=16, layers=2, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("package", "name", "args"),
    [
        ("gem", "arpo_env.interop.gem:GemEnv", 'env = "game:GuessTheNumber-v0-easy"\nstop_strings = ["}"]'),
        ("textarena", "arpo_env.interop.textarena:TextArenaEnv", 'env = "GuessTheNumber-v0"\nstop_strings = ["]"]'),
        ("skyrl_gym", "arpo_env.interop.skyrl_gym:SkyRLGymEnv", f'env = "gsm8k_multi_turn"\nstop_strings = ["3"]\ntasks = [{ROWS}]'),
        ("reasoning_gym", "arpo_env.interop.reasoning_gym:ReasoningGymEnv", 'dataset = "basic_arithmetic"'),
    ],
)
def test_rollout_branches(package: str, name: str, args: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    config = tmp_path / "rollout.toml"
    rollout = "group_size = 8\ninitial = 4\nwindow = 2\nmax_turn_tokens = 24\nenv_workers = 2"
    config.write_text(
        f'model = "{model}"\ngroups = 2\nbranching = {{type = "UniformBranching"}}\n[env]\nid = "{name}"\n[env.args]\n{args}\n[rollout]\n{rollout}\n'
    )
    assert main(["rollout", str(config), "--out", str(tmp_path / "out")]) == 0
    metrics: dict[str, Any] = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["trajectories/initial"] == 8
    assert metrics["trajectories/branched"] >= 1
    assert metrics["branch/points"] >= metrics["branch/branched"] >= 1
    assert metrics["unscored"] == 0
    assert not [key for key in metrics if key in ("stop/env_error", "stop/library_error", "stop/env_timeout")]
    trees = read_rollouts(tmp_path / "out" / "step_000000")
    assert [len(tree.trajectories) for tree in trees] == [8, 8]
    assert sum(trajectory.origin == "branched" for tree in trees for trajectory in tree.trajectories) == metrics["trajectories/branched"]
    assert "branched" in capsys.readouterr().out


def test_eval_plays_numbered_episodes(model: Path, tmp_path: Path) -> None:
    """Games have no data set: their tasks are the library's own seeds."""
    pytest.importorskip("gem")
    config, out = tmp_path / "eval.toml", tmp_path / "eval.json"
    env = 'id = "arpo_env.interop.gem:GemEnv"\nargs = {env = "game:GuessTheNumber-v0-easy", stop_strings = ["}"]}'
    config.write_text(f'model = "{model}"\nn = 3\n[env]\n{env}\n[rollout]\nmax_turn_tokens = 12\n')
    assert main(["eval", str(config), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["tasks"], result["trajectories"], result["unscored"]) == (3, 3, 0)

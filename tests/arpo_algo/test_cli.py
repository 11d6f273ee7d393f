"""The ``arpo`` command from end to end with a tiny model, and what a wrong command line says."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from tiny_policy import build_model, build_tokenizer
from transformers import AutoModelForCausalLM

from arpo_algo.__main__ import main as command
from arpo_algo.branching import EntropyBranching, RandomBranching, TopEntropyBranching
from arpo_algo.cli import COMMANDS, main, parse
from arpo_algo.config import ARPOConfig
from arpo_algo.settings import SettingsError
from arpo_env import ForkableEnv, sandbox
from arpo_env.envs.guess_number import GuessNumber
from arpo_env.envs.world import WorldConfig, world_vocabulary

SMALL = {"group_size": 4, "initial": 2, "window": 2, "max_turn_tokens": 8, "env_workers": 0}
SMALL_FLAGS = [f"--rollout.{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights that speaks the words of the little world."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(world_vocabulary(WorldConfig()))
    build_model(tokenizer, hidden=16, layers=2, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_file(path: Path, **extra: str) -> Path:
    """Two steps of two small groups."""
    table = "\n".join(f"{name} = {value}" for name, value in SMALL.items())
    path.write_text(f"{extra.get('top', '')}\n[trainer]\nlr = 0.01\nsteps = 2\ntasks_per_step = 2\n{extra.get('trainer', '')}\n[trainer.rollout]\n{table}\n")
    return path


# -- the command line ---------------------------------------------------------------------------------------------------------------------------


def test_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"arpo {name} " in text for name in COMMANDS)
    assert main([]) == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_each_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: arpo {name}" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "unknown command 'trian', did you mean train?" in capsys.readouterr().err


def test_unknown_flag_is_refused_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("train", ["--model", "m", "--trainer.learning-rate", "1"])
    assert ended.value.code == 2
    assert "--trainer.learning-rate" in capsys.readouterr().err


def test_required_settings_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("train", [])
    assert "--model" in capsys.readouterr().err


def test_flags_of_the_issue_of_a_run() -> None:
    settings = parse("rollout", ["--model", "m", "--tasks", "t.parquet", "--search-cache=c.json", "--env", "arpo/Math-v0"])
    assert (settings.model, settings.env.tasks, settings.env.search_cache, settings.env.id) == ("m", Path("t.parquet"), Path("c.json"), "arpo/Math-v0")


def test_file_then_flags(tmp_path: Path) -> None:
    path = config_file(tmp_path / "c.toml", top='model = "from the file"\n[env.args]\nhops_max = 3')
    settings = parse("train", [str(path), "--trainer.lr", "1e-5", "--trainer.rollout.window", "3"])
    assert settings.model == "from the file"
    assert settings.env.args == {"hops_max": 3}
    assert (settings.trainer.lr, settings.trainer.steps, settings.trainer.rollout.window, settings.trainer.rollout.group_size) == (1e-5, 2, 3, 4)


def test_what_follows_from_a_value_follows_from_its_last_word(tmp_path: Path) -> None:
    """The schedule ends after steps x epochs; the temperature of the learner is that of the rollout. Both were once taken from the file alone."""
    path = config_file(tmp_path / "c.toml", trainer='schedule = "linear"')
    path.write_text(path.read_text() + "temperature = 0.7\n")
    settings = parse("train", [str(path), "--model", "m", "--trainer.steps", "7", "--trainer.rollout.temperature", "0.5"])
    assert (settings.trainer.total_steps, settings.trainer.temperature) == (7, 0.5)


def test_strategies_by_name(tmp_path: Path) -> None:
    assert parse("rollout", ["--model", "m"]).branching == EntropyBranching()
    assert parse("rollout", ["--model", "m", "--branching", "RandomBranching", "--branching.rate", "0.5"]).branching == RandomBranching(rate=0.5)
    flags = ["--model", "m", "--branching=TopEntropyBranching", "--trainer.branching.children", "2"]
    assert parse("train", flags).trainer.branching == TopEntropyBranching(children=2)
    path = tmp_path / "c.toml"
    path.write_text('model = "m"\n[branching]\ntype = "RandomBranching"\nrate = 0.75\n')
    assert parse("rollout", [str(path), "--branching.children", "3"]).branching == RandomBranching(rate=0.75, children=3)
    assert parse("rollout", [str(path), "--branching", "TopEntropyBranching"]).branching == TopEntropyBranching()
    with pytest.raises(SettingsError, match=r"branching\.type must be one of EntropyBranching, .*got 'Entropy'"):
        parse("rollout", ["--model", "m", "--branching", "Entropy"])


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ("learning_rate = 1.0", "unknown key trainer.learning_rate"),
        ("warmup_step = 1", "unknown key trainer.warmup_step; did you mean warmup_steps"),
        ('epochs = "two"', "trainer.epochs must be int, got 'two'"),
        ("epochs = 0", "epochs must be greater than 0, got 0"),
    ],
)
def test_a_wrong_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str], trainer: str, message: str) -> None:
    path = config_file(tmp_path / "c.toml", trainer=trainer)
    assert main(["train", str(path), "--model", "m"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("arpo train: SettingsError: ") and message in error and "Traceback" not in error


def test_files_and_models_that_are_not_there(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in (
        ["train", str(tmp_path / "absent.toml")],
        ["rollout", "--model", str(tmp_path / "absent")],
        ["rollout", "--model", str(model), "--tasks", str(tmp_path / "absent.jsonl"), "--search-cache", "absent.json"],
        ["sft", "--model", str(model), "--traces", str(tmp_path / "absent.jsonl")],
    ):
        assert main(args) == 1, args
        assert "absent" in capsys.readouterr().err


# -- commands that run --------------------------------------------------------------------------------------------------------------------------


def test_train_and_resume(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    # Random weights earn the same reward everywhere; the entropy bonus gives a gradient all the same.
    path, run = config_file(tmp_path / "c.toml", trainer="entropy_coef = 0.1"), tmp_path / "run"
    args = ["train", str(path), "--model", str(model), "--run-dir", str(run), "--trainer.save-every", "1"]
    assert main(args) == 0
    assert "done at step 2" in capsys.readouterr().out
    assert main([*args, "--trainer.steps", "3"]) == 0
    assert "done at step 3" in capsys.readouterr().out
    assert "resumed" in caplog.text and "at step 2" in caplog.text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert json.loads((run / "run.json").read_text())["config"]["lr"] == 0.01
    before = AutoModelForCausalLM.from_pretrained(model).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000003" / "model").state_dict()
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_run_with_other_settings_is_not_resumed(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = config_file(tmp_path / "c.toml"), tmp_path / "run"
    args = ["train", str(path), "--model", str(model), "--run-dir", str(run), "--trainer.steps", "1"]
    assert main(args) == 0
    assert main([*args, "--trainer.lr", "0.5"]) == 1
    assert "lr" in capsys.readouterr().err


def test_rollout_prints_a_tree(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    args = ["rollout", "--model", str(model), "--branching", "UniformBranching", "--groups", "2", "--out", str(out), *SMALL_FLAGS]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert text.count("4 trajectories (2 initial") == 2
    assert text.count("● t3") == 2
    metrics = json.loads((out / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert metrics["trajectories/initial"] == 4
    assert metrics["policy/decoded_tokens"] == metrics["tokens/generated"] > 0
    assert list(out.rglob("*.parquet"))


def test_rollout_of_an_environment_without_tasks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "--model", str(model), "--env", "arpo/GuessNumber-v0", *SMALL_FLAGS]) == 0
    assert "4 trajectories" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::arpo_env.sandbox.IsolationWarning")
def test_rollout_beyond_the_last_task(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, cache = tmp_path / "tasks.jsonl", tmp_path / "cache.json"
    tasks.write_text('{"question": "who", "answer": "ann"}\n')
    cache.write_text('{"who": "Page 1: ann"}')
    args = ["rollout", "--model", str(model), "--tasks", str(tasks), "--search-cache", str(cache), *SMALL_FLAGS]
    assert main(args) == 0
    assert main([*args, "--first", "1"]) == 1
    assert "expected 1 tasks from number 1 on, the environment has 0 there" in capsys.readouterr().err


def test_eval_writes_json(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "eval.json"
    assert main(["eval", "--model", str(model), "--n", "3", "--samples", "2", "--temperature", "1", "--out", str(out), *SMALL_FLAGS]) == 0
    assert "3 tasks, 6 trajectories" in capsys.readouterr().out
    numbers = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert numbers["model"] == str(model) and "torch" in numbers["versions"]


def test_sft_learns_its_traces(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces, out = tmp_path / "traces.jsonl", tmp_path / "out"
    word = world_vocabulary(WorldConfig())[0]
    traces.write_text(json.dumps({"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word}]}) + "\n")
    assert main(["sft", "--model", str(model), "--traces", str(traces), "--out", str(out), "--sft.steps", "40", "--sft.lr", "0.02"]) == 0
    text = capsys.readouterr().out
    assert "1 traces, 2 tokens to learn" in text
    losses = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("step ")]
    assert losses[-1] < losses[0] / 2
    AutoModelForCausalLM.from_pretrained(out)


# -- check-env and doctor -----------------------------------------------------------------------------------------------------------------------


class SharedCount(GuessNumber):
    """Broken on purpose: forks count in one list."""

    shared = GuessNumber.shared | {"count"}

    def __init__(self) -> None:
        super().__init__()
        self.count = [0]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.count[0] += 1
        observation, *rest = super().step(action)
        return (f"{observation} {self.count[0]}", *rest)  # type: ignore[return-value]


def not_an_env() -> int:
    return 3


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
class TestCheckEnv:
    @pytest.mark.parametrize("env", ["arpo/GuessNumber-v0", "CartPole-v1"])
    def test_good(self, env: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check-env", env]) == 0
        text = capsys.readouterr().out
        assert "ok    fork" in text and "ok    seed alone decides" in text and "ok    fork of closed or unreset" in text

    def test_broken(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        assert main(["check-env", "test_cli:SharedCount", "--actions", "1", "2", "3"]) == 1
        assert "arpo check-env: ContractBroken: " in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("test_cli:not_an_env", "must make a gymnasium.Env, got int"),
            ("test_cli:absent", "must name a function or class that makes an environment, got None"),
            ("absent_module:Env", "absent_module"),
            ("arpo/Absent-v0", "Absent"),
        ],
    )
    def test_names(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        assert main(["check-env", name]) == 1
        assert message in capsys.readouterr().err


def test_an_argument_that_the_environment_does_not_have(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text("[env.args]\nhops = 3\n")
    assert main(["rollout", str(path), "--model", str(model)]) == 1
    assert "arpo/World-v0 cannot be made with hops" in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> gymnasium.Env[Any, Any]:
        raise KeyError("a bug")

    monkeypatch.setattr(gymnasium, "make", broken)
    with pytest.raises(KeyError):
        main(["check-env", "arpo/World-v0"])


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "extra search" in text and "machine" in text and "isolation level" in text


def test_doctor_in_a_base_install() -> None:
    """Without torch and tyro it still says what is missing; every other command names the extra."""
    code = (
        "import sys; sys.modules.update(torch=None, tyro=None, transformers=None); sys.argv = ['arpo', '{command}']; "
        "from arpo_algo.__main__ import main; sys.exit(main())"
    )
    run = partial(subprocess.run, capture_output=True, text=True, timeout=100)
    doctor = run([sys.executable, "-W", "ignore", "-c", code.format(command="doctor")])
    assert doctor.returncode == 0 and "no torch" in doctor.stdout and "sandbox isolation level" in doctor.stdout, doctor.stderr
    other = run([sys.executable, "-W", "ignore", "-c", code.format(command="eval")])
    assert other.returncode == 1 and "arpo[train]" in other.stderr


def test_doctor_where_code_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise sandbox.IsolationError("the local Python sandbox needs Linux")

    monkeypatch.setattr(sandbox, "probe", refuse)
    assert main(["doctor"]) == 0
    assert "needs Linux" in capsys.readouterr().out


def test_defaults_are_those_of_the_library() -> None:
    assert parse("train", ["--model", "m"]).trainer == ARPOConfig()


class ForksUnreset(ForkableEnv):
    """Forks before reset, which a fork of a fork does right and the contract forbids."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "say", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "again", 0.0, False, False, {}

    def fork(self) -> ForksUnreset:
        return self if not self._running else super().fork()


def test_check_env_runs_the_whole_kit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["check-env", "test_cli:ForksUnreset"]) == 1
    assert "fork before reset() must be a ForkError" in capsys.readouterr().err


def test_held_out_tasks_of_the_world_are_evaluated_during_training(tmp_path: Path, model: Path) -> None:
    path, run = config_file(tmp_path / "c.toml", trainer="eval_every = 1\neval_tasks = 2"), tmp_path / "run"
    assert main(["train", str(path), "--model", str(model), "--run-dir", str(run), "--trainer.steps", "1"]) == 0
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["eval/tasks"] == 2


def test_without_the_extra_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "arpo_algo.cli")
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert command() == 1
    assert "pip install 'arpo[train]'" in capsys.readouterr().err

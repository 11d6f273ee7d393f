"""A vLLM engine in this process as the tests have it without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from arpo_algo.policies import vllm_engine
from arpo_algo.policies.decoding import DecodingStats
from arpo_algo.policies.stops import Endings
from arpo_algo.policies.vllm_engine import EngineThread
from arpo_algo.policies.vllm_turns import Turns


class Engine:
    """A batch that gives each request one output a step until ``steps`` are done; ``fail_at`` steps in all, it raises."""

    def __init__(self, fail_at: int = -1) -> None:
        self.left: dict[str, int] = {}
        self.steps, self.fail_at, self.closed = 0, fail_at, False
        self.engine_core = SimpleNamespace(shutdown=lambda: setattr(self, "closed", True))
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 11, enable_sleep_mode=True)
        self.calls: list[str] = []

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {' '.join(tags)}")

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise OSError("says the test")
        self.left = {name: n - 1 for name, n in self.left.items()}
        outputs = [SimpleNamespace(request_id=name, finished=n == 0) for name, n in self.left.items()]
        self.left = {name: n for name, n in self.left.items() if n}
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]


class Listener(Turns):
    """Ends ``ends`` at once and notes what it hears."""

    def __init__(self, ends: str = "") -> None:
        super().__init__(Endings(None, ()), (), DecodingStats())
        self.ends = ends
        self.heard: list[str] = []
        self.error: Exception | None = None

    def receive(self, output: Any) -> bool:
        self.heard.append(output.request_id)
        return bool(output.finished or output.request_id == self.ends)

    def stopped(self, error: Exception) -> None:
        self.error = error


def start(monkeypatch: pytest.MonkeyPatch, engine: Engine, listener: Listener) -> EngineThread:
    monkeypatch.setattr(vllm_engine, "start_engine", lambda arguments: engine)
    monkeypatch.setattr(vllm_engine, "probe_entropy_column", lambda engine: None)
    return EngineThread({}, listener)

"""What environments of other libraries have in common once they are ``gymnasium.Env[str, str]`` that fork.

:class:`ForeignEnv` keeps the turns, the ends and the ``info`` of :class:`arpo_env.ToolEnv`, so that a rollout reads both alike. An adapter says how an
episode is chosen (:meth:`ForeignEnv._choose`), how it begins (:meth:`ForeignEnv._open`) and what the library makes of a turn (:meth:`ForeignEnv._take`).

**Forking.** ``fork_support`` says which of two ways is used:

``copy``    the library's object is deep-copied together with the state of the generators it draws from;
``replay``  a fork begins the same episode anew and takes the same turns, and every answer is compared with the recorded one.

An adapter takes ``copy`` for the environments for which it was tested and ``replay`` for all others, because a deepcopy that succeeds may still be wrong
(tools that go on acting on the parent). ``forks=`` overrules it.

**Generators.** Some libraries draw from the process-wide ``random`` and ``numpy.random``. Each environment keeps its own state of both
(:class:`arpo_env.interop.foreign_library.ProcessGenerators`) and puts it in force around every call of the library, one environment at a time.

**Failures.** What the library raises while it takes a turn ends the episode, truncated, with the message as ``answer`` and in ``errors``; it is logged and
counted in ``telemetry``. Whether the policy's text or the library is at fault cannot be told, so by default the trajectory is unscored (stop reason
``env_error``, which the trainer's limit on failing environments counts). ``error_reward`` says instead what such a turn is worth: then it is scored (stop
reason ``library_error``), unless the cause is the infrastructure (``OSError``, ``ImportError``, ``MemoryError``). What is raised at ``reset`` is raised.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from arpo_env.core import Telemetry
from arpo_env.forking import ForkableEnv, ForkError
from arpo_env.interop.foreign_library import ProcessGenerators
from arpo_env.task import Task
from arpo_env.tools.base import Shared

log = logging.getLogger(__name__)

Message = Mapping[str, str]
Forks = Literal["copy", "replay"]
Draws = Literal["nothing", "random", "both"]

INFRASTRUCTURE = (OSError, ImportError, MemoryError)
"""Failures that say nothing about the policy's text: network, files, missing packages, memory."""


@dataclass(frozen=True)
class Outcome(Shared):
    """What the library made of a turn. Never written to."""

    messages: tuple[Message, ...] = ()
    """What the policy reads next, as chat messages. Nobody reads those of the last turn."""
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    stop_reason: str = ""
    """Why the episode ended, where it did."""
    answer: str = ""
    """What the library said at the end."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls of the turn, as far as the library tells."""
    errors: tuple[str, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    scored: bool = True


class _LibraryFailed(Exception):
    """The library raised (``__cause__``)."""


class _Held:
    """The library's environment of one episode. A deepcopy holds a deepcopy of it, or none where the episode is to be replayed."""

    def __init__(self, env: Any, forks: Forks) -> None:
        self.env, self.forks = env, forks

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return _Held(copy.deepcopy(self.env, memo) if self.forks == "copy" else None, self.forks)


class ForeignEnv(ForkableEnv):
    """An environment of another library as a ``gymnasium.Env[str, str]`` that forks; see the module's documentation.

    Args:
        forks: how this environment is forked.
        draws: which process-wide generators it draws from at a step. With any, one environment is stepped at a time.
        stop_strings: where sampling of a turn ends, for libraries whose protocol has closing tags.
        error_reward: what a turn at which the library raises is worth; None: the trajectory is left unscored.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    """Names of the parts of the reward."""
    isolation: str = ""
    """Level (:data:`arpo_env.sandbox.isolation.LEVELS`) at which the library runs the policy's code; "" where it runs none."""
    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {"telemetry", "stop_strings", "error_reward", "fork_support", "draws", "_start"}

    def __init__(self, *, forks: Forks, draws: Draws, stop_strings: Sequence[str], error_reward: float | None) -> None:
        super().__init__()
        if forks not in ("copy", "replay"):
            raise ValueError(f"forks must be 'copy' or 'replay', got {forks!r}")
        if isinstance(stop_strings, str):
            raise TypeError(f"stop_strings must be a sequence of strings, got the string {stop_strings!r}")
        self.fork_support = forks
        self.draws = draws
        self.stop_strings = tuple(stop_strings)
        self.error_reward = error_reward
        self.telemetry = Telemetry()
        self.turn = 0
        self._generators = ProcessGenerators()
        self._held = _Held(None, forks)
        self._start: Any = None
        self._record: tuple[Outcome, ...] = ()
        self._turns: tuple[str, ...] = ()
        self._task_id = ""
        self._stop_reason = "not begun"
        self._n_tool_calls = 0

    # -- what an adapter writes ----------------------------------------------------------------------------------------------------------------------

    def _choose(self, wanted: Any) -> Any:
        """What decides the episode alone: made of ``options["task"]`` where that is not None, else drawn with ``self.np_random``."""
        raise NotImplementedError

    def _open(self, start: Any) -> tuple[str, Outcome]:
        """Begin the episode that ``start`` decides, in an environment of the library's of its own (:meth:`_renew`), all state of the adapter included.

        Returns the id of the task and the first messages.
        """
        raise NotImplementedError

    def _take(self, action: str) -> Outcome:
        """What the library makes of a turn. Calls of the library stand in ``with self._library():``."""
        raise NotImplementedError

    def _mend(self, env: Any) -> None:
        """Put right what a deepcopy of the library's environment gets wrong."""

    def _close_library(self, env: Any) -> None:
        """Free what the library's environment holds."""

    @property
    def library_env(self) -> Any:
        """The library's own environment, to look at. What is done to it directly is not part of the record of an episode."""
        return self._held.env

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """Around a call of the library during an episode: its generators are this environment's, and what it raises ends the episode."""
        with contextlib.nullcontext() if self.draws == "nothing" else self._generators.in_force(numpy=self.draws == "both"), self._foreign():
            yield

    @contextlib.contextmanager
    def _foreign(self) -> Iterator[None]:
        """Around a call of other code that is not ours during an episode: what it raises ends the episode."""
        try:
            yield
        except Exception as error:
            raise _LibraryFailed from error

    def _renew(self, make: Callable[[], Any]) -> Any:
        """A new environment of the library's, kept as this episode's; the former one is closed."""
        former, self._held.env = self._held.env, None
        if former is not None:
            self._close_library(former)
        self._held.env = make()
        return self._held.env

    # -- the episode ---------------------------------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._running, self._stop_reason = False, "not begun"  # until all below has succeeded
        self._start = self._choose((options or {}).get("task"))
        opening = self._begin(self._start)
        self._running, self._stop_reason = True, ""
        return opening.messages[-1]["content"], self._info(opening)

    def _begin(self, start: Any) -> Outcome:
        self.turn, self._n_tool_calls, self._turns = 0, 0, ()
        try:
            self._task_id, opening = self._open(start)
        except _LibraryFailed as failure:  # without an episode there is nobody to tell but the caller
            raise failure.__cause__ or failure from None
        self._record = (opening,)
        return opening

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Hand one turn to the library; give what it answers ("" when the episode ended)."""
        if not isinstance(action, str):
            raise TypeError(f"an action is the text of one turn, a str, got {type(action).__name__}")
        self._check_running()
        outcome = self._advance(action)
        if outcome.terminated or outcome.truncated:
            self._stop_reason = outcome.stop_reason or ("answer" if outcome.terminated else "max_turns")
            return "", outcome.reward, outcome.terminated, outcome.truncated, self._info(outcome)
        return "\n".join(message["content"] for message in outcome.messages), outcome.reward, False, False, self._info(outcome)

    def truncate(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode from outside, without a result. Returns what ``step`` returns."""
        if not reason:
            raise ValueError("reason must say why the episode ends, got an empty string")
        self._check_running()
        self._stop_reason = reason
        return "", 0.0, False, True, self._info(Outcome())

    def close(self) -> None:
        if not self._closed:
            super().close()
            if self._held.env is not None:
                self._close_library(self._held.env)

    def _advance(self, action: str) -> Outcome:
        self.turn += 1
        try:
            outcome = self._take(action)
        except _LibraryFailed as failure:
            assert isinstance(failure.__cause__, Exception)
            outcome = self._failed(failure.__cause__)
        self._n_tool_calls += sum(bool(call["executed"]) for call in outcome.calls)
        if self.fork_support == "replay":
            self._turns, self._record = (*self._turns, action), (*self._record, outcome)
        return outcome

    def _failed(self, error: Exception) -> Outcome:
        message = f"{type(error).__name__}: {error}"
        reason = "env_error" if self.error_reward is None or isinstance(error, INFRASTRUCTURE) else "library_error"
        log.warning("%s, task %r, turn %d: %s: %s", type(self).__name__, self._task_id, self.turn, reason, message, exc_info=error)
        self.telemetry.add(**{reason: 1.0})
        reward = (self.error_reward or 0.0) if reason == "library_error" else 0.0
        return Outcome(reward=reward, truncated=True, stop_reason=reason, answer=message, errors=(message,), scored=reason == "library_error")

    def _check_running(self) -> None:
        if self._closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new environment")
        if self._stop_reason:
            raise ResetNeeded(f"{type(self).__name__}: no episode is going on ({self._stop_reason}); call reset()")

    # -- forking -------------------------------------------------------------------------------------------------------------------------------------

    def fork_many(self, n: int) -> list[Self]:
        try:
            return super().fork_many(n)
        except ForkError:
            raise
        except Exception as error:
            advice = "it is not deterministic" if self.fork_support == "replay" else 'its state cannot be deep-copied: pass forks="replay" to fork by replay'
            raise ForkError(f"{self._task_id} cannot be forked by {self.fork_support}: {type(error).__name__}: {error}; {advice}") from error

    def _fork_into(self, twin: Self) -> None:
        if self.fork_support == "replay":
            self._replay_into(twin)
        else:
            twin._mend(twin._held.env)

    def _replay_into(self, twin: Self) -> None:
        try:
            self._compare("reset", self._record[0], twin._begin(self._start))
            for number, (action, recorded) in enumerate(zip(self._turns, self._record[1:], strict=True), start=1):
                self._compare(f"turn {number}", recorded, twin._advance(action))
        except BaseException:
            twin.close()
            raise

    def _compare(self, where: str, recorded: Outcome, replayed: Outcome) -> None:
        if recorded != replayed:
            raise ForkError(f"replay differs at {where}: recorded {recorded!r:.200}, replayed {replayed!r:.200}; {self._task_id} is not deterministic")

    # -- info ----------------------------------------------------------------------------------------------------------------------------------------

    def _info(self, outcome: Outcome) -> dict[str, Any]:
        """The keys of :class:`arpo_env.ToolEnv`."""
        ended = bool(self._stop_reason)
        return {
            "turn": self.turn,
            "messages": [] if ended else [dict(message) for message in outcome.messages],
            "observation_role": "user",
            "stop_strings": self.stop_strings,
            "tools": [],
            "tool_calls": [copy.deepcopy(dict(call)) for call in outcome.calls],
            "n_tool_calls": self._n_tool_calls,
            "errors": list(outcome.errors),
            "answer": outcome.answer,
            "reward": dict.fromkeys(self.parts, 0.0) | dict(outcome.parts),
            "scored": outcome.scored,
            "stop_reason": self._stop_reason,
            "task_id": self._task_id,
            "isolation": self.isolation,
        }


class Episodes(Shared):
    """The episodes of an environment that are told apart by a number, the seed that the library is given: tasks without end."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, index: int, /) -> Task:
        number = operator.index(index)
        if number < 0:
            raise IndexError(f"the number of an episode must be at least 0, got {number}")
        return Task(question=f"{self.name}, episode {number}", id=f"{self.name}/{number}", metadata=MappingProxyType({"episode": number}))

    def sample(self, rng: np.random.Generator, /) -> Task:
        """An episode drawn with one draw from ``rng``."""
        return self[int(rng.integers(2**31))]

    def number(self, wanted: Any, rng: np.random.Generator) -> int:
        """The number that ``options["task"]`` names: itself, or that of one of these tasks; without any, a draw."""
        task = self.sample(rng) if wanted is None else wanted if isinstance(wanted, Task) else self[wanted]
        if not isinstance(task.metadata.get("episode"), int):
            raise ValueError(f"task {task.id!r} is no episode of {self.name}; take it from env.tasks")
        return int(task.metadata["episode"])

"""Environments behind an OpenEnv server as ``gymnasium.Env[str, str]`` that fork.

::

    env = OpenEnvEnv("http://127.0.0.1:8000")  # a server made by arpo_env.interop.openenv_server
    env = OpenEnvEnv("https://openenv-echo-env.hf.space", action=lambda text: {"message": text}, observation=lambda o: o["echoed_message"])

One environment is one session on the server (:mod:`arpo_env.interop.openenv_session`); the package ``websockets`` is all it needs.

OpenEnv has no message for forking. A fork is therefore a new session in which the reset and the actions so far are replayed and compared
(``fork_support == "replay"``). Servers made by :mod:`arpo_env.interop.openenv_server` copy their environment themselves; with them ``fork_support`` is, from
the first ``reset`` on, that of the environment behind the server, and ``info`` is its ``info``.

What becomes of failures:

* a text that is no action (``action`` raises ``ValueError``, or the server finds its dict invalid): an observation that says so; nothing was done;
* the server raises in ``step``, stays silent for ``timeout`` seconds or is gone: the episode is truncated, ``scored`` False, with the stop reason
  ``env_error`` or ``env_timeout`` and the message in ``answer``; the next ``reset`` begins a new session;
* the same in ``reset``: ``ConnectionError`` or :class:`Refused`; in ``fork``: :class:`arpo_env.ForkError`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from arpo_env.forking import ForkableEnv, ForkError
from arpo_env.interop.openenv_session import Refused, Session
from arpo_env.task import Task
from arpo_env.tools.base import ForkSupport


def text_action(text: str) -> dict[str, Any]:
    """The action of servers made by :mod:`arpo_env.interop.openenv_server`."""
    return {"text": text}


def text_observation(observation: Mapping[str, Any]) -> str:
    """The field ``text`` of an observation. Raises ``ValueError`` where there is none."""
    text = observation.get("text")
    if not isinstance(text, str):
        raise ValueError(
            f"expected an observation with a string 'text', got one with {sorted(observation)};"
            " pass observation=, a function from the observation to the text that the policy reads"
        )
    return text


@dataclass(frozen=True, slots=True)
class _Reading:
    """What an answer of the server says to a policy. ``info`` is filled by servers of :mod:`arpo_env.interop.openenv_server` alone."""

    text: str
    reward: float | None
    done: bool
    truncated: bool
    info: dict[str, Any] | None = field(default=None, compare=False)


class OpenEnvEnv(ForkableEnv):
    """An environment of the OpenEnv server at ``base_url``.

    Args:
        base_url: ``http://``, ``https://``, ``ws://`` or ``wss://``.
        action: the server's action for a turn of the policy; raises ``ValueError`` with words for the policy where the text is none.
        observation: the text that the policy reads of the server's observation.
        system_prompt: opens the conversation, for servers that say nothing of how to act; "" for none.
        stop_strings: where sampling of a turn ends.
        timeout: seconds to wait for the connection and for each answer.
        headers: sent when connecting, for example ``{"Authorization": "Bearer ..."}`` for a private Space.

    ``reset`` hands its seed and options on as the server's reset arguments, ``options={"task": ...}`` as ``task``. Without a seed one is drawn, because an
    episode that began from an unknown state cannot be replayed. Episodes have no limit of turns here: wrap in ``TimeLimit`` where the server sets none.
    """

    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {"base_url", "action", "observation", "headers", "_session", "_start", "_record"}

    def __init__(
        self,
        base_url: str,
        *,
        action: Callable[[str], Mapping[str, Any]] = text_action,
        observation: Callable[[Mapping[str, Any]], str] = text_observation,
        system_prompt: str = "",
        stop_strings: Sequence[str] = (),
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if urlsplit(base_url).scheme not in ("http", "https", "ws", "wss"):
            raise ValueError(f"base_url must begin with http://, https://, ws:// or wss://, got {base_url!r}")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout!r}")
        self.base_url = base_url
        self.action = action
        self.observation = observation
        self.system_prompt = system_prompt
        self.stop_strings = tuple(stop_strings)
        self.timeout = timeout
        self.headers = dict(headers or {})
        self._session: Session | None = None
        self._start: tuple[dict[str, Any], _Reading] | None = None
        self._record: tuple[tuple[Mapping[str, Any], _Reading], ...] = ()
        self._turn = 0
        self._rewarded = False
        self._server_forks: ForkSupport | None = None
        self._stop_reason = "not begun"

    @property
    def fork_support(self) -> ForkSupport:  # type: ignore[override]
        """``replay``, unless the server said at ``reset`` that it can do it."""
        return self._server_forks or "replay"

    # -- the episode ---------------------------------------------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. Raises ``ConnectionError`` or ``TimeoutError`` where no server answers, :class:`Refused` where it raises."""
        super().reset(seed=seed)
        self._running, self._stop_reason = False, "not begun"  # until all below has succeeded
        start = {**(options or {}), "seed": int(self.np_random.integers(2**31)) if seed is None else seed}
        if isinstance(start.get("task"), Task):
            start["task"] = json.loads(start["task"].to_json())
        data = self._asked_to_reset(start)
        opening = self._read(data)
        self._server_forks = data["observation"].get("fork_support") if opening.info is not None else None
        self._start, self._record = (start, opening), ()
        self._turn, self._rewarded = 0, False
        self._running, self._stop_reason = True, ""
        if opening.info is not None:
            return opening.text, opening.info
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return opening.text, self._info(messages=[*system, {"role": "user", "content": opening.text}])

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the action that a turn stands for; give what the policy reads of the answer. What fails is described at the top of this file."""
        if not isinstance(action, str):
            raise TypeError(f"an action is the text of one turn, a str, got {type(action).__name__}")
        session = self._running_session()
        self._turn += 1
        try:  # JSON that a server accepts holds no lone surrogates
            payload = self.action(action.encode("utf-8", "replace").decode("utf-8"))
        except ValueError as error:
            return self._not_understood(str(error))
        try:
            reading = self._read(session.ask("step", payload))
        except Refused as error:
            return self._not_understood(error.message) if error.code == "VALIDATION_ERROR" else self._broken(error)
        except OSError as error:
            return self._broken(error)
        self._record = (*self._record, (payload, reading))
        return self._outcome(reading)

    def truncate(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode from outside. A server of this library scores it as it stands, any other is left where it is, at reward 0."""
        if not reason:
            raise ValueError("reason must say why the episode ends, got an empty string")
        session = self._running_session()
        assert self._start is not None
        if self._start[1].info is None:
            self._stop_reason = reason
            return "", 0.0, False, True, self._info()
        try:
            return self._outcome(self._read(session.ask("step", {"truncate": reason})))
        except (Refused, OSError) as error:
            return self._broken(error)

    def close(self) -> None:
        super().close()
        self._drop_session()

    def _asked_to_reset(self, start: Mapping[str, Any]) -> dict[str, Any]:
        if self._session is not None:
            with contextlib.suppress(OSError):  # lost since the last episode: begin another
                return self._session.ask("reset", start)
        self._drop_session()
        self._session = Session(self.base_url, timeout=self.timeout, headers=self.headers)
        return self._session.ask("reset", start)

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _running_session(self) -> Session:
        if self._closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new environment")
        if self._stop_reason or self._session is None:
            raise ResetNeeded(f"{type(self).__name__}: no episode is going on ({self._stop_reason}); call reset()")
        return self._session

    # -- answers -------------------------------------------------------------------------------------------------------------------------------------

    def _read(self, data: Mapping[str, Any]) -> _Reading:
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise Refused("BAD_ANSWER", f"expected an observation, got {data!r:.200}")
        info = observation.get("info")
        ours = isinstance(info, dict) and {"task_id", "stop_reason", "messages", "stop_strings"} <= info.keys()
        reward = data.get("reward")
        if not (reward is None or isinstance(reward, int | float)):
            raise Refused("BAD_ANSWER", f"expected a number or null as reward, got {reward!r:.200}")
        return _Reading(
            text=self.observation(observation),
            reward=None if reward is None else float(reward),
            done=bool(data.get("done")),
            truncated=observation.get("truncated") is True,
            info={**info, "stop_strings": tuple(info["stop_strings"])} if ours and info else None,
        )

    def _outcome(self, reading: _Reading) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._rewarded |= reading.reward is not None
        terminated, truncated = reading.done and not reading.truncated, reading.truncated
        if reading.info is not None:
            self._stop_reason, info = reading.info["stop_reason"], reading.info
        else:
            self._stop_reason = "terminated" if terminated else "truncated" if truncated else ""
            messages = [] if self._stop_reason else [{"role": "user", "content": reading.text}]
            info = self._info(messages=messages, scored=self._rewarded or not self._stop_reason)
        return reading.text, reading.reward or 0.0, terminated, truncated, info

    def _not_understood(self, message: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        text = f"That was no valid action: {message}"
        return text, 0.0, False, False, self._info(messages=[{"role": "user", "content": text}], errors=[message])

    def _broken(self, error: Exception) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._stop_reason = "env_timeout" if isinstance(error, TimeoutError) else "env_error"
        self._drop_session()
        return "", 0.0, False, True, self._info(errors=[str(error)], answer=str(error), scored=False)

    def _info(self, *, messages: Sequence[dict[str, str]] = (), errors: Sequence[str] = (), answer: str = "", scored: bool = True) -> dict[str, Any]:
        """The keys of :class:`arpo_env.ToolEnv`, as far as a foreign server fills them."""
        return {
            "turn": self._turn,
            "messages": list(messages),
            "observation_role": "user",
            "stop_strings": self.stop_strings,
            "tools": [],
            "tool_calls": [],
            "n_tool_calls": 0,
            "errors": list(errors),
            "answer": answer,
            "reward": {},
            "scored": scored,
            "stop_reason": self._stop_reason,
            "task_id": "",
            "isolation": "",
        }

    # -- forking -------------------------------------------------------------------------------------------------------------------------------------

    def _copied(self) -> Self:
        twin = super()._copied()
        twin._session = None
        return twin

    def fork_many(self, n: int) -> list[Self]:
        """``n`` copies: made by the server at once where it can, else each by replay. The forks of an episode that ended have no session."""
        if self._server_forks is None or self._session is None or self._stop_reason or not self._running:
            return super().fork_many(n)
        twins = [self._copied() for _ in range(n)]
        try:
            keys = self._session.ask("step", {"fork": n})["observation"]["forks"]
            for twin, key in zip(twins, keys, strict=True):
                twin._session = Session(self.base_url, timeout=self.timeout, headers=self.headers)
                twin._session.ask("reset", {"adopt": key})
        except BaseException as error:
            for twin in twins:
                twin.close()
            if isinstance(error, Refused | OSError):
                raise ForkError(f"the server could not fork its environment: {error}") from error
            raise
        return twins

    def _fork_into(self, twin: Self) -> None:
        if self._stop_reason or self._start is None:
            return
        try:
            start, opening = self._start
            twin._compare("reset", opening, twin._asked_to_reset(start))
            assert twin._session is not None
            for number, (payload, recorded) in enumerate(self._record, 1):
                twin._compare(f"step {number}", recorded, twin._session.ask("step", payload))
        except BaseException as error:
            twin.close()
            if isinstance(error, Refused | OSError):
                raise ForkError(f"the episode could not be replayed in a new session: {error}") from error
            raise

    def _compare(self, where: str, recorded: _Reading, data: Mapping[str, Any]) -> None:
        replayed = self._read(data)
        if replayed != recorded:
            raise ForkError(
                f"replay differs at {where}: recorded {recorded!r:.200}, replayed {replayed!r:.200}; the server is not deterministic or drops the seed"
            )

"""Any text environment as an OpenEnv server.

::

    serve(lambda: ToolEnv(tasks, tools=[search]), port=8000)  # or, in a module that uvicorn or a Space runs:
    app = openenv_app(lambda: gymnasium.make("arpo/World-v0"))

Each session gets an environment of its own from the function, closed when the session ends or the server stops. The action is ``{"text": a turn of the
policy}``; the observation holds the ``text`` that the policy reads, ``truncated`` beside OpenEnv's ``done``, and the whole ``info``. Arguments of ``reset``:
``seed`` decides the episode alone; ``task`` (a row or an index) and whatever else is given become the environment's ``options``. ``index`` is OpenEnv's
word for ``task``, and its task discovery (``num_tasks``, ``get_task``, ...) is answered where the environment has a task set; reference answers stay here.

Beyond the protocol, for :class:`arpo_env.interop.openenv.OpenEnvEnv`: the action ``{"fork": n}`` forks the environment ``n`` times and answers with ``n``
keys; a new session that begins with ``reset(adopt=key)`` goes on with that fork. Forks that nobody adopted are closed with the session that made them.
The action ``{"truncate": reason}`` ends the episode and scores it as it stands.

OpenEnv's plain HTTP endpoints ``/reset`` and ``/step`` make a new environment for each request; episodes need the websocket ``/ws``, which all of its
clients use.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import gymnasium

from arpo_env.forking import fork, fork_support
from arpo_env.task import Task

try:
    import fastapi
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, EnvironmentMetadata, Observation, State
except ImportError as error:
    raise ImportError("serving environments needs openenv: pip install 'arpo[openenv-server]'") from error

Env = gymnasium.Env[str, str]


class TextAction(Action):  # type: ignore[misc]
    """A turn of the policy; or, with ``text`` left out, one of the two requests beyond the protocol."""

    text: str = ""
    truncate: str = ""
    fork: int = 0


class TextObservation(Observation):  # type: ignore[misc]
    """What the environment adds to the conversation."""

    text: str = ""
    truncated: bool = False
    info: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults
    fork_support: str = ""
    """How ``{"fork": n}`` would copy the environment: ``native``, ``copy``, ``replay`` or ``none``."""
    forks: list[str] = []  # noqa: RUF012
    """Keys of the forks made."""


class Parked:
    """Forks that no session has adopted yet. Thread-safe: each session has a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks: dict[str, tuple[object, Env]] = {}

    def park(self, owner: object, envs: list[Env]) -> list[str]:
        """Keys for ``envs``, forks that the session ``owner`` made."""
        keys = [uuid.uuid4().hex for _ in envs]
        with self._lock:
            self._forks.update({key: (owner, env) for key, env in zip(keys, envs, strict=True)})
        return keys

    def adopt(self, key: str) -> Env:
        """The fork of that key, once. Raises ``KeyError``."""
        with self._lock:
            if key not in self._forks:
                raise KeyError(f"no fork waits under the key {key!r}: it was adopted before, or the session that made it has ended")
            return self._forks.pop(key)[1]

    def close(self, owner: object) -> None:
        """Close the forks of a session that ends."""
        with self._lock:
            keys = [key for key, (maker, _) in self._forks.items() if maker is owner]
            envs = [self._forks.pop(key)[1] for key in keys]
        for env in envs:
            env.close()


class ServedEnv(Environment[TextAction, TextObservation, State]):  # type: ignore[misc]
    """The environment of one session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, make: Callable[[], Env], parked: Parked) -> None:
        super().__init__()
        self._make = make
        self._parked = parked
        self._state = State()
        self._env: Env | None = None

    @property
    def env(self) -> Env:
        """Built when first needed: a session that adopts a fork needs none of its own."""
        if self._env is None:
            self._env = self._make()
        return self._env

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, adopt: str | None = None, task: Any = None, index: int | None = None, **options: Any
    ) -> TextObservation:
        """Begin an episode, or go on with an adopted fork."""
        self._state = State(episode_id=episode_id or uuid.uuid4().hex)
        if adopt is not None:
            adopted = self._parked.adopt(adopt)
            self._close_env()
            self._env = adopted
            return TextObservation(fork_support=fork_support(self.env))
        wanted = _task(task) if task is not None else index
        chosen = options if wanted is None else {**options, "task": wanted}
        text, info = self.env.reset(seed=seed, options=chosen or None)
        return TextObservation(text=_portable(text), info=_portable(info), fork_support=fork_support(self.env))

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        """Take a turn. Tools have deadlines of their own; ``timeout_s`` is not used."""
        if action.fork:
            return TextObservation(forks=self._parked.park(self, fork(self.env, action.fork)))
        unwrapped: Any = self.env.unwrapped
        text, reward, terminated, truncated, info = unwrapped.truncate(action.truncate) if action.truncate else self.env.step(action.text)
        self._state = State(episode_id=self._state.episode_id, step_count=self._state.step_count + 1)
        return TextObservation(text=_portable(text), reward=float(reward), done=terminated or truncated, truncated=truncated, info=_portable(info))

    @property
    def state(self) -> State:
        return self._state

    def get_metadata(self) -> EnvironmentMetadata:
        unwrapped = self.env.unwrapped
        return EnvironmentMetadata(name=type(unwrapped).__name__, description=(type(unwrapped).__doc__ or "").strip().partition("\n")[0], version="1")

    def close(self) -> None:
        self._parked.close(self)
        self._close_env()

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()

    # -- OpenEnv's task discovery --------------------------------------------------------------------------------------------------------------------

    def list_splits(self) -> list[dict[str, str]]:
        return [{"name": "train", "type": "train"}]

    def num_tasks(self, split: str) -> int:
        return len(self._tasks())

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        task = self._tasks()[index]
        return {"id": task.id, "index": index, "question": task.question}

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self.get_task(split, index) for index in range(*slice(start, stop).indices(self.num_tasks(split)))]

    def _tasks(self) -> Any:
        tasks = getattr(self.env.unwrapped, "tasks", None)
        if not hasattr(tasks, "__len__"):
            raise ValueError(f"{type(self.env.unwrapped).__name__} draws its tasks and has no list of them; reset(seed=...) chooses one")
        return tasks


def openenv_app(make: Callable[[], Env], *, max_sessions: int = 64, name: str = "arpo") -> fastapi.FastAPI:
    """A FastAPI app that serves the environments that ``make`` builds, at most ``max_sessions`` at once; a fork in use is a session too.

    ``make`` is called for each session: build what they share (tasks, indexes) outside of it.
    """
    return create_app(functools.partial(ServedEnv, make, Parked()), TextAction, TextObservation, env_name=name, max_concurrent_envs=max_sessions)


def serve(make: Callable[[], Env], *, host: str = "127.0.0.1", port: int = 8000, max_sessions: int = 64, name: str = "arpo") -> None:
    """Serve until interrupted. Listens on this machine alone unless ``host`` says otherwise: whoever reaches the server can run its tools."""
    import uvicorn

    uvicorn.run(openenv_app(make, max_sessions=max_sessions, name=name), host=host, port=port)


_TASK_FIELDS = {f.name for f in fields(Task)}


def _task(given: Any) -> Any:
    """The :class:`Task` that a client took apart; a row or an index as it is."""
    return Task.from_json(json.dumps(given)) if isinstance(given, dict) and set(given) == _TASK_FIELDS else given


def _portable(value: Any) -> Any:
    """``value`` as JSON has it; what JSON lacks becomes its ``repr``, a lone surrogate ``?``."""
    return json.loads(json.dumps(value, ensure_ascii=False, default=repr).encode("utf-8", "replace"))

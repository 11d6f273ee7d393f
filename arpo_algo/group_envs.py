"""The environments of one group: they open alike, each is closed once, and none is left open when the group is over."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium

from arpo_algo.env_source import EnvSource
from arpo_algo.env_worker import Env, EnvWorker
from arpo_env.core import fork

log = logging.getLogger(__name__)


class GroupEnvs:
    """Makes, forks and closes environments by calls of ``worker``.

    Whoever waits for a call may give up before its thread is done. So the thread notes what it made, and closes it again where the group is over by then.
    """

    def __init__(self, source: EnvSource, options: Mapping[str, Any] | None, seed: int, worker: EnvWorker) -> None:
        self._source, self._options, self._seed, self._worker = source, options, seed, worker
        self.opening: Mapping[str, Any] = {}
        """The info of the first reset. It holds ``messages``: the observation as a user message where a foreign environment gives none."""
        self._open: dict[int, Env] = {}
        self._over = False

    async def roots(self, n: int) -> list[Env]:
        """``n`` environments after the same reset. Raises ``ValueError`` when a function makes environments that open differently."""
        return await self._worker(lambda: self._own(self._roots(n)))

    async def forks(self, env: Env, n: int) -> list[Env]:
        return await self._worker(lambda: self._own(fork(env, n)))

    async def close(self, envs: Iterable[Env | None]) -> None:
        """Close those that are not closed yet."""
        try:
            await self._worker(lambda: self._close(envs))
        except TimeoutError:
            log.warning("closing an environment of task %r hangs", self.opening.get("task_id", ""))

    async def end(self) -> None:
        """The group is over: close all."""
        self._over = True
        await self.close(list(self._open.values()))

    def _roots(self, n: int) -> list[Env]:
        if isinstance(self._source, gymnasium.Env):
            self.opening = self._reset(self._source)
            return fork(self._source, n)
        made: list[Env] = []
        try:
            for _ in range(n):
                made.append(self._source())
                info = self._reset(made[-1])
                self.opening = self.opening or info
                if info["messages"] != self.opening["messages"]:
                    raise ValueError(
                        f"one group needs one task, but reset(seed={self._seed}, options={self._options}) gave {self.opening['messages']}"
                        f" and then {info['messages']}: the environment ignores its seed"
                    )
        except BaseException:
            for env in made:
                env.close()
            raise
        return made

    def _reset(self, env: Env) -> Mapping[str, Any]:
        observation, info = env.reset(seed=self._seed, options=dict(self._options) if self._options else None)
        return info if "messages" in info else {**info, "messages": [{"role": "user", "content": observation}]}

    def _own(self, envs: list[Env]) -> list[Env]:
        self._open.update((id(env), env) for env in envs)
        if self._over:
            self._close(envs)
        return envs

    def _close(self, envs: Iterable[Env | None]) -> None:
        for env in envs:
            if env is None or self._open.pop(id(env), None) is None:
                continue
            try:
                env.close()
            except Exception:
                log.warning("closing an environment of task %r failed", self.opening.get("task_id", ""), exc_info=True)

"""Environments that stand at the start of the same episode: what the trajectories of a group start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from arpo_algo.env_worker import Env
from arpo_env.core import fork

EnvSource = Env | Callable[[], Env]
"""One environment, which is reset for each group and forked for each trajectory; or a function that makes environments."""


def make_roots(
    source: EnvSource, n: int, *, seed: int, options: Mapping[str, Any] | None, expected: Mapping[str, Any] | None = None
) -> tuple[list[Env], Mapping[str, Any]]:
    """``n`` environments after the same ``reset``, and its info, which holds ``messages`` (the observation as a user message where a foreign one gives none).

    ``expected``: the info of an earlier call for the same group. Raises ``ValueError`` when a function makes environments that open differently.
    """
    if isinstance(source, gymnasium.Env):
        info = _reset(source, seed, options)
        return fork(source, n), info
    made: list[Env] = []
    try:
        for _ in range(n):
            made.append(source())
            info = _reset(made[-1], seed, options)
            expected = expected or info
            if info["messages"] != expected["messages"]:
                raise ValueError(
                    f"one group needs one task, but reset(seed={seed}, options={options}) gave {expected['messages']} and then {info['messages']}:"
                    " the environment ignores its seed"
                )
    except BaseException:
        for env in made:
            env.close()
        raise
    return made, expected or {}


def _reset(env: Env, seed: int, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    observation, info = env.reset(seed=seed, options=dict(options) if options else None)
    return info if "messages" in info else {**info, "messages": [{"role": "user", "content": observation}]}

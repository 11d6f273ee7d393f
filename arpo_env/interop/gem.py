"""GEM (github.com/axon-rl/gem, extra ``gem``) as ``gymnasium.Env[str, str]`` that forks.

::

    env = GemEnv("game:GuessTheNumber-v0-easy")
    env = GemEnv(lambda: ToolEnvWrapper(gem.make("rg:leg_counting"), tools=[PythonCodeTool()]))

The turn goes to GEM exactly as the policy wrote it, thoughts included, because GEM's own parsing (the last ``\\boxed{}``, the first code block) is defined
on the whole turn. What the policy reads is the new observation with the prefix and suffix that GEM's ``info`` asks for (a game's board is only there),
never the history: do not wrap in GEM's ``ObservationWrapper``.

Departures from GEM: an episode of one turn is ``terminated`` alone, where GEM sets both flags; every episode begins in an environment as it was made (GEM's
carry counters from one episode to the next); nothing outside sees or changes GEM's draws from ``random`` and ``numpy.random``.

Fork: by copy for the games, the reasoning-gym tasks and GEM's ToolEnvWrapper with GEM's own Python and search tools; by replay for all else. GEM holds the
process-wide generators during a step, so tool calls of GEM's environments run one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from arpo_env.interop.foreign import Episodes, ForeignEnv, Forks, Message, Outcome
from arpo_env.interop.foreign_library import ProcessGenerators, check_known, defined_in, load, making, uses_numpy

COPIED = (
    "gem.envs.game_env",
    "gem.envs.reasoning_gym",
    "gem.envs.qa_env",
    "gem.tools.tool_env_wrapper",
    "gem.tools.python_code_tool",
    "gem.tools.search_tool",
    "gem.wrappers.episode_tracking_wrapper",
)
"""Modules whose environments, wrappers and tools hold nothing but plain Python objects, so that a deepcopy is an independent copy."""
RUN_CODE = ("gem.tools.python_code_tool", "gem.envs.code_env")
"""Modules that run the policy's code, in processes of this machine that nothing but a time limit holds."""


class GemEnv(ForeignEnv):
    """An environment of GEM.

    Args:
        env: the id of a registered environment, or a function that makes one (with tools, for example).
        forks: overrules how it is forked; None: as the module says.
        stop_strings: where sampling of a turn ends, for example ``("</python>",)`` with the Python tool.
        error_reward: what a turn at which GEM raises is worth; None: the trajectory is left unscored.
        config: further arguments of the registered environment.

    ``options={"task": n}`` gives the episode of GEM's own ``reset(seed=n)``; ``env.tasks`` are these. Raises ``ValueError`` for an unknown id,
    ``ImportError`` and ``FileNotFoundError`` for what an environment needs beyond the extra (``datasets``, ``pylatexenc``, word lists of NLTK).
    """

    shared = ForeignEnv.shared | {"tasks", "_make", "_prototype", "_name"}

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        forks: Forks | None = None,
        stop_strings: Sequence[str] = (),
        error_reward: float | None = None,
        **config: Any,
    ) -> None:
        gem = load("gem", "gem")
        if isinstance(env, str):
            check_known(env, load("gem.envs.registration", "gem").ENV_REGISTRY, "GEM")
        elif config:
            raise TypeError(f"arguments go to the function that makes the environment, got {sorted(config)}")
        self._make: Callable[[], Any] = partial(gem.make, env, **config) if isinstance(env, str) else env
        self._name = env if isinstance(env, str) else getattr(env, "__name__", "gem")
        self.tasks = Episodes(self._name)
        self._prototype = self._made(self._make)
        parts = _parts(self._prototype)
        known = all(defined_in(part, COPIED) for part in parts)
        self.isolation = "process" if any(defined_in(part, RUN_CODE) for part in parts) else ""
        super().__init__(
            forks=forks or ("copy" if known else "replay"),
            draws="random" if known and not any(map(uses_numpy, parts)) else "both",
            stop_strings=stop_strings,
            error_reward=error_reward,
        )
        if self.fork_support == "replay":
            self._close_library(self._prototype)
            self._prototype = None
            return
        try:
            copy.deepcopy(self._prototype)
        except Exception as error:
            raise ValueError(f"{self._name} cannot be deep-copied ({error}): forks='replay' forks it by replay") from error

    def _made(self, make: Callable[[], Any]) -> Any:
        with ProcessGenerators().in_force(), making(f"GEM's {self._name}"):
            made = make()
        history = [type(layer).__name__ for layer in _layers(made) if type(layer).__module__ == "gem.wrappers.observation_wrapper"]
        if history:
            raise ValueError(f"{self._name} has GEM's {history[0]}, which repeats the whole conversation in every observation; make it without")
        return made

    def _choose(self, wanted: Any) -> int:
        return self.tasks.number(wanted, self.np_random)

    def _open(self, start: int) -> tuple[str, Outcome]:
        self._generators.seed(start)
        with self._generators.in_force():
            env = self._renew(self._make if self._prototype is None else partial(copy.deepcopy, self._prototype))
            text, info = env.reset(seed=start)
        return self.tasks[start].id, Outcome(messages=_messages(text, info))

    def _take(self, action: str) -> Outcome:
        env = self._held.env
        succeeded = getattr(env, "tool_success_counter", 0)
        with self._library():
            text, reward, terminated, truncated, info = env.step(action)
            messages, reward = _messages(text, info), float(reward)
        terminated, truncated = bool(terminated), bool(truncated) and not terminated
        calls = _calls(info, ok=getattr(env, "tool_success_counter", 0) > succeeded)
        if terminated or truncated:
            last_words = "" if "TERMINAL_STATE" in str(text) else str(text)
            return Outcome(reward=reward, terminated=terminated, truncated=truncated, answer=last_words, calls=calls)
        return Outcome(messages=messages, reward=reward, calls=calls)

    def _close_library(self, env: Any) -> None:
        pool = getattr(env.unwrapped, "mp_pool", None)  # a worker process of GEM's MathEnv, which has no close()
        if pool is not None:
            pool.terminate()


def _layers(env: Any) -> Iterator[Any]:
    """The chain of GEM's wrappers down to the environment inside."""
    while True:
        yield env
        if env.unwrapped is env:
            return
        env = env.env


def _parts(env: Any) -> list[Any]:
    """Wrappers, environment and tools."""
    return [part for layer in _layers(env) for part in (layer, *(getattr(layer, "tools", None) or ()))]


def _messages(text: Any, info: dict[str, Any]) -> tuple[Message, ...]:
    parts = (info.get("prefix"), text, info.get("suffix"))
    return ({"role": "user", "content": "\n".join(str(part) for part in parts if part)},)


def _calls(info: dict[str, Any], *, ok: bool) -> tuple[dict[str, Any], ...]:
    """The call that GEM's ToolEnvWrapper made in this turn. GEM tells the turn up to the end of the call, not the arguments."""
    if "tool_type" not in info:
        return ()
    call = {"name": str(info["tool_type"]), "arguments": {"turn": str(info.get("parsed_action", ""))}, "ok": ok}
    return ({**call, "error": "" if ok else "exception", "executed": True},)

"""The conformance kit: subclass it for your own environment or tool and the whole contract is checked.

::

    class TestMyEnv(arpo_env.testing.EnvConformance):
        def make_env(self):
            return MyEnv()

        actions = ("<search>x</search>", "<answer>y</answer>")  # an episode that does something

pytest and unittest both collect it. :func:`check_fork` is the part that matters most, as a function for any environment; ``arpo check-env`` calls it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
from gymnasium.utils.env_checker import check_env, data_equivalence

from arpo_env.forking import ForkableEnv, ForkError, fork, layers
from arpo_env.tools.base import Tool, ToolResult, check_arguments, check_tool
from arpo_env.wrappers import without_clock

Env = gymnasium.Env[Any, Any]

SAME_TASK = "reset(seed=s) must give the same observation and info every time, also after other resets: the task may depend on the seed alone"
SAME_STEP = "after a fork the same action must give the same observation, reward, flags and info in parent and child"
UNTOUCHED = "stepping one copy must not change the other: something mutable is shared"
OUTLIVES = "a child must go on after its parent was closed"
FAILED = ("env_error", "env_timeout")
"""Stop reasons of an episode that ended because the environment failed (``arpo_env.interop``)."""
HOSTILE = ("", " ", "\x00", "<search>", "</search></python><answer>", "<answer>\\boxed{", "{" * 500, '<tool_call>[1, "a"]</tool_call>', "日本語 🙂 \ud800")


def play(env: Env, actions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """What each action gave, up to the end of the episode."""
    record = []
    for action in actions:
        record.append(env.step(action))
        if record[-1][2] or record[-1][3]:
            break
    return record


def check_fork(make: Callable[[], Env], actions: Sequence[Any], *, seed: int = 0) -> None:
    """Fork at every point of the episode that ``actions`` makes and compare. Raises ``AssertionError`` with the rule that is broken."""
    reference = make()
    reference.reset(seed=seed)
    expected = play(reference, actions)
    reference.close()
    for cut in range(len(expected)):
        _check_fork_at(make, actions[: len(expected)], expected, cut, seed)


def _check_fork_at(make: Callable[[], Env], actions: Sequence[Any], expected: list[tuple[Any, ...]], cut: int, seed: int) -> None:
    parent = make()
    parent.reset(seed=seed)
    play(parent, actions[:cut])
    child, spare = fork(parent, 2)
    grandchild = fork(child)
    for who, env in (("child", child), ("grandchild", grandchild)):
        _compare(play(env, actions[cut:]), expected[cut:], f"{SAME_STEP} ({who}, forked after {cut} steps)")
    _compare(play(parent, actions[cut:]), expected[cut:], f"{UNTOUCHED} (parent stepped after its child, forked after {cut} steps)")
    parent.close()
    parent.close()
    _compare(play(spare, actions[cut:]), expected[cut:], f"{OUTLIVES} (forked after {cut} steps)")
    for env in (child, spare, grandchild):
        env.close()


def _compare(got: list[tuple[Any, ...]], expected: list[tuple[Any, ...]], rule: str) -> None:
    assert len(got) == len(expected), f"{rule}: the episode took {len(got)} more steps, expected {len(expected)}"
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert data_equivalence(_without_clock(one), _without_clock(other)), f"{rule}: {step} steps later got {one!r:.300}, expected {other!r:.300}"


def _without_clock(result: tuple[Any, ...]) -> tuple[Any, ...]:
    *rest, info = result
    return (*rest, without_clock(info) if isinstance(info, dict) else info)


class EnvConformance:
    """The environment contract as tests. Override :meth:`make_env` and ``actions``."""

    actions: Sequence[Any] = ()
    """An episode that does something at every step. It need not end."""

    def make_env(self) -> Env:
        """A new environment, always the same."""
        raise NotImplementedError("define make_env(self), which returns a new environment")

    def test_gymnasium_check_env(self) -> None:
        env = self.make_env().unwrapped
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(env, skip_render_check=env.spec is None)  # without a spec Gymnasium cannot make it again in other render modes

    def test_seed_alone_decides(self) -> None:
        env, other = self.make_env(), self.make_env()
        first = env.reset(seed=7)
        env.reset(seed=8)
        env.reset()
        assert data_equivalence(env.reset(seed=7), first), SAME_TASK
        assert data_equivalence(other.reset(seed=7), first), SAME_TASK
        env.close()
        other.close()

    def test_fork(self) -> None:
        check_fork(self.make_env, self.actions)

    def test_fork_through_wrappers(self) -> None:
        def make() -> Env:
            return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.TimeLimit(self.make_env(), max_episode_steps=100))

        env = make()
        env.reset(seed=0)
        play(env, self.actions[:1])
        twin = fork(env)
        assert type(twin) is type(env), "fork must copy the whole chain of wrappers"
        assert vars(layers(twin)[1])["_elapsed_steps"] == min(1, len(self.actions)), "the state of a wrapper must be forked with it"
        env.close()
        twin.close()

    def test_forks_step_in_threads(self) -> None:
        parent = self.make_env()
        parent.reset(seed=0)
        twins = fork(parent, 8)
        expected = play(parent, self.actions)
        with ThreadPoolExecutor(8) as pool:
            for record in pool.map(lambda env: play(env, self.actions), twins):
                _compare(record, expected, f"{SAME_STEP} (eight forks in eight threads)")
        for env in (parent, *twins):
            env.close()

    def test_fork_of_closed_or_unreset(self) -> None:
        env = self.make_env()
        assert not isinstance(env.unwrapped, ForkableEnv) or _refuses(env), "fork before reset() must be a ForkError"
        env.reset(seed=0)
        env.close()
        env.close()
        assert not isinstance(env.unwrapped, ForkableEnv) or _refuses(env), "fork after close() must be a ForkError"

    def test_the_episode_is_played(self) -> None:
        env = self.make_env()
        env.reset(seed=0)
        for step, (*_, info) in enumerate(play(env, self.actions), 1):
            assert info.get("stop_reason") not in FAILED, f"step {step} failed in the environment itself: {info.get('answer') or info['stop_reason']}"
        env.close()

    def test_any_text_is_answered(self) -> None:
        env = self.make_env()
        for text in HOSTILE:
            env.reset(seed=0)
            observation, reward, *_ = env.step(text)
            assert env.observation_space.contains(observation), f"{text!r}: the observation {observation!r:.80} is not in the observation space"
            assert isinstance(reward, float), f"{text!r}: the reward must be a float, got {reward!r}"
        env.close()


def _refuses(env: Env) -> bool:
    try:
        fork(env).close()
    except ForkError:
        return True
    return False


class ToolConformance:
    """The tool contract as tests. Override :meth:`make_tool` and ``calls``."""

    calls: Sequence[dict[str, Any]] = ()
    """Arguments of calls that succeed, made in this order; for a stateful tool let the later ones depend on the earlier."""

    def make_tool(self) -> Tool:
        """A new prototype, always the same."""
        raise NotImplementedError("define make_tool(self), which returns a new prototype")

    def run(self, tool: Tool, calls: Sequence[dict[str, Any]]) -> list[str]:
        assert self.calls, "calls must name at least one call: without any, nothing is tested"
        texts = []
        for arguments in calls:
            assert check_arguments(tool, arguments) is None, f"{arguments} do not fit the tool's own schema"
            result = tool.call(**arguments)
            assert isinstance(result, str | ToolResult), f"call {arguments} must return str or ToolResult, got {type(result).__name__}"
            result = result if isinstance(result, ToolResult) else ToolResult(result)
            assert result.ok, f"call {arguments} failed: {result.text}"
            texts.append(result.text)
        return texts

    def test_contract(self) -> None:
        tool = self.make_tool()
        check_tool(tool)
        tool.close()
        tool.close()

    def test_episodes_share_nothing(self) -> None:
        prototype = self.make_tool()
        one, two = prototype.bind(), prototype.bind()
        first = self.run(one, self.calls)
        if prototype.deterministic:
            assert self.run(two, self.calls) == first, "a second episode must start from the prototype's state"
        for tool in (one, two, prototype):
            tool.close()

    def test_fork_at_every_call(self) -> None:
        prototype = self.make_tool()
        if prototype.fork_support == "none" or not prototype.deterministic:
            return
        reference = prototype.bind()
        expected = self.run(reference, self.calls)
        reference.close()
        for cut in range(len(self.calls)):
            parent = prototype.bind()
            self.run(parent, self.calls[:cut])
            child, spare = parent.fork(), parent.fork()
            assert self.run(child, self.calls[cut:]) == expected[cut:], f"{SAME_STEP} (tool forked after {cut} calls)"
            assert self.run(parent, self.calls[cut:]) == expected[cut:], f"{UNTOUCHED} (tool forked after {cut} calls)"
            parent.close()
            grandchild = child.fork()
            child.close()
            assert self.run(spare, self.calls[cut:]) == expected[cut:], f"{OUTLIVES} (tool forked after {cut} calls)"
            grandchild.close()
            spare.close()
        prototype.close()

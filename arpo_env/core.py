"""The tool environment: one task, a policy that writes turns, tools that answer.

``step`` takes the text of one turn and gives the text that the environment adds. It never raises because of what the policy wrote or because a tool
failed: both become an observation and an entry of ``info["tool_calls"]``.

``info`` is flat, deterministic and of one shape at every step, so that vector environments stack it and two equal episodes compare equal:

===================  =========================================================================================================
``turn``             turns taken so far
``messages``         what was added to the conversation, as chat messages: system and user at ``reset``, tool or user messages at a step
``observation_role`` how the observation enters the context: ``inline`` (raw text), ``tool`` or ``user`` (chat messages)
``stop_strings``     where sampling of the next turn ends
``tools``            JSON schemas of the tools, for chat templates
``tool_calls``       calls of this turn in order: ``name``, ``arguments``, ``ok``, ``error`` ("" when ok; ``unknown_tool`` where no tool has the
                     name), ``executed``; for each entry of ``errors`` one named ``unparsed`` with error ``malformed``
``n_tool_calls``     calls executed in the episode so far
``errors``           what was wrong with the turn, in the words the model was given
``answer``           the final answer, "" until there is one
``reward``           the parts of the reward, zeros until the episode ends; what could not be graded is then left out
``scored``           False when the episode ended and its answer could not be graded: the reward then means nothing
``stop_reason``      "" while running; ``answer``, ``max_turns``, or what :meth:`ToolEnv.truncate` was given
``task_id``          id of the task
``isolation``        the weakest isolation level of tools that run foreign code (:data:`arpo_env.sandbox.isolation.LEVELS`), "" where none does
===================  =========================================================================================================

Wall-clock values (seconds per tool, timeouts, retries) go to ``env.telemetry``, which forks share.
"""

from __future__ import annotations

import contextlib
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, ClassVar, Self

from gymnasium.error import ClosedEnvironmentError, ResetNeeded

from arpo_env._deadline import DeadlineExceeded, call_with_deadline
from arpo_env.calling import Slots, Telemetry, bind_tool, call_tool, check_prototypes, copy_arguments, weakest_isolation
from arpo_env.episode import Episode, ExecutedCall
from arpo_env.forking import STRENGTH, ForkableEnv, ForkError, TextSpace, fork, fork_support
from arpo_env.formats import CallFormat, ParsedTurn, Tags, ToolCall
from arpo_env.rewards import HierarchicalReward, Reward, Score, as_reward, check_task
from arpo_env.task import Task, TaskSet, TaskSource
from arpo_env.tool_forks import fork_tool
from arpo_env.tools.base import ForkSupport, Tool, ToolResult, check_arguments

__all__ = ["Episode", "ExecutedCall", "ForkError", "ForkableEnv", "Telemetry", "TextSpace", "ToolEnv", "fork", "fork_support"]


class ToolEnv(ForkableEnv):
    """A task, tools and a reward as a ``gymnasium.Env[str, str]`` that forks.

    Args:
        tasks: a :class:`TaskSet`, any :class:`TaskSource`, or rows (mappings with ``question`` and ``answer``).
        tools: prototypes; plain typed functions with a docstring are made into tools. Each episode binds its own instances.
        call_format: how calls are written: ``Tags()`` or ``Hermes()``.
        reward: scores the finished episode; a function ``(task, episode) -> float`` will do. By default the paper's :class:`HierarchicalReward`.
        max_turns: the episode is truncated after so many turns.
        max_tool_calls: calls beyond it are refused with an observation; None: no limit but ``max_turns``.
        max_observation_chars: a longer tool result loses its middle, with a notice.
        system_prompt: replaces the task's own and the format's; "" for none.

    Raises ``TypeError`` or ``ValueError`` at construction for a tool, format or limit that cannot work.
    """

    ability: ClassVar[str | None] = None
    """Of tasks that name none: which grader applies. Every task that begins an episode is given it, wherever it comes from."""
    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's own convention
    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {
        "tasks", "prototypes", "call_format", "reward", "max_turns", "max_tool_calls", "max_observation_chars", "system_prompt",
        "stop_strings", "tool_schemas", "telemetry", "isolation", "_instructions", "_slots", "_episode", "_tools",
    }  # fmt: skip

    def __init__(
        self,
        tasks: TaskSource | Sequence[Mapping[str, Any] | Task],
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        call_format: CallFormat | None = None,
        reward: Reward | Callable[[Task, Episode], float] | None = None,
        max_turns: int = 8,
        max_tool_calls: int | None = None,
        max_observation_chars: int = 16_384,
        system_prompt: str | None = None,
        render_mode: str | None = None,
    ):
        super().__init__()
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, got {max_turns}")
        if max_tool_calls is not None and max_tool_calls < 0:
            raise ValueError(f"max_tool_calls must be at least 0 or None, got {max_tool_calls}")
        if max_observation_chars < 100:
            raise ValueError(f"max_observation_chars must be at least 100, got {max_observation_chars}")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode must be one of {self.metadata['render_modes']}, got {render_mode!r}")
        self.tasks: TaskSource = tasks if hasattr(tasks, "sample") else TaskSet.from_rows(tasks)  # type: ignore[assignment]
        if isinstance(self.tasks, Sized) and not len(self.tasks):
            raise ValueError(f"expected at least one task, got a {type(self.tasks).__name__} without tasks")
        self.prototypes = check_prototypes(tools)
        self.call_format: CallFormat = call_format if call_format is not None else Tags()
        self.reward: Reward = HierarchicalReward() if reward is None else as_reward(reward)
        self.max_turns = max_turns
        self.max_tool_calls = max_tool_calls
        self.max_observation_chars = max_observation_chars
        self.system_prompt = system_prompt
        self.render_mode = render_mode
        self.stop_strings: tuple[str, ...] = self.call_format.stop_strings(list(self.prototypes.values()))
        self._instructions = self.call_format.system_prompt(list(self.prototypes.values()))
        self.tool_schemas = [prototype.schema() for prototype in self.prototypes.values()]
        self.telemetry = Telemetry()
        self.isolation = weakest_isolation(self.prototypes.values())
        self._slots = {name: Slots(prototype.max_concurrency) for name, prototype in self.prototypes.items()}
        self._tools: dict[str, Tool] = {}
        self._episode: Episode | None = None
        self._stepping = False

    # -- the episode ---------------------------------------------------------------------------------------------------------------------------------

    @property
    def episode(self) -> Episode:
        """What happened so far. Raises ``ResetNeeded`` before the first ``reset``."""
        if self._episode is None:
            raise ResetNeeded(f"{type(self).__name__}: call reset() first")
        return self._episode

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begin an episode. ``options={"task": ...}`` takes a :class:`Task`, a row or an index; otherwise the seed alone decides the task."""
        super().reset(seed=seed)
        self._running, self._episode = False, None  # until all below has succeeded
        self._close_tools()
        task = self._choose_task((options or {}).get("task"))
        check_task(self.reward, task)
        for name, prototype in self.prototypes.items():
            self._tools[name] = bind_tool(prototype, self._tools, task)
        self._running, self._episode = True, Episode(task)
        self._render_human(task.question)
        return task.question, self._info(messages=self._opening(task))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the text of one turn; give what the environment adds to the conversation ("" when the episode ended)."""
        if not isinstance(action, str):
            raise TypeError(f"an action is the text of one turn, a str, got {type(action).__name__}")
        self._check_running()
        self._stepping = True
        try:
            return self._step(action)
        finally:
            self._stepping = False

    def _step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        parsed = self.call_format.parse(action, self._tools)
        before = self.episode
        turns, parsed_turns = (*before.turns, action), (*before.parsed, parsed)
        self._render_human(action)
        if parsed.answer is not None and not parsed.calls:
            return self._end(Episode(before.task, turns, parsed_turns, before.observations, before.calls, parsed.answer, "answer"), parsed)
        if len(turns) >= self.max_turns:  # nobody would read the results: the calls are not run
            return self._end(Episode(before.task, turns, parsed_turns, before.observations, before.calls, None, "max_turns"), parsed)
        executed: list[ExecutedCall] = []
        calls: list[dict[str, Any]] = []
        shown: list[tuple[str, ToolResult]] = []
        for call in parsed.calls:
            result, reached = self._execute(call, executed)
            calls.append(_describe(call, result, reached))
            shown.append((call.name, self._shorten(result)))
        observation = self._observation(shown, parsed.errors)
        self._episode = Episode(before.task, turns, parsed_turns, (*before.observations, observation), (*before.calls, *executed))
        self._render_human(observation)
        return observation, 0.0, False, False, self._info(parsed, calls, self._messages(observation, shown, parsed.errors))

    def truncate(self, reason: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """End the episode from outside (context full, interrupted) and score it as it stands. Returns what ``step`` returns."""
        if not reason:
            raise ValueError("reason must say why the episode ends, got an empty string")
        self._check_running()
        return self._end(replace(self.episode, stop_reason=reason))

    def _check_running(self) -> None:
        if self._closed:
            raise ClosedEnvironmentError(f"{type(self).__name__} is closed: make a new environment")
        if self.episode.stop_reason:
            raise ResetNeeded(f"the episode ended ({self.episode.stop_reason}); call reset()")

    def _end(self, episode: Episode, parsed: ParsedTurn | None = None) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._episode = episode
        score = self.reward(episode.task, episode)
        if score.value is not None and not math.isfinite(score.value):
            raise ValueError(f"{type(self.reward).__name__} must give a finite reward or None, got {score.value!r} for task {episode.task.id!r}")
        terminated = episode.stop_reason == "answer"
        reward = score.value if score.value is not None else 0.0
        self._render_human(f"[{episode.stop_reason}, reward {reward if score.value is not None else 'unscored'}]")
        return "", float(reward), terminated, not terminated, self._info(parsed, score=score)

    def _choose_task(self, wanted: Any) -> Task:
        if wanted is None:
            task = self.tasks.sample(self.np_random)
        elif isinstance(wanted, Task):
            task = wanted
        elif isinstance(wanted, Mapping):
            task = TaskSet.from_rows([wanted])[0]
        else:
            task = self.tasks[operator.index(wanted)]
        return task if task.ability is not None or self.ability is None else replace(task, ability=self.ability)

    # -- what the model reads ------------------------------------------------------------------------------------------------------------------------

    def _opening(self, task: Task) -> list[dict[str, str]]:
        system = self.system_prompt if self.system_prompt is not None else task.system_prompt
        if system is None:
            system = self._instructions
        user = {"role": "user", "content": task.question}
        return [{"role": "system", "content": system}, user] if system else [user]

    def _observation(self, results: Sequence[tuple[str, ToolResult]], errors: Sequence[str]) -> str:
        parts = [self.call_format.render_results(results)] if results else []
        parts += [self.call_format.render_error(error) for error in errors]
        return "".join(parts) if self.call_format.role == "inline" else "\n".join(parts)

    def _messages(self, observation: str, results: Sequence[tuple[str, ToolResult]], errors: Sequence[str]) -> list[dict[str, str]]:
        """The observation as chat messages: one for each result in the ``tool`` role, so that templates group them as they like."""
        if self.call_format.role != "tool":
            return [{"role": "user", "content": observation}]
        replies = [{"role": "tool", "name": name, "content": result.text} for name, result in results]
        return replies + [{"role": "tool", "name": "error", "content": error} for error in errors]

    def _shorten(self, result: ToolResult) -> ToolResult:
        excess = len(result.text) - self.max_observation_chars
        if excess <= 0:
            return result
        notice = f"\n[... {excess} characters left out ...]\n"
        head, tail = self.max_observation_chars * 3 // 4, self.max_observation_chars // 4
        return replace(result, text=result.text[:head] + notice + result.text[len(result.text) - tail :])

    # -- tools ---------------------------------------------------------------------------------------------------------------------------------------

    def _execute(self, call: ToolCall, executed: list[ExecutedCall]) -> tuple[ToolResult, bool]:
        """The result of one call, and whether it reached the tool; then it is added to ``executed``, the calls of this turn."""
        instance = self._tools.get(call.name)
        if instance is None:
            expected = call.hint or f"There is no tool {call.name!r}. Available: {', '.join(self._tools) or 'none'}."
            return ToolResult.failure("unknown_tool", expected), False
        if self.max_tool_calls is not None and len(self.episode.calls) + len(executed) >= self.max_tool_calls:
            return ToolResult.failure("limit", f"The limit of {self.max_tool_calls} tool calls is reached. Give the final answer."), False
        if problem := check_arguments(instance, call.arguments):
            return ToolResult.failure("bad_arguments", f"The call of {call.name} was not run: {problem}."), False
        with self._slots[call.name].place():
            start = time.monotonic()  # waiting for a place does not count against the deadline
            try:
                result = call_tool(instance, call.arguments, self.telemetry)
            except DeadlineExceeded:
                result = self._abandon(instance)
        self.telemetry.add(**{f"{call.name}.calls": 1.0, f"{call.name}.seconds": time.monotonic() - start})
        if result.error:
            self.telemetry.add(**{f"{call.name}.{result.error}": 1.0})
        executed.append(ExecutedCall(call.name, call.arguments, result))
        return result, True

    def _abandon(self, instance: Tool) -> ToolResult:
        """The result of a call that overran. Its thread may still work on the instance, so a stateful tool starts afresh."""
        text = f"{instance.name} gave no result within {instance.timeout:g} s."
        if not instance.stateful:
            return ToolResult.failure("timeout", text)
        with contextlib.suppress(DeadlineExceeded):  # what the stuck call holds is freed as far as the tool can
            call_with_deadline(instance.close, 1.0)
        others = {name: tool for name, tool in self._tools.items() if tool is not instance}
        self._tools[instance.name] = self.prototypes[instance.name].bind_with(others)
        self._tools[instance.name].start_episode(self.episode.task)
        return ToolResult.failure("timeout", f"{text} Its state is lost; the next call starts afresh.", state="lost")

    def _close_tools(self) -> None:
        instances, self._tools = self._tools, {}
        with contextlib.ExitStack() as closing:  # closes all even where one raises
            for instance in instances.values():
                if instance.stateful:
                    closing.callback(instance.close)

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._close_tools()

    @property
    def fork_support(self) -> ForkSupport:  # type: ignore[override]
        """The weakest way in which one of its tools forks."""
        weakest: ForkSupport = min((prototype.fork_support for prototype in self.prototypes.values()), key=STRENGTH.index, default="native")
        return "native" if weakest == "shared" else weakest

    def _copied(self) -> Self:
        twin = super()._copied()
        twin._tools = {}
        return twin

    def fork_many(self, n: int) -> list[Self]:
        """``n`` independent copies, all or none; each tool makes its ``n`` copies at once."""
        if self._stepping:
            raise ForkError(f"cannot fork {type(self).__name__} while a step is running in another thread")
        for name, instance in self._tools.items():
            if instance.fork_support == "none":
                raise ForkError(f"tool {name!r} cannot be forked: {instance.unforkable}")
        twins = super().fork_many(n)
        try:
            for name, instance in self._tools.items():
                others = [twin._tools for twin in twins]
                copies = fork_tool(instance, others, prototype=self.prototypes[name], episode=self.episode, telemetry=self.telemetry)
                for twin, copied in zip(twins, copies, strict=True):
                    twin._tools[name] = copied
        except Exception as error:
            for twin in twins:
                twin.close()
            raise ForkError(f"tool {name!r} ({instance.fork_support}) cannot be forked: {type(error).__name__}: {error}") from error
        return twins

    # -- info and rendering --------------------------------------------------------------------------------------------------------------------------

    def _info(
        self,
        parsed: ParsedTurn | None = None,
        calls: Sequence[dict[str, Any]] = (),
        messages: Sequence[dict[str, str]] = (),
        score: Score | None = None,
    ) -> dict[str, Any]:
        episode = self.episode
        return {
            "turn": len(episode.turns),
            "messages": list(messages),
            "observation_role": self.call_format.role,
            "stop_strings": self.stop_strings,
            "tools": self.tool_schemas,
            "tool_calls": [*calls, *(_unparsed() for _ in (parsed.errors if parsed else ()))],
            "n_tool_calls": len(episode.calls),
            "errors": list(parsed.errors) if parsed else [],
            "answer": episode.answer or "",
            "reward": dict(score.parts) if score else dict.fromkeys(self.reward.parts, 0.0),
            "scored": score is None or score.value is not None,
            "stop_reason": episode.stop_reason,
            "task_id": episode.task.id,
            "isolation": self.isolation,
        }

    def render(self) -> str | None:
        """The transcript so far for ``render_mode="ansi"``."""
        if self.render_mode != "ansi":
            return None
        episode = self.episode
        lines = [episode.task.question]
        for index, turn in enumerate(episode.turns):
            lines.append(turn)
            lines.extend(episode.observations[index : index + 1])
        return "\n".join(lines)

    def _render_human(self, text: str) -> None:
        if self.render_mode == "human":
            print(text)


def _unparsed() -> dict[str, Any]:
    """The entry of a call that could not be read; what was wrong is in ``errors``."""
    return {"name": "unparsed", "arguments": {}, "ok": False, "error": "malformed", "executed": False}


def _describe(call: ToolCall, result: ToolResult, reached: bool) -> dict[str, Any]:
    return {"name": call.name, "arguments": copy_arguments(call.arguments), "ok": result.ok, "error": result.error or "", "executed": reached}

"""Any text environment as a verifiers environment (verifiers 0.4, the interface ``verifiers.v1``).

verifiers finds environments by the name of a module, so three lines in a module of yours make one::

    # my_search.py                                  then: vf-eval my_search --model ... --client.base-url http://127.0.0.1:8000/v1
    from arpo_env.interop.verifiers import verifiers_environment

    Tasks, Env, Chat = verifiers_environment(lambda: ToolEnv(TASKS, [search]))
    __all__ = ["Tasks", "Env", "Chat"]

The tasks are those of the environment's task set in their order, or, where it draws its tasks, seeds 0, 1, 2, ... without end. Each episode makes an
environment and plays it here, in the process of verifiers: the turns of the model are its actions, what it answers are user messages. All that the model
says is text; tools are called in the environment's own format. The reward of the episode is the trace's ``reward``, its parts are metrics
``reward/<part>``; ``stop_reason`` is the trace's stop condition, and an episode that could not be scored is a failed trace.

``Chat`` is the harness: one chat completion a turn, asked from this process, with the environment's stop strings. Chat endpoints leave a stop string
out of the text; where it closes a tag that the turn opened, it is put back before the environment reads the turn (in the trace it is missing, unless the
endpoint keeps it: ``--sampling.include-stop-str-in-output`` of vLLM). Reasoning that an endpoint keeps apart is put back as ``<think>...</think>``.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar

import gymnasium

try:
    import openai
    import verifiers.v1 as vf
    from verifiers.v1.dialects.chat import message_to_wire
except ImportError as error:
    raise ImportError("verifiers environments need verifiers: pip install 'arpo[verifiers]'") from error

GymEnv = gymnasium.Env[str, str]
Outcome = tuple[str, float, bool, bool, Mapping[str, Any]]


class EpisodeData(vf.TaskData):  # type: ignore[misc]
    """How an episode begins: the arguments of ``reset``."""

    seed: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults
    answer: Any = None
    """The reference answer, for judges of one's own; the model is not shown it."""
    stop_strings: list[str] = []  # noqa: RUF012
    """Known once the episode has begun."""


class EpisodeTask(vf.Task[EpisodeData]):  # type: ignore[misc]
    """Scored by the environment, not by functions of its own."""


class EpisodeTasks(vf.Taskset[EpisodeTask, vf.TasksetConfig]):  # type: ignore[misc]
    """The tasks of an environment."""

    tasks: ClassVar[Any] = None
    """The environment's task set; None where it draws tasks from seeds."""

    def load(self) -> Iterator[EpisodeTask]:
        if self.tasks is None:
            rows = ({"id": f"seed/{seed}", "seed": seed} for seed in itertools.count())
        else:
            rows = (
                {"id": task.id or str(index), "description": task.question, "answer": task.answer, "seed": index, "options": {"task": index}}
                for index, task in enumerate(self.tasks)
            )
        return (EpisodeTask(EpisodeData(**row), self.config.task) for row in rows)


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """One chat completion a turn, through the endpoint that verifiers listens at."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: EpisodeData) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        messages = [message_to_wire(message) for message in ([vf.SystemMessage(content=system)] if system else []) + list(said)]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages, stop=data.stop_strings or openai.omit)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")  # the trace holds what was said


class EpisodeConfig(vf.EnvConfig):  # type: ignore[misc]
    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})
    """The policy. It runs nothing itself, so it needs no sandbox."""


class EpisodeEnv(vf.Env[EpisodeConfig]):  # type: ignore[misc]
    """One episode of the environment a task."""

    make: ClassVar[Any]
    """Builds the environment of an episode."""

    async def run(self, task: EpisodeTask, agents: Any) -> None:
        env = await asyncio.to_thread(self.make)
        try:
            begin = functools.partial(env.reset, seed=task.data.seed, options=dict(task.data.options) or None)
            observation, info = await asyncio.to_thread(begin)
            messages = info.get("messages") or [{"role": "user", "content": observation}]
            if task.data.system_prompt is not None:  # verifiers sets another one
                messages = [message for message in messages if message["role"] != "system"]
            stops = list(info.get("stop_strings", ()))
            async with agents.player.interaction(task.with_data(stop_strings=stops)) as interaction:
                outcome, total = await _play(env, interaction, messages, stops)
                if outcome is not None:
                    interaction.trace.stop(str(outcome[4].get("stop_reason") or ("terminated" if outcome[2] else "truncated")))
            if outcome is not None:
                _record(interaction.trace, outcome[4], total)
        finally:
            await asyncio.to_thread(env.close)


async def _play(env: GymEnv, interaction: Any, messages: Sequence[Mapping[str, str]], stops: Sequence[str]) -> tuple[Outcome | None, float]:
    """The last step, None where the model could not be asked, and the sum of the rewards."""
    segment = await interaction.turn(messages)
    total = 0.0
    while not interaction.trace.errors:
        outcome = await asyncio.to_thread(_answer, env, segment, interaction.trace, stops)
        total += outcome[1]
        if outcome[2] or outcome[3]:
            return outcome, total
        segment = await interaction.turn(outcome[0])
    return None, total


def _answer(env: GymEnv, segment: Any, trace: Any, stops: Sequence[str]) -> Any:
    """What the environment makes of a turn, or of its end by a limit."""
    if segment.terminated:
        return _cut(env, trace.stop_condition or "stopped")
    if trace.calls[-1].finish_reason == "length":
        return _cut(env, "length")
    return env.step(turn_text(segment.messages[-1], stops))


def _cut(env: GymEnv, reason: str) -> Outcome:
    """The end of an episode from outside; scored as it stands where the environment can."""
    unwrapped: Any = env.unwrapped
    return unwrapped.truncate(reason) if hasattr(unwrapped, "truncate") else ("", 0.0, False, True, {"stop_reason": reason})


def _record(trace: Any, info: Mapping[str, Any], total: float) -> None:
    trace.record_reward("reward", total)
    parts = info.get("reward")
    trace.record_metrics({f"reward/{name}": value for name, value in parts.items()} if isinstance(parts, Mapping) else {})
    trace.record_metric("n_tool_calls", info.get("n_tool_calls", 0))
    trace.info.update({name: info[name] for name in ("task_id", "answer", "stop_reason") if name in info})
    if not info.get("scored", True):
        trace.record_error(vf.TaskError("the environment could not score this episode; its reward means nothing"))


def turn_text(message: Any, stops: Sequence[str]) -> str:
    """The turn as the environment reads it: reasoning that was kept apart in front, a closing tag at which the endpoint stopped at the end."""
    text = message.content or ""
    if message.reasoning_content:
        text = f"<think>{message.reasoning_content}</think>{text}"
    opened = {stop: text.rfind(stop.replace("</", "<", 1)) for stop in stops if stop.startswith("</")}
    unclosed = {stop: start for stop, start in opened.items() if start > text.rfind(stop)}
    return text + max(unclosed, key=lambda stop: unclosed[stop], default="")


def verifiers_environment(make: Callable[[], GymEnv]) -> tuple[type[EpisodeTasks], type[EpisodeEnv], type[ChatHarness]]:
    """The three classes that a verifiers module exports: its tasks, its environment and the harness that is its default.

    ``make`` builds the environment of one episode; it is called once here, to see its tasks. Build what environments share outside of it.
    """
    env: Any = make()
    tasks = getattr(env.unwrapped, "tasks", None)
    env.close()
    finite = isinstance(tasks, Sized)
    taskset = type("Tasks", (EpisodeTasks,), {"tasks": tasks if finite else None, "INFINITE": not finite})
    return taskset, type("Env", (EpisodeEnv,), {"make": staticmethod(make)}), ChatHarness

"""How a tool of an episode is copied when its environment forks: by itself, or by replay of the calls that made its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arpo_env._together import all_or_none
from arpo_env.calling import Telemetry, call_tool
from arpo_env.episode import Episode, ExecutedCall
from arpo_env.forking import ForkError
from arpo_env.tools.base import Tool


def fork_tool(instance: Tool, others: Sequence[Mapping[str, Tool]], *, prototype: Tool, episode: Episode, telemetry: Telemetry) -> list[Tool]:
    """One copy for each of ``others``, the tools that were copied before it; all or none."""
    if instance.fork_support != "replay" or type(instance).fork_with is not Tool.fork_with:  # with its own, a tool replays itself
        return instance.fork_with(others)
    return all_or_none(len(others), lambda: _replayed(prototype, episode, telemetry), lambda twin: twin.close())


def _replayed(prototype: Tool, episode: Episode, telemetry: Telemetry) -> Tool:
    """A fresh instance brought to the present state by the recorded calls, each result compared."""
    twin = prototype.bind()
    try:
        twin.start_episode(episode.task)
        for number, call in _since_state_was_lost(episode, prototype.name):
            result = call_tool(twin, call.arguments, telemetry)
            if (result.text, result.ok) != (call.result.text, call.result.ok):
                raise ForkError(f"replay of call {number} gave {result.text!r:.80}, recorded was {call.result.text!r:.80}; it is not deterministic")
    except BaseException:
        twin.close()
        raise
    return twin


def _since_state_was_lost(episode: Episode, name: str) -> list[tuple[int, ExecutedCall]]:
    """The numbered calls of a tool that made its present state: those after the last that lost it."""
    calls = list(enumerate(call for call in episode.calls if call.name == name))
    lost = [number for number, call in calls if call.result.state == "lost"]
    return calls[lost[-1] + 1 :] if lost else calls

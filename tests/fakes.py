"""Scripted policies, environments and codecs, and what must hold of every tree that is sampled with them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from arpo_algo.branching import BranchingStrategy, EntropyBranching
from arpo_algo.codec import Codec, Message
from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.rollout import EnvSource, RolloutConfig, sample_groups
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_env.forking import ForkableEnv, ForkError


class CharCodec:
    """One id a character; observations as they are."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return [ord(c) for m in messages for c in m["content"]]

    def observation(self, text: str, messages: Sequence[Message], role: str, *, closed: bool) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


@dataclass(frozen=True)
class Turn:
    """A turn of :class:`Writer`: a text of one id a character, or ids."""

    text: str | tuple[int, ...]
    entropies: float | Sequence[float] = 0.0
    stop: str = "stop"


@dataclass
class Call:
    """What a policy was given and what it answered."""

    context: tuple[int, ...]
    params: SamplingParams
    generation: Generation


class Writer:
    """A policy that writes ``turn(context as text, seed)``; ``yields`` says how often it lets others go first."""

    vocab_size = 1000

    def __init__(self, turn: Callable[[str, int], Turn], *, context_length: int = 10_000, yields: Callable[[], int] = lambda: 0) -> None:
        self.turn, self.context_length, self.yields = turn, context_length, yields
        self.version = 0
        self.calls: list[Call] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        context = tuple(prompt_ids)
        for _ in range(self.yields()):
            await asyncio.sleep(0)
        assert tuple(prompt_ids) == context, "the context changed while the policy held it"
        assert len(context) + params.max_new_tokens <= self.context_length
        turn = self.turn("".join(map(chr, context)), params.seed)
        ids = [ord(c) for c in turn.text] if isinstance(turn.text, str) else list(turn.text)
        entropies = [float(turn.entropies)] * len(ids) if isinstance(turn.entropies, (int, float)) else list(turn.entropies)
        kept = slice(params.max_new_tokens)
        generation = Generation(
            token_ids=ids[kept],
            logprobs=[-0.001 * i for i in ids[kept]],
            entropies=entropies[kept],
            stop_reason="length" if len(ids) > params.max_new_tokens else turn.stop,  # type: ignore[arg-type]
            version=self.version,
        )
        self.calls.append(Call(context, params, generation))
        return generation


@dataclass(frozen=True)
class End:
    """Ends an episode."""

    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)


class Talk(ForkableEnv):
    """Answers each turn with ``reply(turns so far)``: an observation, an :class:`End`, or an exception to raise.

    Its state is a list that it writes to in place, so that two branches that shared it would show.
    """

    shared: ClassVar[frozenset[str]] = ForkableEnv.shared | {"reply", "opening", "before", "events", "forks", "action_space", "observation_space"}

    def __init__(
        self,
        reply: Callable[[list[str]], str | End],
        *,
        opening: str = "Q:",
        before: Callable[[list[str]], None] = lambda turns: None,
        forks: Callable[[list[str]], bool] = lambda turns: True,
    ) -> None:
        super().__init__()
        self.reply, self.opening, self.before, self.forks = reply, opening, before, forks
        self.events: list[str] = []
        """What happened to it and its forks, in order of time."""
        self.turns: list[str] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.turns = []
        text = str((options or {}).get("task", self.opening))
        return text, {"messages": [{"role": "user", "content": text}], "stop_strings": (), "observation_role": "inline", "task_id": text}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert not self._closed
        self.turns.append(action)
        self.before(self.turns)
        answer = self.reply(self.turns)
        if isinstance(answer, End):
            return "", answer.reward, True, False, {"stop_reason": "answer", **answer.info}
        return answer, 0.0, False, False, {"observation_role": "inline", "messages": [{"role": "user", "content": answer}]}

    def _fork_into(self, twin: Talk) -> None:
        self.events.append("fork")
        if not self.forks(self.turns):
            raise ForkError("scripted refusal")

    def close(self) -> None:
        if not self._closed:
            self.events.append("close")
        super().close()


def echo(turns: list[str]) -> str | End:
    """``<n:turn>`` after the n-th turn; a turn that begins with ``e`` ends the episode with the number in it."""
    if turns[-1].startswith("e"):
        return End(float(turns[-1][1:] or 0))
    return f"<{len(turns)}:{turns[-1]}>"


def wanderer(p_end: float = 0.3, most: int = 4) -> Callable[[str, int], Turn]:
    """A random walk through :func:`echo` that depends on context and seed alone: 1 to 6 tokens a turn, random entropies, at most ``most`` observations."""

    def turn(context: str, seed: int) -> Turn:
        draw = random.Random(f"{seed}/{context}")
        end = context.count("<") >= most or draw.random() < p_end
        text = f"e{draw.randint(0, 1)}" if end else "".join(draw.choice("abcd") for _ in range(draw.randint(1, 6)))
        return Turn(text, [draw.uniform(0, 2) for _ in text])

    return turn


def sample(
    policy: Any,
    env: EnvSource | None = None,
    strategy: BranchingStrategy | None = None,
    *,
    codec: Codec | None = None,
    seed: int = 0,
    options: Sequence[Mapping[str, Any] | None] = (None,),
    **config: Any,
) -> list[RolloutTree]:
    """Trees sampled with inline environment steps, two tokens a window and four trajectories, two of them initial, unless said otherwise."""
    settings: dict[str, Any] = {"group_size": 4, "initial": 2, "window": 2, "env_workers": 0, **config}
    return asyncio.run(
        sample_groups(
            Talk(echo) if env is None else env,
            policy,
            CharCodec() if codec is None else codec,
            EntropyBranching() if strategy is None else strategy,
            RolloutConfig(**settings),
            options,
            seed=seed,
        )
    )


def sample_one(policy: Any, env: EnvSource | None = None, strategy: BranchingStrategy | None = None, **settings: Any) -> RolloutTree:
    (tree,) = sample(policy, env, strategy, **settings)
    return tree


def text_of(trajectory: Trajectory) -> str:
    return "".join(map(chr, trajectory.token_ids))


def check_tree(tree: RolloutTree, *, size: int, initial: int, calls: Sequence[Call] | None = None) -> None:
    """What holds of every group, whoever sampled it: exactly M trajectories, nothing copied, nothing lost, children at branch points."""
    assert [t.index for t in tree.trajectories] == list(range(size))
    assert sum(t.origin == "initial" for t in tree.trajectories) == initial
    assert len({t.leaf for t in tree.trajectories}) == size, "two trajectories are the same path"
    owners = tree.owners()
    assert all(owners), "a node belongs to nobody"
    assert owners[0] == list(range(size))
    assert tree.unique_tokens <= tree.total_tokens == sum(len(t.token_ids) for t in tree.trajectories)
    for trajectory in tree.trajectories:
        _check_path(trajectory)
    children = sum(d.children for d in tree.decisions)
    assert children == sum(t.origin == "branched" for t in tree.trajectories)
    assert len({d.node for d in tree.decisions}) == len(tree.decisions), "a point was decided twice"
    if calls is not None:
        _check_calls(tree, calls)


def _check_path(trajectory: Trajectory) -> None:
    tree, path = trajectory.tree, trajectory.nodes()
    roles = [node.role for node in path]
    assert roles[0] == "prompt"
    assert roles[1:] == ["policy", "observation"] * (len(path) // 2 - 1) + ["policy"]
    assert trajectory.mask == [node.role == "policy" for node in path for _ in node.token_ids]
    if trajectory.origin != "branched":
        assert (trajectory.branched_from, trajectory.parent) == (None, None)
        if trajectory.origin == "initial":
            assert path[1].id not in {n.id for t in tree.trajectories[: trajectory.index] for n in t.nodes()}
        return
    assert trajectory.branched_from is not None and trajectory.parent is not None and trajectory.parent < trajectory.index
    ids = [node.id for node in path]
    parents = [node.id for node in tree.trajectories[trajectory.parent].nodes()]
    at = ids.index(trajectory.branched_from)
    assert path[at].role == "observation"
    assert ids[: at + 1] == parents[: at + 1]
    assert not set(ids[at + 1 :]) & set(parents), "a child holds tokens that its parent wrote after the branch point"
    assert path[at + 1].role == "policy", "a child starts right after the observation"


def _check_calls(tree: RolloutTree, calls: Sequence[Call]) -> None:
    """The policy was asked once for each turn of the tree, with exactly the ids before it, and its ids are stored as they came."""
    stored = []
    for node in tree.nodes:
        if node.role == "policy":
            assert node.parent is not None
            before = tuple(token for earlier in tree.path(node.parent) for token in earlier.token_ids)
            stored.append((before, tuple(node.token_ids), tuple(node.logprobs), tuple(node.entropies), node.stop_reason))
    given = [(c.context, tuple(c.generation.token_ids), tuple(c.generation.logprobs), tuple(c.generation.entropies), c.generation.stop_reason) for c in calls]
    assert sorted(stored) == sorted(given)
    seeds = [call.params.seed for call in calls]
    assert len(set(seeds)) == len(seeds), "two turns were sampled with one seed"

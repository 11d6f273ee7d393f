"""The rollout tree: one task's group of trajectories with every shared prefix stored once.

A node is a *segment*: a run of tokens that one side wrote (the prompt, one turn of the policy, one observation). A trajectory is the path from the
root to a leaf. A branch point is the end of an observation: the parent's next turn and those of the branches are sibling policy nodes under it, so a
branch never cuts a segment in two and nothing is copied::

    0 prompt ── 1 policy ── 2 observation ──┬── 3 policy            trajectory 0 (initial)
            │                               └── 4 policy            trajectory 2 (branched from node 2)
            └── 5 policy ── 6 observation ───── 7 policy            trajectory 1 (initial)

Per-token numbers live in the node that sampled them. A trajectory is a view that concatenates its nodes; nothing in it is stored twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from arpo_algo.entropy import EntropyBounds

Role = Literal["prompt", "policy", "observation"]
Origin = Literal["initial", "branched", "fresh"]


@dataclass(slots=True, kw_only=True)
class Node:
    """One segment. ``logprobs`` and ``entropies`` are filled for policy nodes only, one entry a token."""

    id: int
    parent: int | None
    role: Role
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)
    """Log-probability under the old policy of each sampled id (of the distribution it was sampled from)."""
    entropies: list[float] = field(default_factory=list)
    """Full-vocabulary entropy in nats before each sampled id, at temperature 1; estimates where there are ``bounds``."""
    bounds: EntropyBounds | None = None
    """Where the entropies lie that the policy could only estimate; None: they are exact."""
    version: int = 0
    """Version of the weights that sampled it; of its first id where they changed under way."""
    versions: list[int] = field(default_factory=list)
    """Version that sampled each id; empty where all are ``version``."""
    text: str = ""
    tools: tuple[str, ...] = ()
    """Names of the tools whose results an observation holds; empty when it answers with something else."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Tool calls that a policy node made, in order: name, arguments, ok, error, executed."""
    stop_reason: str = ""
    """Why the policy stopped: ``eos``, ``stop`` or ``length``."""
    seconds: float = 0.0
    """Wall time of the generation, or of the environment's step for an observation."""

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these ids; the loss mask is 1 exactly on such nodes."""
        return self.role == "policy"


@dataclass(slots=True, kw_only=True)
class Decision:
    """What a strategy made of one branch point, kept whether it branched or not."""

    node: int
    """The observation node after which the window was measured."""
    trajectory: int
    """Index of the trajectory that reached the branch point."""
    depth: int
    """How many observations the path holds at the branch point, this one included."""
    initial_entropy: float
    """Mean entropy in nats of the first k tokens of the root of this trajectory."""
    entropy: float
    """Mean entropy in nats of the first k tokens after the observation."""
    score: float
    children: int = 0
    reason: str = ""
    settled: bool = True
    """False: the entropies are estimates, and within their bounds the number of children could be another."""

    @property
    def delta(self) -> float:
        """``entropy - initial_entropy`` in nats."""
        return self.entropy - self.initial_entropy


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """Root to leaf: a view on its tree plus what the environment said of it."""

    tree: RolloutTree = field(repr=False, compare=False)
    index: int
    origin: Origin
    branched_from: int | None = None
    """The observation node it branched from; None for initial and fresh trajectories."""
    parent: int | None = None
    """Index of the trajectory it branched from."""
    leaf: int = 0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    scored: bool = True
    """False: the reward means nothing (answer not gradable, infrastructure failed); the trajectory is left out of statistics and loss."""
    stop_reason: str = ""
    answer: str = ""

    def nodes(self) -> list[Node]:
        """The path, root first."""
        return self.tree.path(self.leaf)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every tool call on the path, shared ones included."""
        return [call for node in self.nodes() for call in node.calls]

    @property
    def token_ids(self) -> list[int]:
        return [token for node in self.nodes() for token in node.token_ids]

    @property
    def mask(self) -> list[bool]:
        """True exactly on sampled ids."""
        return [node.sampled for node in self.nodes() for _ in node.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Old log-probabilities; 0.0 where nothing was sampled."""
        return [value for node in self.nodes() for value in (node.logprobs if node.sampled else [0.0] * len(node.token_ids))]

    @property
    def entropies(self) -> list[float]:
        """Sampling entropies in nats; 0.0 where nothing was sampled."""
        return [value for node in self.nodes() for value in (node.entropies if node.sampled else [0.0] * len(node.token_ids))]

    @property
    def sampled_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes() if node.sampled)


@dataclass(slots=True, kw_only=True)
class RolloutTree:
    """All nodes and trajectories of one group."""

    task_id: str = ""
    group: int = 0
    version: int = 0
    """Version of the weights that sampled the tree; nodes carry their own."""
    nodes: list[Node] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    env_seconds: float = field(default=0.0, compare=False)
    """Seconds that environment steps took, those that ended an episode included, summed over trajectories."""

    def add(self, parent: int | None, role: Role, token_ids: Sequence[int], **values: Any) -> Node:
        """Append a node and return it."""
        if (parent is None) != (not self.nodes):
            raise ValueError(f"only the first node has no parent, got parent={parent} for node {len(self.nodes)}")
        node = Node(id=len(self.nodes), parent=parent, role=role, token_ids=list(token_ids), **values)
        if node.sampled and not len(node.token_ids) == len(node.logprobs) == len(node.entropies):
            raise ValueError(f"a policy node needs one logprob and one entropy a token, got {len(node.token_ids)}, {len(node.logprobs)}, {len(node.entropies)}")
        for name, size in (("bounds", None if node.bounds is None else len(node.bounds)), ("versions", len(node.versions) or None)):
            if size not in (None, len(node.token_ids)):
                raise ValueError(f"{name} need one entry for each of {len(node.token_ids)} tokens, or none, got {size}")
        self.nodes.append(node)
        return node

    def path(self, leaf: int) -> list[Node]:
        """Nodes from the root to ``leaf``."""
        path = []
        node: Node | None = self.nodes[leaf]
        while node is not None:
            path.append(node)
            node = None if node.parent is None else self.nodes[node.parent]
        return path[::-1]

    def owners(self) -> list[list[int]]:
        """For each node the indices of the trajectories that pass through it."""
        owners: list[list[int]] = [[] for _ in self.nodes]
        for trajectory in self.trajectories:
            for node in trajectory.nodes():
                owners[node.id].append(trajectory.index)
        return owners

    @property
    def rewards_M(self) -> np.ndarray:
        return np.array([t.reward for t in self.trajectories], dtype=np.float64)

    @property
    def scored_M(self) -> np.ndarray:
        return np.array([t.scored for t in self.trajectories], dtype=bool)

    @property
    def has_signal(self) -> bool:
        """Whether scored rewards differ, so that advantages are not all 0."""
        rewards = self.rewards_M[self.scored_M]
        return len(rewards) > 1 and bool(rewards.max() > rewards.min())

    @property
    def unique_tokens(self) -> int:
        """Tokens of the tree, each counted once."""
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def total_tokens(self) -> int:
        """Tokens of the trajectories, shared ones counted once for each owner."""
        return sum(len(node.token_ids) * len(owners) for node, owners in zip(self.nodes, self.owners(), strict=True))

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy generated for this tree."""
        return sum(len(node.token_ids) for node in self.nodes if node.sampled)

    def canonical(self) -> RolloutTree:
        """The same tree with nodes numbered depth first by trajectory, decisions in order of depth and trajectory, and wall times dropped.

        Two runs that sampled the same tree in another order of time give equal canonical trees.
        """
        order: dict[int, int] = {}
        for trajectory in self.trajectories:
            for node in trajectory.nodes():
                order.setdefault(node.id, len(order))
        twin = RolloutTree(task_id=self.task_id, group=self.group, version=self.version, metadata=dict(self.metadata))
        for old in order:
            node = self.nodes[old]
            twin.nodes.append(replace(node, id=order[old], parent=None if node.parent is None else order[node.parent], seconds=0.0))
        for t in self.trajectories:
            branched_from = None if t.branched_from is None else order[t.branched_from]
            twin.trajectories.append(replace(t, tree=twin, leaf=order[t.leaf], branched_from=branched_from))
        moved = [replace(decision, node=order[decision.node]) for decision in self.decisions]
        twin.decisions = sorted(moved, key=lambda d: (d.depth, d.trajectory))
        return twin

    def children(self) -> Iterator[tuple[int, list[int]]]:
        """Pairs of a node id and the ids of its children, in order of creation."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            if node.parent is not None:
                children[node.parent].append(node.id)
        return iter(enumerate(children))


Group = RolloutTree
"""The M trajectories of one task; the tree is the group with shared prefixes stored once."""

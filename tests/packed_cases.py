"""Models, batches and faults for the tests that hold packed layouts against padded rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from arpo_algo.advantages import Assignment, group_advantages, soft
from arpo_algo.layouts import Layouts
from arpo_algo.learner import Learner, LearnerConfig
from arpo_algo.logprobs import Packed
from arpo_algo.packing import Layout, Rows, Weigh, pad_groups, trajectory_mean
from arpo_algo.token_tree import TokenTree, build_tree
from arpo_algo.tree import RolloutTree, Trajectory
from arpo_algo.tree_attention import model_inputs

VOCABULARY = 17
WINDOW = 4
"""Of the Mistral: shorter than the rows."""
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": WINDOW, "head_dim": 4}),
}


def tiny(kind: str = "llama", *, seed: int = 0, tied: bool = True, exact: bool = True) -> nn.Module:
    """A random model of two layers whose query heads share keys; ``exact``: all of it in float64, else in float32."""
    model, config, more = KINDS[kind]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    built: nn.Module = model(config(**sizes, **more, tie_word_embeddings=tied, initializer_range=0.3, pad_token_id=0)).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim == 1:  # biases start at 0 and norms at 1, where a fault could hide
                parameter.add_(0.2 * torch.randn_like(parameter))
    return true_float64(built) if exact else built


def true_float64(model: nn.Module) -> nn.Module:
    """The model in float64 throughout: transformers' norm layers compute in float32 whatever they are given, torch's do not."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
    return model.double()


class Path(NamedTuple):
    """How one trajectory of a group comes about."""

    fork: int
    """Which node of what is there already it continues, modulo their number; the first is the prompt."""
    turns: Sequence[int]
    """Sampled tokens of each turn. None: the trajectory ends where it forked, and is a prefix or a copy of another."""
    reward: float
    scored: bool = True


def some_groups(seed: int, *, groups: int = 2, paths: int = 6) -> list[list[Path]]:
    """Groups that branch: unequal lengths, repeated and contained trajectories, about one in six not scored."""
    rng = np.random.default_rng(seed)

    def path() -> Path:
        turns = rng.integers(1, 5, size=rng.integers(0, 3)).tolist()
        return Path(int(rng.integers(0, 12)), turns, float(rng.normal()), bool(rng.random() > 0.15))

    return [[Path(0, (2, 3), 1.0), *(path() for _ in range(paths - 1))] for _ in range(groups)]


def grown(group: Sequence[Path], rng: np.random.Generator) -> RolloutTree:
    """The tree of a group: a prompt of three tokens, an observation of two before each turn that follows another, random ids."""

    def ids(count: int) -> list[int]:
        return rng.integers(1, VOCABULARY, count).tolist()

    tree = RolloutTree()
    tree.add(None, "prompt", [1, *ids(2)])
    for index, path in enumerate(group):
        node = tree.nodes[path.fork % len(tree.nodes)]
        for length in path.turns:
            if node.role == "policy":
                node = tree.add(node.id, "observation", ids(2))
            node = tree.add(node.id, "policy", ids(length), logprobs=[0.0] * length, entropies=[0.0] * length)
        tree.trajectories.append(Trajectory(tree=tree, index=index, origin="initial", leaf=node.id, reward=path.reward, scored=path.scored))
    return tree


def batch(
    model: nn.Module,
    groups: Sequence[Sequence[Path]],
    *,
    seed: int = 0,
    weigh: Weigh = trajectory_mean,
    assign: Assignment = soft,
    temperature: float = 1.0,
) -> Rows:
    """The rows of the groups. Old log-probabilities are the model's own, moved: half of the ratios lie past a clip of 0.2, which binds for a quarter."""
    rng = np.random.default_rng(seed)
    trees = [grown(group, rng) for group in groups]
    rows = pad_groups(trees, [assign(tree, group_advantages(tree.rewards_M, tree.scored_M)) for tree in trees], pad_id=0, weigh=weigh)
    current = Learner(model, LearnerConfig(layout="padded", temperature=temperature)).token_logprobs(rows)[0].double().numpy()
    far = rng.random(rows.mask.shape) < 0.5
    moved = np.where(far, rng.uniform(0.25, 0.5, far.shape), rng.uniform(0.0, 0.15, far.shape)) * rng.choice([-1.0, 1.0], far.shape)
    return replace(rows, old_logprobs=np.where(rows.mask, current + moved, 0.0).astype(np.float32))


class Outcome(NamedTuple):
    """What an update handed to the optimiser, step after step, and what it reported."""

    gradients: Tensor
    metrics: dict[str, float]


Fault = Callable[[TokenTree, Rows, Packed], Packed]


class WithFault:
    """The layouts of a learner, with something wrong in what they pack."""

    def __init__(self, layouts: Layouts, fault: Fault) -> None:
        self.layouts, self.fault = layouts, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layouts, name)

    def pack(self, rows: Rows, layout: Layout, *, device: torch.device) -> Packed:
        packed = self.layouts.pack(rows, layout, device=device)
        assert packed is not None
        return self.fault(build_tree(rows.token_ids, rows.lengths, share=layout == "tree"), rows, packed)


def update(model: nn.Module, rows: Rows, layout: str, *, fault: Fault | None = None, arguments: dict[str, Any] | None = None, **settings: Any) -> Outcome:
    """An update whose steps are written down and not taken; ``arguments`` are those of the learner, ``settings`` those of its configuration."""
    learner = Learner(model, LearnerConfig(max_grad_norm=math.inf, layout=layout, **settings), **arguments or {})
    assert layout == "padded" or learner.layouts.backend == "path", "the probe found fault with it, and another back end would pass in its place"
    if fault is not None:
        learner.layouts = WithFault(learner.layouts, fault)
    seen: list[Tensor] = []
    learner.optimizer.step = lambda: seen.append(torch.cat([p.grad.flatten() for p in learner.trainable]))
    metrics = learner.update(rows)
    return Outcome(torch.cat(seen), metrics)


def relative(got: Tensor, expected: Tensor) -> float:
    """2-norm of the difference over that of what was expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def shown(change: Callable[[TokenTree], TokenTree]) -> Fault:
    """A fault in the tree that the model is shown; what is read back, and from where, stays right."""

    def fault(tree: TokenTree, _: Rows, packed: Packed) -> Packed:
        return packed._replace(inputs=model_inputs(change(tree), "path", device=packed.targets.device, dtype=torch.float64))

    return fault


def ended(tree: TokenTree, ends: np.ndarray) -> TokenTree:
    """The tree with other ends, within the bounds that blocks of attention have."""
    ends = np.clip(ends, np.arange(len(tree)) + 1, len(tree))
    starts, stops, _ = tree.nodes.T
    return replace(tree, ends=ends, nodes=np.stack([starts, stops, np.maximum(ends[stops - 1], stops)], axis=1))


def exchanged(_: TokenTree, __: Rows, packed: Packed) -> Packed:
    first, last = packed.copies[0], packed.copies[-1]
    assert first != last
    return packed._replace(copies=torch.where(packed.copies == first, last, torch.where(packed.copies == last, first, packed.copies)))


def from_the_neighbour(tree: TokenTree, rows: Rows, packed: Packed) -> Packed:
    return packed._replace(sources=torch.as_tensor(np.unique(tree.where[rows.mask]) - 1))


FAULTS: dict[str, Fault] = {
    "mask left out, each token sees all before it": shown(lambda tree: ended(tree, np.full(len(tree), len(tree)))),
    "ends one too late": shown(lambda tree: ended(tree, tree.ends + 1)),
    # The last token of a path predicts nothing: what it sees does not matter, and one too early would change nothing.
    "ends two too early": shown(lambda tree: ended(tree, tree.ends - 2)),
    "positions in packed order": shown(lambda tree: replace(tree, depths=np.arange(len(tree)))),
    "positions after the prompt one too late": shown(lambda tree: replace(tree, depths=tree.depths + (tree.depths > 2))),
    "values of two branches exchanged": exchanged,
    "values read back one token late": lambda _, __, packed: packed._replace(copies=packed.copies.roll(1)),
    "tokens predicted from their neighbour in packed order": from_the_neighbour,
}

"""Optimiser parts that the learner and the cold start share: learning-rate schedule, decay groups, Muon."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from arpo_algo.distributed import Ranks
from arpo_algo.sharding import fill, on_main

Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(step: int, schedule: Schedule, *, warmup_steps: int, total_steps: int) -> float:
    """What the learning rate is multiplied with at step ``step`` (from 0): linear warm-up, then constant, or falling to 0 at ``total_steps``.

    A function of the step alone, so resuming needs nothing but the counter. The first step of a warm-up of n has factor 1/n.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay, vectors and scalars (norms, biases) without. Empty groups are left out."""
    parameters = list(parameters)
    matrices, rest = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_trainable(parameters: list[nn.Parameter]) -> None:
    """Raise ``ValueError`` when nothing is trainable or trainable weights are kept in 16 bits."""
    if not parameters:
        raise ValueError("expected a model with trainable parameters, got none with requires_grad")
    for p in parameters:
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"trainable weights must be float32 or float64, since small steps vanish in 16 bits; got {p.dtype}: load the model with dtype=torch.float32"
            )


def optimizer_state(optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any] | None:
    """The optimiser's ``state_dict``; with several ranks its tensors are whole, in the CPU memory of rank 0, and the others get None. Collective."""
    state: dict[str, Any] = optimizer.state_dict()
    if ranks.size == 1:
        return state
    moments = {number: {name: on_main(value, ranks) for name, value in values.items()} for number, values in state["state"].items()}
    return state | {"state": moments} if ranks.is_main else None


def load_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None, ranks: Ranks) -> None:
    """Give an optimiser the ``state_dict`` that rank 0 holds, whole tensors, whatever the number of ranks. Collective; the other ranks pass None."""
    if ranks.size == 1:
        assert state is not None
        optimizer.load_state_dict(dict(state))
        return
    groups = ranks.broadcast(None if state is None else state["param_groups"])
    names = ranks.broadcast(None if state is None else {number: {name: t.ndim for name, t in values.items()} for number, values in state["state"].items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments: dict[int, dict[str, Tensor]] = {}
    for number, of_parameter in names.items():
        moments[number] = {}
        for name, ndim in of_parameter.items():
            like: Tensor = torch.zeros(()) if ndim == 0 else torch.zeros_like(parameters[number])
            fill(like, None if state is None else state["state"][number][name], ranks)
            moments[number][name] = like
    optimizer.load_state_dict({"state": moments, "param_groups": groups})


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal by five Newton-Schulz steps: for hidden matrices only. Keller Jordan 2024, https://kellerjordan.github.io/posts/muon/.

    ``update = orthogonalise(nesterov(momentum)) * sqrt(max(1, rows / columns))``, the same rule as ``torch.optim.Muon`` without decay. That one works in
    bfloat16, which CPUs without bfloat16 arithmetic emulate: 228 ms a step for fourteen 96-wide matrices, against 10 ms here in float32. On an
    accelerator this one uses bfloat16 too.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        params = list(params)
        for p in params:
            if p.ndim != 2:
                raise ValueError(f"Muon takes matrices only, got a parameter of shape {tuple(p.shape)}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Muon takes no closure")
        for group in self.param_groups:
            for p in cast(list[nn.Parameter], group["params"]):
                if p.grad is not None:
                    self._update(p, p.grad, group["lr"], group["momentum"])

    def _update(self, p: nn.Parameter, grad: Tensor, lr: float, momentum: float) -> None:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        average: Tensor = state["momentum_buffer"]
        average.lerp_(grad, 1 - momentum)
        update = orthogonalise(grad.lerp(average, momentum))
        p.add_(update.to(p.dtype), alpha=-lr * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def orthogonalise(matrix: Tensor, *, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """The matrix with its singular values pushed to about 1 (0.7 to 1.2) and its singular vectors kept, by a quintic Newton-Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x

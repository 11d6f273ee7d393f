"""A model spread over several ranks by FSDP2: every rank keeps a part of each tensor and gathers a layer when it is needed.

``torch.distributed.fsdp`` is imported only here and only where there is more than one rank. Gradients are *summed* over ranks: the weight of a token in the
loss is fixed over the whole batch (:mod:`arpo_algo.packing`), so each rank's loss is its part of one sum, and a mean over ranks would be wrong.

Functions marked *collective* must be called by every rank in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arpo_algo.distributed import Ranks
from arpo_algo.packing import Layout, Rows, micro_batches, tree_micro_batches, unique_tokens

_FRACTIONS = (1.3, 1.15, 1.0, 0.8, 0.6, 0.5, 0.4, 0.33, 0.25, 0.2)
"""Sizes of pieces to choose from, in shares of a rank. A little over 1, since what a tree's pieces have in common comes on top of them."""


def shard(root: nn.Module, ranks: Ranks, *, compute: torch.dtype | None = None) -> None:
    """Spread ``root`` over the ranks, in place: each transformer layer is a unit that is gathered on its own, and what is left the last one. Collective.

    Every rank starts from rank 0's weights; another rank's model may lie on the meta device, and needs no memory then. From here on only the forward of
    ``root`` works, on all ranks together. ``compute`` is the type in which weights are gathered and used, None for their own; gradients are then summed in
    float32. Raises ``ValueError`` on every rank where the models of the ranks differ in names, shapes, types or in what is trained.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    _check_same(root, ranks)
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    for unit in [*transformer_layers(root), root]:
        _start_from_main(unit, ranks)
        sharded: Any = fully_shard(unit, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum, and a plain one is what is meant


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the list of modules that holds most parameters. Empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=[]))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a rank holds only its part of the tensor."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, gathered; any other as it is. Collective. Detached."""
    tensor = tensor.detach()
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def on_main(tensor: Tensor, ranks: Ranks) -> Tensor | None:
    """The whole of a sharded tensor in the CPU memory of rank 0, None on the others; alone, the tensor itself. Collective."""
    gathered = whole(tensor)
    if ranks.size == 1:
        return tensor
    return gathered.cpu() if ranks.is_main else None


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, which shares its memory; any other as it is."""
    local: Any = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


@torch.no_grad()
def fill(target: Tensor, source: Tensor | None, ranks: Ranks) -> None:
    """Copy rank 0's whole ``source`` into ``target``, sharded or not; what the other ranks pass is ignored. Collective. Shapes must agree."""
    if ranks.size == 1:
        assert source is not None
        target.copy_(source)
        return
    values = torch.empty(target.shape, dtype=target.dtype, device=ranks.device)
    if ranks.is_main:
        assert source is not None
        values.copy_(source)
    ranks.spread(values)
    if not is_sharded(target):
        target.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = target
    part(target).copy_(part(distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None)))


def reshard(root: nn.Module) -> None:
    """Let go of what ``root`` gathered last. After a forward without a backward it is still there, and would be stale once weights change."""
    let_go: Any = getattr(root, "reshard", None)
    if let_go is not None:
        let_go()


def sync_gradients(root: nn.Module, flag: bool) -> None:
    """Whether the next backward sums gradients over ranks, or keeps them whole on each for a later one; nothing for a model that is not sharded."""
    choose: Any = getattr(root, "set_requires_gradient_sync", None)
    if choose is not None:
        choose(flag)


def shares(rows: Rows, size: int) -> list[np.ndarray]:
    """Row numbers of each of ``size`` ranks, equal in tokens as far as it goes."""
    return [np.array(sorted(part), dtype=np.int64) for part in _dealt(rows.lengths.tolist(), size)]


def rank_micro_batches(rows: Rows, max_tokens: int, ranks: Ranks, *, layout: Layout = "padded") -> list[list[np.ndarray]]:
    """Row numbers of this rank's micro-batches; those that stand together are pieces of one tree.

    With several ranks each stands alone, and every rank gets the same number of them, since each forward is one of all ranks: some may be empty.
    """
    if ranks.size == 1:
        return [[index] for index in micro_batches(rows, max_tokens)] if layout == "padded" else tree_micro_batches(rows, max_tokens, share=layout == "tree")
    if layout == "padded":
        of_rank = [[share[index] for index in micro_batches(rows.select(share), max_tokens)] for share in shares(rows, ranks.size)]
    else:
        of_rank = tree_shares(rows, max_tokens, ranks.size, share=layout == "tree")
    mine = of_rank[ranks.rank]
    return [[index] for index in mine + [np.zeros(0, dtype=np.int64)] * (max(map(len, of_rank)) - len(mine))]


def tree_shares(rows: Rows, max_tokens: int, size: int, *, share: bool = True) -> list[list[np.ndarray]]:
    """Micro-batches of packed trees for each of ``size`` ranks.

    A forward is one of all ranks and takes as long as the largest micro-batch among them. Large pieces are uneven, small ones repeat more of what they have in
    common: of some sizes it is the one with the fewest tokens over all forwards.
    """
    fair_share = -(-unique_tokens(rows, share=share) // size)
    best: list[list[np.ndarray]] = []
    fewest: float = np.inf
    for bound in dict.fromkeys(max(1, min(max_tokens, int(fraction * fair_share))) for fraction in _FRACTIONS):
        pieces = [piece for group in tree_micro_batches(rows, bound, share=share) for piece in group]
        sizes = [unique_tokens(rows.select(piece), share=share) for piece in pieces]
        of_rank = _dealt(sizes, size)
        tokens = sum(max(sizes[piece] for piece in forward) for forward in _forwards(of_rank))
        if tokens < fewest:
            best, fewest = [[pieces[piece] for piece in mine] for mine in of_rank], tokens
    return best


def _dealt(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of the things that each rank gets: the largest first, each to the rank that has least so far."""
    loads, of_rank = [0] * ranks, [[] for _ in range(ranks)]  # type: tuple[list[int], list[list[int]]]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        of_rank[rank].append(number)
    return of_rank


def _forwards(of_rank: Sequence[Sequence[int]]) -> list[list[int]]:
    """What the ranks that have something to compute in a forward compute, for each forward."""
    return [[mine[step] for mine in of_rank if step < len(mine)] for step in range(max(map(len, of_rank)))]


def _check_same(model: nn.Module, ranks: Ranks) -> None:
    mine = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in _named_tensors(model)]
    theirs = ranks.broadcast(mine)
    if ranks.any(mine != theirs):
        differing = sorted({name for name, *_ in set(mine) ^ set(theirs)})
        where = f"rank {ranks.rank} differs from rank 0 in {differing[:5]}" if differing else f"another one than rank {ranks.rank} differs from rank 0"
        raise ValueError(f"expected the same model on every rank, in names, shapes, types and what is trained; {where}")


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _start_from_main(unit: nn.Module, ranks: Ranks) -> None:
    """Put rank 0's weights and buffers into a unit on the ranks' device; parts that are sharded already have them. Tied weights stay tied."""
    moved: dict[int, Tensor] = {}
    for module in unit.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in _present(tensors):
                if not is_sharded(tensor):
                    if id(tensor) not in moved:
                        moved[id(tensor)] = _received(tensor, ranks)
                    tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


def _present(tensors: dict[str, Any]) -> Iterable[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in tensors.items() if tensor is not None]


def _received(tensor: Tensor, ranks: Ranks) -> Tensor:
    values = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device).contiguous()
    ranks.spread(values)
    if tensor.is_meta:
        return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    tensor.data = values
    return tensor

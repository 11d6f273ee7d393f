"""What a vLLM worker does with new weights: receives them through shared memory, counts what arrived, and puts them in place.

vLLM replaces weights layer by layer: from the start of an update to its end the parameters of a layer are placeholders without memory until all of them have
arrived. What never arrives vLLM fills with whatever lies in memory, with a line in its log, and some names that it has no place for it skips: here both
are errors, raised while the layers are still placeholders, so that an engine whose weights are incomplete cannot sample a token.

The sender's side is :mod:`arpo_algo.policies.vllm_transfer`. This module is imported in the workers: the class of its extension is how.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from arpo_algo.policies import vllm_processes
from arpo_algo.policies.vllm_worker import EntropyColumn, refresh_heads

BACKEND = "arpo_shared_memory"
"""Name of the back end in vLLM's ``WeightTransferConfig``."""


@dataclass(kw_only=True)
class Segment(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """A piece of memory of the sender's, and the tensors in it."""

    path: str
    """Where processes of the same user on the same host can open it."""
    file: str
    """What ``path`` must lead to: on another host the same path would lead elsewhere."""
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    """In bytes; the memory ends where the last tensor does."""


class SharedMemoryEngine(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer through memory that sender and worker share: each worker reads all tensors and keeps its shard."""

    init_info_cls = Segment
    update_info_cls = Segment

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._known: set[str] = set()

    def init_transfer_engine(self, init_info: Segment) -> None:
        """Raises ``ValueError`` where this worker cannot read the sender's memory. Nothing is kept."""
        for _ in tensors_of(init_info):
            pass

    def start_weight_update(self) -> None:
        begin(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # vLLM's method waits for an accelerator, and fails without one

    def receive_weights(self, update_info: Segment) -> None:
        load(self.model, tensors_of(update_info), self._known)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        refresh_heads(self.model)

    def shutdown(self) -> None:
        """There is nothing to release: no memory is held between two updates."""


class WeightReceiver(EntropyColumn):
    """The worker extension of engines that take weights from outside. vLLM imports this module for it, which registers the back end."""

    def end_with(self, pid: int, system: str, others: list[int]) -> None:
        """See :func:`arpo_algo.policies.vllm_processes.end_with`."""
        vllm_processes.end_with(pid, system, others)

    def replace_weights(self, path: str | None, tensors: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        """Loads the checkpoint files of a folder, or named tensors, in place of the present weights. The engine may not step meanwhile.

        Raises ``ValueError`` where they are not those of the whole model, and ``RuntimeError`` after an update that failed.
        """
        worker: Any = self
        model, config = worker.model_runner.get_model(), worker.vllm_config.model_config
        with set_current_vllm_config(worker.vllm_config):
            begin(model)
            if tensors is None:
                config.model, config.model_weights, config.revision = path, "", None
                model.load_weights(get_model_loader(worker.vllm_config.load_config).get_all_weights(config, model))
            else:
                load(model, tensors, set())
            check_complete(model)
            finalize_layerwise_reload(model, config)
        worker.model_runner.reset_lora_state()
        refresh_heads(model)

    def check_weights(self) -> None:
        """Raises ``ValueError`` where parameters have not arrived. Between the last piece of an update and its end."""
        worker: Any = self
        check_complete(worker.model_runner.get_model())

    def unused_adapter_parts(self, version: int) -> list[str]:
        """The parts of a loaded adapter that belong to none of the layers which take adapters."""
        worker: Any = self
        manager = worker.model_runner.lora_manager._adapter_manager
        return sorted(manager.get_adapter(version).loras.keys() - manager.modules.keys())


def tensors_of(segment: Segment) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in the memory of ``segment``, without copies; the memory stays as long as one of them does."""
    try:
        file = os.readlink(segment.path)
    except OSError as error:
        file = str(error)
    if file != segment.file:
        raise ValueError(
            f"a worker of the engine cannot read the weights in shared memory: expected {segment.file!r} at {segment.path}, got {file!r};"
            " it must run on the host of the sender, for the same user and in the same process namespace"
        )
    size = os.stat(segment.path).st_size
    memory = torch.from_file(segment.path, shared=False, size=size, dtype=torch.uint8)
    for name, dtype_name, shape, start in zip(segment.names, segment.dtypes, segment.shapes, segment.offsets, strict=True):
        dtype = getattr(torch, dtype_name)
        length = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[start : start + length].view(dtype).view(shape)


def begin(model: torch.nn.Module) -> None:
    """Makes placeholders of the parameters. Raises ``RuntimeError`` after an update that failed: what came of it would be counted as new."""
    if any(get_layerwise_info(layer).can_load() for layer in model.modules()):
        raise RuntimeError("an update of the weights was broken off in this engine; it must be restarted")
    initialize_layerwise_reload(model)


def load(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], known: set[str]) -> None:
    """Gives tensors to the model's loader. Raises ``ValueError`` for a name or a shape that does not fit; the loader by itself skips some names.

    Names that it has taken are added to ``known``: those are given to it together, which is faster.
    """
    together = []
    for name, tensor in tensors:
        if name in known:
            together.append((name, tensor))
            continue
        taken = _give(model, [(name, tensor)])
        if taken is not None and not taken and not (name.startswith("lm_head.") and _tied(model)):
            raise ValueError(f"unexpected name of a parameter: {name!r} has no place in {type(model).__name__}")
        known.add(name)
    if together:
        _give(model, together)


def _give(model: Any, tensors: list[tuple[str, torch.Tensor]]) -> set[str] | None:
    """The engine's names of the parameters that the model's loader took; some loaders do not say."""
    try:
        taken: set[str] | None = model.load_weights(tensors)
    except Exception as error:  # vLLM's own often has no text
        names = tensors[0][0] if len(tensors) == 1 else f"{tensors[0][0]} to {tensors[-1][0]}"
        raise ValueError(f"parameters that do not fit {type(model).__name__}: {names}: {type(error).__name__}: {str(error)[:200]}") from error
    return taken


def check_complete(model: torch.nn.Module) -> None:
    """Raises ``ValueError`` with the names of the layers whose parameters have not arrived in full. While an update is under way."""
    missing = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue  # complete, or without parameters of its own
        expected = _size(layer)
        if info.load_numel < expected and not (isinstance(layer, ParallelLMHead) and _tied(model)):
            missing.append(f"{name} ({info.load_numel} of {expected} numbers arrived)")
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ValueError(f"missing parameters of {len(missing)} layers: {shown}")


def _size(layer: torch.nn.Module) -> int:
    """How many numbers a checkpoint has for the layer's own parameters on this worker: a vocabulary is padded beyond that."""
    size = sum(getattr(parameter, "weight_loader_numel", parameter.numel()) for parameter in layer.parameters(recurse=False))
    if isinstance(layer, VocabParallelEmbedding):
        size -= (layer.num_embeddings_per_partition - layer.shard_indices.num_org_elements) * layer.embedding_dim
    return size


def _tied(model: torch.nn.Module) -> bool:
    config: Any = model.config
    return bool(config.get_text_config().tie_word_embeddings)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)

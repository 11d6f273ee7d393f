"""What runs inside vLLM's workers: the exact entropy of every sampled token, and the version of the weights that sampled it, in a column of the
log-probabilities that vLLM returns anyway.

vLLM reports no entropy. Of a request that asks for one log-probability beside the sampled token's, the sampler returns two columns; the second, the most
probable token's, is overwritten with the entropy, and its id with the version. Both travel with the token through every kind of engine, whatever is
buffered on the way, and cost one pass over the logits. Version 0.32 has two model runners with a sampler each, both with ``logits`` as first argument and
the columns in their result: one wrapper serves both. The engine is not patched beyond its own ``sampler`` attribute, so other engines in the process keep
theirs.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

COLUMNS = 2
"""Log-probability of the sampled token, entropy."""
_LOG_ZERO = -750.0
"""exp of this is 0: where a probability underflows, its term is 0 * -750 and not 0 * -inf."""
_ROWS = 64
"""Rows computed at once; bounds the memory beside a large vocabulary."""


class EntropyColumn:
    """A worker extension (``worker_extension_cls``): its methods are called on every worker through ``collective_rpc``."""

    def add_entropy_column(self) -> None:
        """Makes this worker's sampler report entropies. Pipeline ranks without a sampler have nothing to do."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        if runner.sampler is not None:
            runner.sampler = SamplerWithEntropy(runner.sampler)
        if runner.model_config.hf_text_config.tie_word_embeddings:
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_not_of_tied_heads)

    def adopt_version(self, version: int) -> None:
        """Completes an update, however the weights came: tokens are sampled by ``version`` from now on."""
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        refresh_heads(runner.get_model())
        if runner.sampler is not None:
            runner.sampler.version = version


def refresh_heads(model: torch.nn.Module) -> None:
    """Packs output heads anew. On the CPU one that is tied to the embedding keeps a packed copy of the old weights, silently."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and getattr(module, "cpu_linear", None) is not None:
            module.quant_method.process_weights_after_loading(module)


def _not_of_tied_heads(record: logging.LogRecord) -> bool:
    """False for vLLM's complaint at each update that a head without weights of its own was sent none."""
    return "ParallelLMHead: Failed to load weights" not in record.getMessage()


class SamplerWithEntropy:
    """vLLM's sampler, with the entropy of softmax(logits) in the last of two log-probability columns; in all else the sampler itself."""

    version = 0
    """Of the weights that it samples from."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        if isinstance(sampler, torch.nn.Module):  # the older runner's
            sampler.__dict__["gather_logprobs"] = gather_logprobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __call__(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        entropy = entropies(logits)  # first: the sampler tempers and truncates in place
        output = self._sampler(logits, *args, **kwargs)
        columns = output.logprobs_tensors
        if columns is not None and columns.logprobs.shape[1] == COLUMNS:
            columns.logprobs[:, -1] = entropy
            columns.logprob_token_ids[:, -1] = column_id(self.version)
        return output


def column_id(version: int) -> int:
    """The id under which the entropy is reported. Below 0: vLLM keys a position's log-probabilities by id where it joins outputs, and no token may hide it."""
    return -1 - version


def version_of(column_id: int) -> int:
    """The version that :func:`column_id` stands for."""
    return -1 - column_id


def entropies(logits: torch.Tensor) -> torch.Tensor:
    """H = -sum p log p in nats over all ids, p = softmax(logits) at temperature 1, of ``logits`` (rows, vocabulary); in float32. NaN without a distribution."""
    return torch.cat([_entropies(logits[start : start + _ROWS].float()) for start in range(0, len(logits), _ROWS)])


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    # With x = logit - max and Z = sum e^x, H = ln Z - sum(x e^x) / Z. PyTorch's log_softmax adds up a large vocabulary in float32 without pairing the terms:
    # through it, H of 152,000 ids is off by up to 1e-4 on the CPU; these sums are paired, and give 1e-6.
    x = logits - logits.amax(-1, keepdim=True)
    weights = x.exp()
    total = weights.sum(-1)
    return total.log() - weights.mul_(x.clamp_min_(_LOG_ZERO)).sum(-1) / total


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
    """Log-probabilities of the sampled ids and of the ``num_logprobs`` most probable, or the place for an entropy; without ranks, which nobody asks for.

    vLLM's own function compiles a kernel for the ranks when it is first called: 9 seconds and a C++ compiler on the CPU.
    """
    from vllm.v1.outputs import LogprobsTensors

    sampled = token_ids.unsqueeze(-1)
    chosen = logprobs.gather(-1, sampled)
    if num_logprobs == COLUMNS - 1:
        top, ids = torch.zeros_like(chosen), torch.zeros_like(sampled)  # the entropy comes here: no search
    else:
        top, ids = torch.topk(logprobs, num_logprobs, dim=-1)
    columns = torch.cat((chosen, top), dim=1)  # (rows, 1 + num_logprobs)
    return LogprobsTensors(torch.cat((sampled, ids), dim=1).to(torch.int32), columns, torch.zeros_like(token_ids))

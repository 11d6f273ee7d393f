"""Log-probabilities and entropies of given tokens under a causal language model, with a bound on the memory of the logits.

At a vocabulary of 150,000 the logits are the largest tensor of a training step. Three measures keep them small:

1. Only hidden states that predict a token of the mask go through the head; a hook on the head catches the hidden states of the model's own forward.
2. The head and the softmax run in tiles (:mod:`arpo_algo.head`), so that ``[tokens, vocabulary]`` in float32 exists for one at a time.
3. Where they do not all fit the bound they are recomputed in the backward pass instead of kept.

That needs a model whose logits are its head applied to hidden states and nothing more. It is checked once with a two-token forward; a model that scales or
caps its logits afterwards, or has no head to hook, takes the plain path through its own full logits.

All of it happens in the forward of one module, the scorer: where the model is spread over several ranks (:mod:`arpo_algo.sharding`) that is the module that
gathers the head's weights, for the chunks and for their recomputation.

Right-padded rows get no attention mask: under causal attention no token sees the padding behind it, and without a mask the faster kernels apply.

With a packed token tree (:mod:`arpo_algo.token_tree`) each unique token goes through model and head once, and the floats are read back for every row that holds
it. Autograd adds up the copies' gradients, so the result is that of the padded rows, whatever the loss.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arpo_algo.head import head_logprobs
from arpo_algo.tree_attention import TrunkKeys
from arpo_algo.trunk import Trunk


class Packed(NamedTuple):
    """A packed token tree on the model's device."""

    inputs: dict[str, Any]
    """Arguments of the model's forward over U tokens: :func:`arpo_algo.tree_attention.model_inputs`."""
    sources: Tensor
    """(E,) packed index of the token whose hidden state predicts each unique trained token."""
    targets: Tensor
    """(E,) ids of the unique trained tokens."""
    copies: Tensor
    """(N,) for each token of the mask, row by row, which of the E it is."""
    trunk: Trunk | None = None
    """What was computed before and comes first: ``sources`` count its tokens, ``copies`` its trained tokens."""


class TokenLogprobs(nn.Module):
    """``scorer(token_ids, mask) -> (logprobs, entropies)`` of one model at one temperature."""

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, chunk_mib: int = 256, autocast: torch.dtype | None = None) -> None:
        """``chunk_mib`` bounds the float32 logits held at once, in MiB; ``autocast`` is the dtype of matrix products, None for the model's own."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk_elements = chunk_mib * 2**20 // 4
        self.autocast = autocast
        self._heads: list[nn.Module] | None = None  # a list, since a module of a module would be its child: a second name for the head

    def __call__(self, token_ids: Tensor, mask: Tensor, packed: Packed | None = None, *, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probability of each token of the mask (at the temperature) and entropy before it (nats, full vocabulary, temperature 1).

        ``token_ids`` (R, T) int64 right-padded, ``mask`` (R, T) bool with column 0 False, both on the model's device. Returns two (R, T) tensors, 0 outside the
        mask: float32, or float64 for a float64 model. Entropies carry a gradient only with ``entropy_grad``. ``packed`` is the tree of the rows,
        computed in their place inside :func:`arpo_algo.tree_attention.tree_attention`.
        """
        values: tuple[Tensor, Tensor] = super().__call__(token_ids, mask, packed, entropy_grad=entropy_grad)
        return values

    def forward(self, token_ids: Tensor, mask: Tensor, packed: Packed | None, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """What calling the scorer computes."""
        if self._heads is None:
            self.use_head(self.has_plain_head(token_ids))
        with self._autocast():
            if packed is None:
                hidden = self._hidden(input_ids=token_ids[:, :-1])[mask[:, 1:]]  # (N, H), or logits (N, V) on the plain path
                logprobs, entropies = self._scores(hidden, token_ids[mask], entropy_grad)  # (N,)
            else:
                before = packed.trunk
                hidden = self._hidden(**packed.inputs)[0]  # (U, H) or (U, V)
                hidden = (hidden if before is None else torch.cat((before.hidden, hidden)))[packed.sources]
                unique = self._scores(hidden, packed.targets, entropy_grad)  # (E,)
                if before is not None:
                    unique = torch.cat((before.logprobs, unique[0])), torch.cat((before.entropies, unique[1]))
                logprobs, entropies = unique[0][packed.copies], unique[1][packed.copies]
        zeros = logprobs.new_zeros(token_ids.shape)
        return zeros.masked_scatter(mask, logprobs), zeros.masked_scatter(mask, entropies)

    def trunk(self, packed: Packed, computed: TrunkKeys, *, entropy_grad: bool = False) -> Trunk:
        """What the bins of a cut tree take from its trunk; ``packed.inputs`` record keys and values in ``computed``, ``packed.copies`` are not used."""
        with self._autocast():
            hidden = self._hidden(**packed.inputs)[0]
            logprobs, entropies = self._scores(hidden[packed.sources], packed.targets, entropy_grad)
        return Trunk.of(computed, hidden, logprobs, entropies)

    def has_plain_head(self, token_ids: Tensor) -> bool:
        """Whether the model's logits are its output layer applied to hidden states and nothing more, tried with the first two tokens of (R, T).

        The layer's own logits are exchanged for a wide range of numbers: a cap leaves the small ones of a new model nearly as they are, and would be missed.
        """
        head = self._output_layer()
        if head is None:
            return False
        given: list[Tensor] = []

        def exchange(_: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> Tensor:
            given.append(torch.linspace(-100, 100, logits.numel(), dtype=logits.dtype, device=logits.device).view_as(logits))
            return given[-1]

        hook = head.register_forward_hook(exchange)
        try:
            with torch.no_grad():
                logits = self._forward(input_ids=token_ids[:1, :2])
                return len(given) == 1 and _same(given[0], logits)
        finally:
            hook.remove()

    def use_head(self, plain: bool) -> None:
        """Take :meth:`has_plain_head`'s answer as given. The first forward asks for it unless that is done; in a sharded model it must be."""
        head = self._output_layer()
        self._heads = [head] if plain and head is not None else []

    @property
    def _head(self) -> nn.Module | None:
        return self._heads[0] if self._heads else None

    def _hidden(self, **inputs: Any) -> Tensor:
        """What the head is given at each position (R, T, H); without a plain head the logits (R, T, V)."""
        if self._head is None:
            return self._forward(**inputs)
        caught: list[Tensor] = []

        def catch(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            caught.append(args[0])
            return (args[0][:, -1:],)  # the head still runs, on one position a row, which costs next to nothing

        hook = self._head.register_forward_pre_hook(catch)
        try:
            self._forward(**inputs)
        finally:
            hook.remove()
        return caught[0]

    def _scores(self, hidden: Tensor, targets: Tensor, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        return head_logprobs(self._head, hidden, targets, temperature=self.temperature, chunk_elements=self.chunk_elements, entropy_grad=entropy_grad)

    def _autocast(self) -> torch.autocast:
        device = next(self.model.parameters()).device
        return torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def _forward(self, **inputs: Any) -> Tensor:
        logits: Tensor = self.model(**inputs, use_cache=False).logits
        return logits

    def _output_layer(self) -> nn.Module | None:
        get: Any = getattr(self.model, "get_output_embeddings", lambda: None)
        head: nn.Module | None = get()
        return head if hasattr(head, "weight") else None


def _same(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.allclose(left.float(), right.float(), rtol=1e-4, atol=1e-5)

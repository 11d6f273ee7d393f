"""Encoding and decoding by the Rust tokenizer inside a transformers one: the Python around it takes longer than a short text's ids do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

_METHODS = ("__call__", "encode", "_encode_plus", "decode", "_decode")


def encode(tokenizer: Any, text: str, *, plain: bool) -> list[int]:
    """Ids of ``text`` without BOS or EOS; ``plain``: special tokens spelled in it are text."""
    rust = tokenizer.backend_tokenizer if _only_wraps(tokenizer.__class__) else None
    if rust is None or rust.truncation is not None or rust.padding is not None:  # left by another call of the tokenizer, which takes them back itself
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)]
    if rust.encode_special_tokens != plain:
        rust.encode_special_tokens = plain
    return list(rust.encode(text, add_special_tokens=False).ids)


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of ids, special tokens included, nothing cleaned up."""
    ids = list(token_ids)
    if _only_wraps(tokenizer.__class__):
        return str(tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@cache
def _only_wraps(kind: type) -> bool:
    """Whether a tokenizer's class leaves encoding and decoding as they are to Rust: some have methods of their own (CodeLlama, CodeGen)."""
    from transformers import PreTrainedTokenizerFast

    return issubclass(kind, PreTrainedTokenizerFast) and all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in _METHODS)

"""Ids and texts of the Rust tokenizer, against the transformers one around it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from arpo_algo.tokenizing import decode, encode

END = "<|im_end|>"
PIECES = ["hello", " ", "  ", "\n", END, "<s>", "<unk>", "he", "é", "中", "🙂", " now", "<|im_"]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


def byte_level() -> Any:
    """Letters, "he" and "<|" as pieces; <s> before every text that is encoded with special tokens."""
    merges = [("h", "e"), ("<", "|"), ("|", ">")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (END, "<s>", "<pad>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token="<s>", pad_token="<pad>")


def word_level() -> Any:
    """Special tokens are words of the vocabulary, too."""
    words = ["<unk>", END, "hello", "now", "he", "é"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token=END)


TOKENIZERS = {"byte level": byte_level(), "word level": word_level()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, plain=st.booleans())
def test_as_transformers_has_it(name: str, text: str, plain: bool) -> None:
    tokenizer = TOKENIZERS[name]
    ids = encode(tokenizer, text, plain=plain)
    assert ids == tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
    assert all(type(i) is int for i in ids)
    for part in (ids, tuple(ids[: len(ids) // 2])):
        assert decode(tokenizer, part) == tokenizer.decode(list(part), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_special_tokens_are_split_or_not_as_asked_every_time() -> None:
    """<|im_end|> is one id, or spelled: "<|", "i", "m", "_", "e", "n", "d", "|>"."""
    tokenizer = byte_level()
    assert [len(encode(tokenizer, "<|im_end|>", plain=plain)) for plain in (True, False, True, True, False)] == [8, 1, 8, 8, 1]


def test_truncation_and_padding_of_another_call_do_not_stay() -> None:
    tokenizer = byte_level()
    expected = encode(tokenizer, "hello hello", plain=True)
    tokenizer("hello hello", truncation=True, max_length=1, padding="max_length")
    assert tokenizer.backend_tokenizer.truncation is not None, "nothing is tested"
    assert encode(tokenizer, "hello hello", plain=True) == expected
    tokenizer("hello hello", padding="max_length", max_length=100)
    assert tokenizer.backend_tokenizer.padding is not None, "nothing is tested"
    assert encode(tokenizer, "hello hello", plain=True) == expected


def test_a_tokenizer_with_methods_of_its_own_is_asked_itself() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def _encode_plus(self, text: str, *args: Any, **kwargs: Any) -> Any:
            return super()._encode_plus(text.replace("HELLO", "hello"), *args, **kwargs)

        def decode(self, *args: Any, **kwargs: Any) -> Any:
            return super().decode(*args, **kwargs).upper()

    inner = byte_level()
    tokenizer = Shouting(tokenizer_object=inner.backend_tokenizer)
    ids = encode(inner, "hello", plain=True)
    assert encode(tokenizer, "HELLO", plain=True) == ids
    assert decode(tokenizer, ids) == "HELLO"


def test_a_tokenizer_without_rust_is_asked_itself() -> None:
    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool) -> list[int]:
            return [ord(letter) for letter in text]

        def decode(self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            return "".join(map(chr, ids))

    assert encode(Letters(), "ab", plain=True) == [97, 98]
    assert decode(Letters(), (97, 98)) == "ab"

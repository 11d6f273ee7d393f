"""Stop strings against a slow reference that decodes the whole turn after every token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from arpo_algo.policies.stops import StopDetector, StopStrings

TEXTS = ["<search>who wrote it</search> then </answer> ünïcödé 日本語 🙂🙃 ", "a search for searches </s </sea rch> x"]


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=["<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def metaspace() -> Any:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    specials = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, special_tokens=specials))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def words() -> Any:
    vocab = {word: i for i, word in enumerate(["<unk>", "a", "b", "stop", "</s>", "now"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def first_stop(decode: Callable[[list[int]], str], ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
    """Number of tokens and stop string of the first token after which the whole text holds one."""
    for n in range(1, len(ids) + 1):
        text = decode(list(ids[:n]))
        ends = [(text.index(stop) + len(stop), i) for i, stop in enumerate(stops) if stop in text]
        if ends:
            return n, stops[min(ends)[1]]
    return None


def detected(strings: StopStrings, ids: Sequence[int]) -> tuple[int, str] | None:
    detector = StopDetector(strings)
    for n in range(1, len(ids) + 1):
        if (stop := detector.check(list(ids[:n]))) is not None:
            return n, stop
    return None


CASES = [
    (byte_level, ("</search>", "</answer>")),
    (byte_level, ("語", "🙂x", "ï")),
    (byte_level, ("e", "rch> ")),
    (byte_level, ("zz",)),
    (metaspace, ("</s", "a s", " the")),
    (metaspace, ("日本", "🙃")),
    (words, ("a b", "stop ", "now a now b")),
]


@pytest.mark.parametrize(("make", "stops"), CASES)
def test_the_tail_finds_what_the_whole_text_shows(make: Callable[[], Any], stops: tuple[str, ...]) -> None:
    tokenizer = make()
    decode = decoder(tokenizer)
    strings = StopStrings(decode, stops)
    rng = random.Random(0)
    hits = 0
    for _ in range(60):
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 120))]
        piece = tokenizer.encode(rng.choice([*TEXTS, *stops]), add_special_tokens=False)
        at = rng.randrange(len(ids))
        ids[at:at] = piece if rng.random() < 0.7 else piece[: rng.randrange(len(piece) + 1)]
        want = first_stop(decode, ids, stops)
        assert detected(strings, ids) == want, ids
        hits += want is not None
    assert hits > (0 if stops != ("zz",) else -1)


def test_a_stop_that_ends_inside_a_token_keeps_the_token() -> None:
    texts = {0: "say ", 1: "</sea", 2: "rch> and more", 3: "x"}
    strings = StopStrings(lambda ids: "".join(texts[i] for i in ids), ("</search>",))
    assert detected(strings, [0, 1, 2, 3]) == (3, "</search>")


def test_of_two_stops_in_one_token_the_first_to_end_counts() -> None:
    strings = StopStrings(lambda ids: "".join("..<b> <a>"[i] if i < 2 else "<b> <a>" for i in ids), ("<a>", "<b>"))
    assert detected(strings, [0, 1, 2]) == (3, "<b>")


def test_only_a_short_tail_is_decoded() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return "x" * len(ids)

    assert detected(StopStrings(decode, ("yx",)), [0] * 2000) is None
    assert longest <= 2 * (2 + 8)


def test_tokens_without_text_do_not_shorten_the_reach() -> None:
    texts = {0: "", 1: "<", 2: "s>", 3: "abcdefgh"}
    strings = StopStrings(lambda ids: "".join(texts[i] for i in ids), ("<s>",))
    ids = [3] * 30 + [1] + [0] * 200 + [2]
    assert detected(strings, ids) == (len(ids), "<s>")


@pytest.mark.parametrize("stops", [(), ("a", "")])
def test_empty_stops_are_refused(stops: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="not empty"):
        StopStrings(lambda ids: "", stops)

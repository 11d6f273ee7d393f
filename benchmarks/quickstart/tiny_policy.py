"""A policy small enough to train on a CPU in minutes: a word-level tokenizer and a Llama of about 230,000 parameters.

Both are ordinary transformers objects: ``save_pretrained`` writes them, ``AutoTokenizer`` and ``AutoModelForCausalLM`` open them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def build_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each word of ``vocabulary``, split at white space. Decoding joins words with single spaces; other words are ``<unk>``."""
    words = [PAD, EOS, UNK, *vocabulary]
    if len(set(words)) != len(words):
        raise ValueError(f"words must be distinct and none of {PAD}, {EOS}, {UNK}, got duplicates {sorted({w for w in words if words.count(w) > 1})}")
    broken = [word for word in words if word.split() != [word]]
    if broken:
        raise ValueError(f"words must be non-empty and hold no white space, got {broken}")
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return wrapped


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int = 96, layers: int = 2, heads: int = 4, seed: int = 0, context: int = 512) -> LlamaForCausalLM:
    """A randomly initialised Llama with tied embeddings. ``seed`` decides the weights; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=256 * hidden // 96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)  # type: ignore[no-untyped-call]

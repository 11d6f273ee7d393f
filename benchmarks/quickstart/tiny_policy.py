"""A policy small enough to train on a CPU in minutes: a word-level tokenizer and a Llama of about 235,000 parameters.

Both are ordinary transformers objects: ``save_pretrained`` writes them, ``AutoTokenizer`` and ``AutoModelForCausalLM`` open them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROPE_THETA = 10_000.0
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
    """A Llama with tied embeddings that starts out able to learn copying, see :func:`start_copying`. ``seed`` decides the weights, no global state does."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=256 * hidden // 96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        start_copying(model)
    return model


@torch.no_grad()
def start_copying(model: LlamaForCausalLM) -> None:
    """Initialise half of the heads of the first two layers so that an induction head (what followed this word before?) is near; draws from the global state.

    Copying a name out of a tool result takes two heads that learn nothing useful before both exist; from the usual initialisation of a small Llama that
    is most of the training. Here the first layer's heads attend to the previous token and write it to a subspace of their own; the second layer's compare
    that subspace with the present token and copy what they find. Compare Trockman and Kolter 2023, "Mimetic initialization of self-attention layers".
    """
    config = model.config
    width, heads = config.hidden_size, config.num_attention_heads
    size = width // heads
    half = heads // 2 * size
    read, write = (torch.linalg.qr(torch.randn(width, width))[0][:half] for _ in range(2))  # (half, width) each, orthonormal rows
    model.model.embed_tokens.weight.normal_(0.0, 1.0)
    model.model.norm.weight.fill_(0.1)  # tied embeddings of norm sqrt(width) would give logits up to width
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    first.v_proj.weight[:half] = read
    first.o_proj.weight[:, :half] = 1.4 * write.T  # sqrt(2): as large as the embedding it is added to
    query, key = previous_token_biases(size, ROPE_THETA)
    first.q_proj.bias[:half] = query.repeat(heads // 2)
    first.k_proj.bias[:half] = key.repeat(heads // 2)
    second.q_proj.weight[:half] = 1.5 * read
    second.k_proj.weight[:half] = 1.5 * write
    second.v_proj.weight[:half] = read
    second.o_proj.weight[:, :half] = read.T


def previous_token_biases(size: int, theta: float, strength: float = 20.0, frequencies: int = 3) -> tuple[Tensor, Tensor]:
    """Query and key bias ``(size,)`` of a head whose attention logit is ``strength`` at distance 1 and less elsewhere.

    Rotary embedding turns pair i by ``angle_i`` a position. With the key turned by one position more than the query, the logit at distance d is
    ``strength * mean_i cos(angle_i (d - 1))`` over the fastest ``frequencies`` pairs.
    """
    pairs = size // 2
    angles = theta ** (-torch.arange(pairs) / pairs)  # (pairs,)
    length = torch.zeros(pairs)
    length[:frequencies] = (strength * size**0.5 / frequencies) ** 0.5  # attention divides by sqrt(size)
    return torch.cat([length, torch.zeros(pairs)]), torch.cat([length * angles.cos(), length * angles.sin()])

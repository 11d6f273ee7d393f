"""What is said to an OpenAI-compatible server about one turn, and what of its answer counts: token ids and log-probabilities, checked, never text.

OpenAI's ``/completions`` has no token ids. vLLM adds them: ``return_token_ids`` for those of the prompt and the turn, ``return_tokens_as_token_ids`` so that
log-probabilities are listed by id. By text, two ids that read alike would be one entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from arpo_algo.policies.base import SamplingParams
from arpo_algo.policies.server_http import ServerError

_ZERO = -9999.0
"""What vLLM sends for a log-probability of minus infinity, which JSON lacks."""
_PREFIX = "token_id:"
_FIXED = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "skip_special_tokens": False,  # a stop string may be one
    "ignore_eos": True,  # stop_token_ids are all that end a turn
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What every request says. The last five: the distribution is the model's own, whatever the server's defaults are."""


@dataclass(slots=True)
class Tokens:
    """Sampled tokens, an entry for each in every list."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled ids, untempered."""
    top: list[list[float]] = field(default_factory=list)
    """Of the K most probable ids, untempered, highest first."""
    finish_reason: str | None = None
    """Why the server stopped."""
    stop_reason: int | str | None = None
    """The stop id or stop string that made it."""


def request(model: str, prompt: list[int], params: SamplingParams, *, max_tokens: int, seed: int, stop_ids: list[int], top_logprobs: int) -> dict[str, Any]:
    """The body that asks for at most ``max_tokens`` after ``prompt``."""
    return _FIXED | {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "seed": seed % 2**63,
        "stop": list(params.stop),
        "stop_token_ids": stop_ids,
        "logprobs": top_logprobs,
    }


def tokens(answer: Any, prompt: list[int], *, top_logprobs: int, vocab_size: int) -> Tokens:
    """The tokens of an answer to a request for ``prompt``. Raises :class:`ServerError` saying what it lacks."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
        raise ServerError(f"the server answered something else than one completion: {str(answer)[:500]}")
    (choice,) = choices
    ids, seen, listed = choice.get("token_ids"), choice.get("prompt_token_ids"), choice.get("logprobs")
    if not _are_ids(ids) or not _are_ids(seen):
        raise ServerError("the server returned no token ids: it must know return_token_ids, as vLLM does")
    if seen != prompt:
        raise ServerError(f"the server did not take the prompt as it is: {len(prompt)} ids were sent, it saw {len(seen)}, and the ids differ")
    if not isinstance(listed, dict):
        raise ServerError("the server returned no log-probabilities: it must know logprobs, as vLLM does")
    chosen, rows = listed.get("token_logprobs"), listed.get("top_logprobs")
    if not (isinstance(chosen, list) and isinstance(rows, list) and len(chosen) == len(rows) == len(ids)):
        raise ServerError(f"the server returned no log-probability for each of {len(ids)} tokens: {str(listed)[:500]}")
    top = [_top(row, token, top_logprobs, vocab_size) for row, token in zip(rows, ids, strict=True)]
    return Tokens(ids, [_number(value) for value in chosen], top, choice.get("finish_reason"), choice.get("stop_reason"))


def _top(row: Any, sampled: int, top_logprobs: int, vocab_size: int) -> list[float]:
    """Log-probabilities of the most probable ids. vLLM lists the sampled one too where it is not among them: the lowest, one more than asked for."""
    if not isinstance(row, dict) or not all(name.startswith(_PREFIX) and name.removeprefix(_PREFIX).isdecimal() for name in row):
        raise ServerError("the server lists log-probabilities by the text of tokens: it must know return_tokens_as_token_ids, as vLLM does")
    by_id = {int(name.removeprefix(_PREFIX)): _number(value) for name, value in row.items()}
    if (largest := max([sampled, *by_id])) >= vocab_size:
        raise ServerError(f"the server knows the id {largest}: vocab_size={vocab_size} is too small")
    return sorted(by_id.values(), reverse=True)[:top_logprobs]


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not value <= 1e-3:
        raise ServerError(f"expected log-probabilities, which are at most 0, got {value!r} from the server")
    return -math.inf if value <= _ZERO else float(value)


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)

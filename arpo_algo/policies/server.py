"""A policy over an OpenAI-compatible server that somebody else runs: for evaluation and sampling, with entropies estimated from the top log-probabilities.

Token ids go in and come out, over ``/completions``; no text is encoded or decoded on the way. OpenAI's protocol has no token ids: the server must speak vLLM's
additions to it (``return_token_ids``, ``return_tokens_as_token_ids``, ``stop_token_ids``). Every request overrules the server's own defaults, such as the
``top_k`` and the penalties of a generation configuration.

What the numbers mean. The server must report log-probabilities of the untempered distribution over all ids, as vLLM does unless it is told otherwise. From
them come the entropies, estimates with bounds (:mod:`arpo_algo.entropy`), at every temperature. They are also the log-probabilities of what was sampled at
temperature 1 and ``top_p`` 1, and greedily; elsewhere what was sampled from is known only up to a factor, and the log-probabilities of the turn are NaN: such
turns can be graded and not trained on. The version is always 0: the protocol does not tell which weights answered.

A turn ends as with every other policy, decided here on the ids. The server is told the same stop strings and ids so that it need not write on; what it wrote
past the end is cut, and where it stopped earlier the rest is asked for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from arpo_algo.entropy import EntropyBounds, estimate_entropies
from arpo_algo.policies.base import Generation, SamplingParams, check_prompt
from arpo_algo.policies.server_http import JSONClient, ServerError
from arpo_algo.policies.server_protocol import Tokens, request, tokens
from arpo_algo.policies.stops import Endings

__all__ = ["ServerError", "ServerPolicy"]

_PROBE_TEMPERATURE = 0.5
"""At this temperature the differences between log-probabilities are twice as large, if they are of the tempered distribution."""


class ServerPolicy:
    """A :class:`~arpo_algo.policies.base.Policy` whose tokens come from a server, asked over HTTP. Its weights are the server's: it cannot be trained.

    ``url``: where ``/completions`` and ``/models`` lie, with the ``/v1``. ``model``: its name on the server. ``tokenizer``: the model's, which decodes turns to
    find stop strings. ``vocab_size``: width of the model's logits (``vocab_size`` of its configuration, not the tokenizer's length): upper bounds of entropies
    depend on it. ``context_length``: tokens of prompt and turn together; None asks the server. ``eos_ids``: ids that end a turn (``eos_token_id`` of the
    generation configuration); None takes the tokenizer's. ``top_logprobs``: K, log-probabilities asked for at each token; vLLM grants 20 unless its
    ``--max-logprobs`` says otherwise.

    Requests run beside each other, as many as are asked for. One that fails for now (no connection, 429, 5xx) is tried again ``max_retries`` times, after
    ``backoff`` seconds, then twice as many, at most 30, or after what ``Retry-After`` says. ``timeout``: seconds for a whole turn, waits included.

    Raises :class:`ServerError` where the server does not answer or what it answers to a probe of one token lacks something, ``ImportError`` without httpx.
    Call :meth:`close`, or use the policy in a ``with`` statement.
    """

    version = 0

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        *,
        vocab_size: int,
        context_length: int | None = None,
        eos_ids: Iterable[int] | None = None,
        api_key: str | None = None,
        top_logprobs: int = 20,
        timeout: float = 600.0,
        max_retries: int = 8,
        backoff: float = 0.5,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"expected a url that begins with http:// or https://, got {url!r}")
        for name, value, least in (("vocab_size", vocab_size, 1), ("top_logprobs", top_logprobs, 1), ("max_retries", max_retries, 0)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if timeout <= 0 or backoff < 0:
            raise ValueError(f"timeout must be above 0 and backoff at least 0 seconds, got {timeout} and {backoff}")
        self.url, self.model, self.tokenizer = url.rstrip("/"), model, tokenizer
        self.vocab_size, self.top_logprobs, self.timeout = vocab_size, min(top_logprobs, vocab_size), timeout
        self.eos_ids = frozenset([tokenizer.eos_token_id] if eos_ids is None else eos_ids) - {None}
        self._endings = Endings(tokenizer, self.eos_ids)
        self._http = JSONClient(self.url, api_key=api_key, max_retries=max_retries, backoff=backoff)
        try:
            self.context_length = self._http.run(self._start(context_length)).result()
        except BaseException:
            self.close()
            raise

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Continues ``prompt_ids``. Cancelling it closes the request, which the server then drops.

        Raises ``ValueError`` for an empty prompt, an id outside the vocabulary, an empty stop string, and where prompt and ``max_new_tokens`` exceed the
        context; ``ServerError`` where the server refuses, fails for longer than the tries last, or answers something else than a turn.
        """
        prompt = [int(i) for i in prompt_ids]
        check_prompt(prompt, params, context_length=self.context_length, vocab_size=self.vocab_size)
        self._endings.detector(params.stop)  # refuses an empty stop string
        try:
            return await asyncio.wrap_future(self._http.run(self._turn(prompt, params)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._http.closed and task is not None and not task.cancelling():
                raise ServerError(f"the policy over {self.url} was closed") from None
            raise

    def close(self) -> None:
        """Closes the connections; turns under way fail with ``ServerError``. Can be called twice."""
        self._http.close()

    def __enter__(self) -> ServerPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- in the thread of the connections -------------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self.timeout):
                yield
        except TimeoutError as error:
            raise ServerError(f"{self.url} did not answer within timeout={self.timeout:g} seconds") from error

    async def _turn(self, prompt: list[int], params: SamplingParams) -> Generation:
        async with self._deadline():
            return await self._sample(prompt, params)

    async def _sample(self, prompt: list[int], params: SamplingParams) -> Generation:
        detector = self._endings.detector(params.stop)
        turn = Tokens()
        while True:
            piece = await self._ask(prompt + turn.ids, params, max_tokens=params.max_new_tokens - len(turn.ids), seed=params.seed + len(turn.ids))
            for token, logprob, top in zip(piece.ids, piece.logprobs, piece.top, strict=True):
                turn.ids.append(token)
                turn.logprobs.append(logprob)
                turn.top.append(top)
                reason, stop = self._endings.of(turn.ids, detector, params.max_new_tokens)
                if reason is not None:
                    return self._generation(turn, params, reason, stop)
            if isinstance(piece.stop_reason, int):
                raise ServerError(f"{self.url} ends turns at the id {piece.stop_reason}, which is not among eos_ids={sorted(self.eos_ids)}: add it there")

    async def _ask(self, prompt: list[int], params: SamplingParams, *, max_tokens: int, seed: int) -> Tokens:
        """At least one token."""
        body = request(self.model, prompt, params, max_tokens=max_tokens, seed=seed, stop_ids=sorted(self.eos_ids), top_logprobs=self.top_logprobs)
        got = tokens(await self._http.ask("POST", "/completions", body), prompt, top_logprobs=self.top_logprobs, vocab_size=self.vocab_size)
        if not got.ids:
            raise ServerError(f"{self.url} answered without a token, for the reason {got.finish_reason!r}")
        return got

    def _generation(self, turn: Tokens, params: SamplingParams, reason: Literal["eos", "stop", "length"], stop: str | None) -> Generation:
        entropies, bounds = self._entropies(turn)
        known = params.temperature == 0 or params.temperature == params.top_p == 1
        return Generation(
            token_ids=turn.ids,
            logprobs=turn.logprobs if known else [math.nan] * len(turn.ids),
            entropies=entropies,
            bounds=bounds,
            stop_reason=reason,
            stop_string=stop,
            version=self.version,
        )

    def _entropies(self, turn: Tokens) -> tuple[list[float], EntropyBounds]:
        width = max(map(len, turn.top))
        try:
            return estimate_entropies([row + [math.nan] * (width - len(row)) for row in turn.top], self.vocab_size)
        except ValueError as error:
            raise ServerError(f"the log-probabilities from {self.url} are not of a distribution over vocab_size={self.vocab_size} ids: {error}") from error

    # --- construction and checks ----------------------------------------------------------------------------------------------------------------------

    async def _start(self, context_length: int | None) -> int:
        """The context length, once the server has shown that it can serve."""
        async with self._deadline():
            longest = _longest(await self._http.ask("GET", "/models"), self.model, self.url)
            await self._probe()
        if context_length is None and longest is None:
            raise ServerError(f"{self.url}/models names no max_model_len of the model {self.model!r}: pass context_length")
        if context_length is not None and longest is not None and context_length > longest:
            raise ValueError(f"context_length must be at most the {longest} tokens that the server holds, got {context_length}")
        return context_length or longest or 0

    async def _probe(self) -> None:
        """Samples one token twice, to see that all that is needed comes, and that log-probabilities are those before the temperature."""
        spreads = []
        for temperature in (1.0, _PROBE_TEMPERATURE):
            got = await self._ask([1 % self.vocab_size], SamplingParams(max_new_tokens=1, temperature=temperature), max_tokens=1, seed=0)
            if len(got.top[0]) < self.top_logprobs:
                raise ServerError(f"{self.url} returned {len(got.top[0])} log-probabilities where {self.top_logprobs} were asked for: lower top_logprobs")
            self._entropies(got)
            some = [value for value in got.top[0] if value > -math.inf]
            spreads.append(some[0] - some[-1])
        if spreads[1] > max(1.5 * spreads[0], 0.01):  # the same prompt gives the same logits up to rounding, so this is far from both
            raise ServerError(
                f"{self.url} returned log-probabilities of the tempered distribution, which do not tell the entropy: start vLLM with its default,"
                " --logprobs-mode raw_logprobs"
            )


def _longest(models: Any, model: str, url: str) -> int | None:
    """The context length that the server names for ``model``. Raises :class:`ServerError` where it does not serve it."""
    cards = models.get("data") if isinstance(models, dict) else None
    served = {card["id"]: card.get("max_model_len") for card in cards if isinstance(card, dict) and "id" in card} if isinstance(cards, list) else {}
    if model not in served:
        raise ServerError(f"{url}/models names the models {sorted(served)}, and not {model!r}")
    return served[model]

"""The turns that a vLLM engine is sampling: what has come of each, and when it has ended. The same for an engine in this process and in others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch

from arpo_algo.policies.base import Generation, SamplingParams
from arpo_algo.policies.decoding import DecodingStats
from arpo_algo.policies.pool import EngineLost
from arpo_algo.policies.sampling import seed_key
from arpo_algo.policies.stops import Endings, StopDetector
from arpo_algo.policies.vllm_worker import COLUMNS, version_of

T = TypeVar("T")
Weights: TypeAlias = str | Iterable[tuple[str, torch.Tensor]]
"""The folder of a checkpoint, or named tensors."""


class EngineStopped(EngineLost):
    """The engine failed or was closed; nothing more can be sampled with it."""


class Engine(Protocol):
    """Where turns are sampled. All methods may be called from any thread."""

    @property
    def vocab_size(self) -> int: ...

    def join(self, name: str, turn: Turn) -> None:
        """Adds a turn to the batch, under a name that no other has had. Its future gets the outcome, whatever happens."""
        ...

    def leave(self, name: str) -> None:
        """Takes a turn out of the batch, if it is still there."""
        ...

    def update(self, weights: Weights, version: int, *, keep_requests: bool) -> None:
        """Samples with ``weights`` from now on, as ``version``. Raises ``RuntimeError`` under turns unless ``keep_requests``."""
        ...

    def run(self, action: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """The result of ``action(vLLM's engine)``, during which no turn begins."""
        ...

    def sleep(self) -> None:
        """Gives the memory of weights and cache away. Raises ``RuntimeError`` under turns; later ones are refused with one."""
        ...

    def wake(self, memory: Literal["weights", "kv_cache"]) -> None:
        """Takes one of the two back. With the cache, which comes last, turns are welcome again."""
        ...

    def close(self) -> None:
        """Ends the engine; turns under way fail with ``EngineStopped``. Can be called twice."""
        ...


@dataclass(slots=True)
class Turn:
    """One turn: what is asked for, and what has been sampled."""

    prompt: list[int]
    params: SamplingParams
    detector: StopDetector | None
    lora: Any = None
    """vLLM's request for the adapter that samples it, whose number is the version; None samples with the model's own weights."""
    future: Future[Generation] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    counted: bool = False
    """Whether its prompt is in the statistics."""

    def generation(self, reason: Literal["eos", "stop", "length"], stop: str | None) -> Generation:
        first = self.versions[0]
        return Generation(
            token_ids=self.ids,
            logprobs=self.logprobs,
            entropies=self.entropies,
            stop_reason=reason,
            stop_string=stop,
            version=first,
            versions=[] if self.versions == [first] * len(self.ids) else self.versions,
        )

    def end(self, outcome: Generation | Exception) -> None:
        """Gives the outcome to whoever waits for it; who has gone away, or has one, is left alone."""
        if self.future.done() or not self.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Generation):
            self.future.set_result(outcome)
        else:
            self.future.set_exception(outcome)


class Turns:
    """The turns under way in one engine, by name; touched by the engine's thread alone."""

    def __init__(self, endings: Endings, stop_ids: Iterable[int], stats: DecodingStats) -> None:
        self._endings = endings
        self._stop_ids = sorted(stop_ids)
        self.stats = stats
        self._live: dict[str, Turn] = {}
        self.asleep = False
        """Whether the engine's memory has been given away."""
        self.lora: Any = None
        """vLLM's request for the adapter that samples the next turn; None samples it with the model's own weights."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, name: str, turn: Turn) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps: call wake() before generate()")
        turn.lora = self.lora
        self._live[name] = turn

    def use(self, lora: Any) -> bool:
        """Whether a turn under way, or the next, is sampled with this adapter."""
        return lora is self.lora or any(turn.lora is lora for turn in self._live.values())

    def discard(self, name: str) -> bool:
        """Whether the turn was under way; it is no more."""
        return self._live.pop(name, None) is not None

    def require_none(self, what: str) -> None:
        if self._live:
            raise RuntimeError(f"{what} while {len(self._live)} requests were under way; wait for them first")

    def params(self, turn: Turn) -> Any:
        """vLLM's sampling parameters for a turn."""
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        return EngineParams(
            max_tokens=turn.params.max_new_tokens,
            temperature=turn.params.temperature,
            top_p=turn.params.top_p,
            seed=seed_key(turn.params.seed) >> 1,  # 63 bits, which every generator takes
            stop_token_ids=self._stop_ids,
            ignore_eos=True,  # the ids above are all that end a turn
            logprobs=COLUMNS - 1,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def receive(self, output: Any) -> bool:
        """Adds new tokens to the turn that an output of vLLM's names; True when that has ended it."""
        turn = self._live.get(output.request_id)
        if turn is None:
            return False
        if not turn.counted:
            turn.counted = True
            self.stats.reused_tokens += output.num_cached_tokens
            self.stats.prefilled_tokens += len(turn.prompt) - output.num_cached_tokens
        completion = output.outputs[0]
        for token, (logprob, entropy, version) in zip(completion.token_ids, _columns(completion.logprobs), strict=True):
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            turn.entropies.append(entropy)
            turn.versions.append(version if turn.lora is None else turn.lora.lora_int_id)
            self.stats.decoded_tokens += 1
            if not math.isfinite(logprob + entropy):
                error = FloatingPointError(f"expected logits that make a distribution, got log-probability {logprob} and entropy {entropy} from vLLM")
                return self._end(output.request_id, error)
            reason, stop = self._endings.of(turn.ids, turn.detector, turn.params.max_new_tokens)
            if reason is not None:
                return self._end(output.request_id, turn.generation(reason, stop))
        if output.finished:
            return self._end(output.request_id, RuntimeError(f"vLLM ended a turn of {len(turn.ids)} tokens for the reason {completion.finish_reason!r}"))
        return False

    def stepped(self, seconds: float) -> None:
        """A step is over; it took the engine ``seconds``."""
        self.stats.forward_calls += 1
        self.stats.forward_seconds += seconds

    def stopped(self, error: Exception) -> None:
        """No turn will be answered any more."""
        for name in list(self._live):
            self._end(name, error)

    def _end(self, name: str, outcome: Generation | Exception) -> bool:
        self._live.pop(name).end(outcome)
        return True


def _columns(logprobs: Any) -> list[tuple[float, float, int]]:
    """(log-probability of the sampled token, entropy, version of the weights) for each position of vLLM's flat log-probabilities."""
    return [
        (logprobs.logprobs[start], logprobs.logprobs[end - 1], version_of(logprobs.token_ids[end - 1]))
        for start, end in zip(logprobs.start_indices, logprobs.end_indices, strict=True)
    ]


def folder_or_tensors(weights: str | PathLike[str] | Iterable[tuple[str, torch.Tensor]]) -> Weights:
    """``weights`` with a path as text. Raises ``ValueError`` where that is not a folder."""
    if not isinstance(weights, str | PathLike):
        return weights
    path = os.fspath(weights)
    if not os.path.isdir(path):
        raise ValueError(f"expected the folder of a checkpoint, got {path!r}")
    return path

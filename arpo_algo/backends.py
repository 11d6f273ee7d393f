"""The policies that a configuration file or a flag can name: where and how the tokens of ``arpo train``, ``eval`` and ``rollout`` are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from arpo_algo.policies.base import Policy


class ClosingPolicy(Policy, Protocol):
    """A policy that holds something until it is closed."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Transformers:
    """transformers in this process, on the CPU or one GPU; in training the trained model itself."""

    max_batch: int = 64
    """Sequences decoded at once."""
    cache_mib: int = 1024
    """Memory for keys and values, in MiB; sequences under way are held in any case."""

    def make(self, model: str, tokenizer: Any) -> ClosingPolicy:
        from arpo_algo.policies.transformers import TransformersPolicy

        return TransformersPolicy.from_pretrained(model, tokenizer=tokenizer, max_batch=self.max_batch, cache_bytes=self.cache_mib << 20)


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """A vLLM engine (``arpo[vllm]``, on the CPU ``constraints-vllm.txt``)."""

    max_batch: int = 64
    """Sequences decoded at once."""
    context_length: int | None = None
    """Tokens of prompt and turn together; by default what the model allows."""
    separate_process: bool = True
    """Run the engine in processes of its own; several engine processes (tensor or data parallel) need it, and so does a learner of several ranks."""
    tensor_parallel_size: int = 1
    """GPUs that share each layer."""
    data_parallel_size: int = 1
    """Engines; the trajectories of one tree stay with one of them."""
    cache_mib: int | None = None
    """Memory for keys and values, in MiB; by default 1,024 on the CPU, and on a GPU the share of its memory that vLLM takes (``gpu_memory_utilization``)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of weights and cache; by default float32 on the CPU, elsewhere the checkpoint's."""
    sleeps: bool = False
    """Free the engine's memory while the learner works on the same GPU."""
    lora_rank: int | None = None
    """Take LoRA adapters of up to this rank instead of whole weights; by default the adapters of ``trainer.lora_rank`` are merged on their way."""
    args: dict[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM; from the configuration file."""

    def make(self, model: str, tokenizer: Any) -> ClosingPolicy:
        from arpo_algo.policies.vllm import VLLMPolicy

        optional: dict[str, Any] = {} if self.cache_mib is None else {"cache_bytes": self.cache_mib << 20}
        parallel = {"tensor_parallel_size": self.tensor_parallel_size, "data_parallel_size": self.data_parallel_size}
        optional |= {name: n for name, n in parallel.items() if n > 1}
        return VLLMPolicy(
            model,
            tokenizer=tokenizer,
            max_batch=self.max_batch,
            context_length=self.context_length,
            separate_process=self.separate_process,
            dtype=self.dtype,
            sleeps=self.sleeps,
            lora_rank=self.lora_rank,
            **optional,
            **self.args,
        )


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server of one's own that speaks OpenAI's completions with token ids, as ``vllm serve`` does: for evaluation and sampling, not for training."""

    url: str = "http://127.0.0.1:8000/v1"
    """Address of the API."""
    name: str | None = None
    """The model's name there; by default ``--model``, where tokenizer and configuration are read from in any case."""
    api_key: str | None = None
    """Sent as a bearer token."""
    context_length: int | None = None
    """Tokens of prompt and turn together; by default what the server says."""
    top_logprobs: int = 20
    """Log-probabilities asked for at each token, from which entropies are estimated."""
    timeout: float = 600.0
    """Seconds within which a turn must have come, further tries included."""
    max_retries: int = 8
    """Further tries where the server is out of reach, overloaded, or fails."""

    def make(self, model: str, tokenizer: Any) -> ClosingPolicy:
        from arpo_algo.policies.model_info import checkpoint_info, model_eos_ids
        from arpo_algo.policies.server import ServerPolicy

        checkpoint = checkpoint_info(model)
        return ServerPolicy(
            self.url,
            model if self.name is None else self.name,
            tokenizer,
            vocab_size=int(checkpoint.config.get_text_config().vocab_size),
            eos_ids=model_eos_ids(checkpoint, tokenizer),
            context_length=self.context_length,
            api_key=self.api_key,
            top_logprobs=self.top_logprobs,
            timeout=self.timeout,
            max_retries=self.max_retries,
        )


AnyBackend = Transformers | VLLM | Server

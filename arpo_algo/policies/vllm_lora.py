"""LoRA adapters served by vLLM, in place of whole weights: an update moves megabytes, and the base model in the engine stays as it is.

Each version of the weights is an adapter of its own, whose number is the version. vLLM loads it from a folder, which lies in memory. Requests carry the
adapter they are to be served with; the prefix cache keeps the adapters' keys and values apart, so nothing has to be cleared.

vLLM skips what it has no place for: an adapter whose names lead nowhere is loaded without a word, and the base model is served. Here that is an error.
Every function takes an engine in this process (``LLMEngine``, called in its own thread with ``asyncio.run``) or in others (``AsyncLLM``), with the worker
extension :class:`~arpo_algo.policies.vllm_shared_memory.WeightReceiver`.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from pathlib import Path
from typing import Any, get_args

_MEMORY = Path("/dev/shm")


def lora_arguments(rank: int) -> dict[str, Any]:
    """What vLLM's engine arguments need beside the model for adapters of ``rank``. Two may be in a batch: turns under way end with the one they began with."""
    from vllm.config.lora import MaxLoRARanks

    ranks = sorted(get_args(MaxLoRARanks))
    if not 1 <= rank <= ranks[-1]:
        raise ValueError(f"vLLM serves LoRA adapters of rank 1 to {ranks[-1]}, got {rank}")
    return {"enable_lora": True, "max_lora_rank": next(r for r in ranks if r >= rank), "max_loras": 2}


def scratch_folder() -> Path:
    """A new folder for adapters, in memory where the system has a place for it. The caller removes it (``shutil.rmtree``)."""
    return Path(tempfile.mkdtemp(prefix="arpo-adapters-", dir=_MEMORY if _MEMORY.is_dir() else None))


def save_adapter(model: Any, folder: Path, version: int) -> None:
    """Writes the adapter of a peft model for :func:`request_of`. Raises ``ValueError`` where it holds more than LoRA weights: vLLM serves no others."""
    configs = getattr(model, "peft_config", None)
    if not configs or len(configs) != 1:
        raise ValueError(f"expected a model with one LoRA adapter, got {sorted(configs) if configs else f'a {type(model).__name__} without adapters'}")
    config = next(iter(configs.values()))
    for name in ("modules_to_save", "use_dora", "layer_replication", "trainable_token_indices"):
        if getattr(config, name, None):
            raise ValueError(f"vLLM cannot serve adapters with {name}, got {getattr(config, name)!r}: send the whole weights instead")
    if config.bias != "none":
        raise ValueError(f"vLLM cannot serve adapters that train biases, got bias={config.bias!r}: send the whole weights instead")
    model.save_pretrained(_path(folder, version))


def request_of(version: int, folder: Path) -> Any:
    """vLLM's ``LoRARequest`` for the adapter of ``version`` in ``folder``. Version 0 has none: it is the base model."""
    from vllm.lora.request import LoRARequest

    if version < 1:
        raise ValueError(f"versions of adapters count from 1, got {version}; requests to the base model carry none")
    return LoRARequest(lora_name=f"version-{version}", lora_int_id=version, lora_path=str(_path(folder, version)))


async def load_adapter(llm: Any, request: Any) -> None:
    """Loads an adapter beside those that serve. Raises ``ValueError`` where part of it has no place in the engine, which then goes on without it, and where
    the engine has one of that version: vLLM would keep the old one."""
    from vllm.v1.engine.exceptions import EngineDeadError

    if request.lora_int_id in await _result(llm.list_loras()):
        raise ValueError(f"the vLLM engine has an adapter {request.lora_name} already: drop it first, or count versions on")
    try:
        await _result(llm.add_lora(request))
    except EngineDeadError:
        raise
    except Exception as error:  # of another process all errors come as this one
        raise ValueError(f"the vLLM engine cannot serve the adapter {request.lora_name}: {error}") from error
    on_workers = await _result(llm.collective_rpc("unused_adapter_parts", args=(request.lora_int_id,)))
    unused = sorted(set.intersection(*(set(parts) for parts in on_workers)))  # under pipeline parallelism a worker has only its own layers
    if unused:
        await _result(llm.remove_lora(request.lora_int_id))
        shown = ", ".join(unused[:8]) + (f" and {len(unused) - 8} more" if len(unused) > 8 else "")
        raise ValueError(f"the vLLM engine has no place for parts of the adapter {request.lora_name}, and would serve it without them: {shown}")


async def drop_adapter(llm: Any, request: Any) -> None:
    """Unloads an adapter and deletes its files. No request with it may be under way: vLLM would load it again, and fail."""
    await _result(llm.remove_lora(request.lora_int_id))
    shutil.rmtree(request.lora_path, ignore_errors=True)


def _path(folder: Path, version: int) -> Path:
    return folder / str(version)


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value

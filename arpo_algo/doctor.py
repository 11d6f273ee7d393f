"""``arpo doctor``: what this machine offers, for bug reports and for the question why something is slow or refused."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Iterator

from arpo_algo.versions import versions

EXTRAS = {
    "search": ("tantivy",),
    "math": ("math_verify",),
    "data": ("pyarrow", "datasets"),
    "train": ("torch", "transformers", "safetensors", "jinja2", "tyro", "rich"),
    "lora": ("peft",),
    "gguf": ("gguf",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "vllm": ("vllm",),
    "server": ("httpx",),
    "ray": ("ray",),
    "e2b": ("e2b_code_interpreter",),
    "monty": ("pydantic_monty",),
    "ddgs": ("ddgs",),
    "browse": ("trafilatura", "lxml_html_clean"),
    "mcp": ("mcp",),
    "trl": ("trl",),
    "openenv": ("websockets",),
    "openenv-server": ("openenv",),
    "verifiers": ("verifiers",),
    "reasoning-gym": ("reasoning_gym",),
    "gem": ("gem",),
    "skyrl-gym": ("skyrl_gym",),
    "textarena": ("textarena",),
}


def report() -> str:
    """Machine, versions, devices, extras and the isolation of model-written code, as text."""
    return "\n".join([*_machine(), "", *_versions(), "", *_extras(), "", *_isolation()])


def _machine() -> Iterator[str]:
    try:
        import torch
    except ModuleNotFoundError:
        yield f"machine      {platform.platform()}, {os.cpu_count()} CPUs; no torch"
        return
    yield f"machine      {platform.platform()}, {os.cpu_count()} CPUs, torch uses {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        yield "GPUs         none"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}        {properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _versions() -> Iterator[str]:
    for name, found in versions().items():
        yield f"{name:<24} {found}"


def _extras() -> Iterator[str]:
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        yield f"extra {extra:<15} " + ("ready" if not missing else f"missing {', '.join(missing)}: pip install 'arpo[{extra}]'")


def _isolation() -> Iterator[str]:
    from arpo_env.sandbox import IsolationError, probe

    try:
        yield str(probe())
    except IsolationError as error:
        yield f"sandbox      {error}"

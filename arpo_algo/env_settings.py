"""The environment that a configuration file or a flag can name."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium

from arpo_algo.settings import SettingsError

Env = gymnasium.Env[Any, Any]


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """Which environment, over which tasks."""

    id: str = "arpo/World-v0"
    """A Gymnasium id, or MODULE:NAME of a function or class that makes an environment."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment, for example ``{"hops_max": 3}``; from the configuration file."""
    tasks: Path | None = None
    """Task set to load (.jsonl, .parquet); goes to the environment as ``tasks``. With it, ``id`` is arpo/SearchQA-v0 unless given."""
    search_cache: Path | None = None
    """Recorded searches (.json: query -> text) that answer the search tool; goes to the environment as ``search``."""

    def make(self) -> Env:
        """The environment. Raises before anything is sampled when it cannot be made or does not fork."""
        name = "arpo/SearchQA-v0" if self.tasks is not None and self.id == EnvSettings.id else self.id
        args = dict(self.args)
        if self.tasks is not None:
            args["tasks"] = str(self.tasks)
        if self.search_cache is not None:
            args["search"] = str(self.search_cache)
        try:
            made = _maker(name)(**args)
        except TypeError as error:  # mostly an argument that it does not have
            raise SettingsError(f"{name} cannot be made with {', '.join(sorted(args)) or 'no arguments'}: {error}") from error
        if not isinstance(made, gymnasium.Env):
            raise SettingsError(f"{name} must make a gymnasium.Env, got {type(made).__name__}")
        return made


def _maker(name: str) -> Callable[..., Any]:
    """What makes the environment of a Gymnasium id or of MODULE:NAME."""
    module, colon, attribute = name.partition(":")
    if not colon or re.search(r"-v\d+$", name):  # Gymnasium knows ids with a module as well
        importlib.import_module("arpo_env")  # registers the ids
        return partial(gymnasium.make, name, disable_env_checker=True)
    sys.path.insert(0, os.getcwd())
    found = getattr(importlib.import_module(module), attribute, None)
    if not callable(found):
        raise SettingsError(f"{name} must name a function or class that makes an environment, got {found!r}")
    return found  # type: ignore[no-any-return]

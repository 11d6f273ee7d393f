"""Checks of the numbers in a settings dataclass. ``TypeError`` for what is no number, or no integer where the field says ``int``; ``ValueError`` for one out of
bounds. None passes where the field allows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any


def check_at_least(config: Any, least: int, *names: str) -> None:
    """The fields ``names`` are at least ``least``."""
    _check(config, names, f"at least {least}", lambda value: value >= least)


def check_above(config: Any, bound: int, *names: str) -> None:
    """The fields ``names`` are greater than ``bound``."""
    _check(config, names, f"greater than {bound}", lambda value: value > bound)


def _check(config: Any, names: tuple[str, ...], wanted: str, holds: Callable[[Any], bool]) -> None:
    types = {field.name: str(field.type) for field in fields(config)}
    for name in names:
        value = getattr(config, name)
        if value is None and "None" in types[name]:
            continue
        whole = "float" not in types[name]
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise TypeError(f"{name} must be {'an integer' if whole else 'a number'} {wanted}, got {value!r}")
        if not holds(value):
            raise ValueError(f"{name} must be {wanted}, got {value}")

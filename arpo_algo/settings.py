"""TOML -> frozen dataclasses, and TOML -> command-line flags of the same dataclasses.

An unknown key is an error with a suggestion; a value of the wrong type is an error that says what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class SettingsError(ValueError):
    """A configuration file does not fit the settings it is for."""


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises :class:`SettingsError` naming the file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SettingsError(f"no such configuration file: {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from error


def build(cls: type[T], values: Mapping[str, Any], *, base: T | None = None, where: str = "") -> T:
    """An instance of the dataclass ``cls`` from nested mappings. Fields that are not named are those of ``base``, else the defaults.

    A field that may be one of several dataclasses takes a table with ``type = "ClassName"``; without it, the class is that of the default.
    ``where`` names the table in messages. Raises :class:`SettingsError`.
    """
    hints, names = typing.get_type_hints(cls), [field.name for field in _fields(cls)]
    for key in values:
        if key not in names:
            raise SettingsError(f"unknown key {where}{key}{_suggestion(key, names)}")
    defaults = {field.name: _default(field) if base is None else getattr(base, field.name) for field in _fields(cls)}
    arguments = {key: _convert(hints[key], value, defaults[key], f"{where}{key}") for key, value in values.items()}
    kept = {} if base is None else {name: value for name, value in defaults.items() if name not in arguments}
    try:
        return cls(**kept, **arguments)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"[{where.rstrip('.') or cls.__name__}]: {error}") from error


def flags(built: Any, values: Mapping[str, Any], *, prefix: str = "--") -> tuple[list[str], dict[str, Any]]:
    """The ``values`` that ``built`` was built from as flags of a command line, and what no flag says: a class chosen by ``type``, a field that is a mapping."""
    said: list[str] = []
    unsaid: dict[str, Any] = {}
    for key, value in values.items():
        part = getattr(built, key, None)  # the key "type" is no field
        if dataclasses.is_dataclass(part):
            inner, unsaid[key] = flags(part, value, prefix=f"{prefix}{key}.")
            said += inner
        elif isinstance(value, Mapping) or not hasattr(built, key):
            unsaid[key] = value
        elif isinstance(value, list | tuple):
            said += [prefix + key, *map(str, value)]
        else:
            said.append(f"{prefix}{key}={value}")
    return said, unsaid


def _suggestion(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known keys: {', '.join(names)}"


def _convert(hint: Any, value: Any, default: Any, where: str) -> Any:
    options = _options(hint)
    classes = _dataclasses(hint)
    if classes and isinstance(value, Mapping):
        return _build_one_of(classes, value, default, where)
    for option in options:
        fitted = _fit(option, value)
        if fitted is not _MISFIT:
            return fitted
    raise SettingsError(f"{where} must be {' or '.join(_name(option) for option in options)}, got {value!r}")


def _build_one_of(classes: Mapping[str, type], value: Mapping[str, Any], default: Any, where: str) -> Any:
    rest = dict(value)
    usual = next(iter(classes)) if len(classes) == 1 else type(default).__name__
    name = rest.pop("type", usual) if len(classes) > 1 else usual
    if name not in classes:
        raise SettingsError(f"{where}.type must be one of {', '.join(classes)}, got {name!r}")
    return build(classes[name], rest, base=default if type(default) is classes[name] else None, where=f"{where}.")


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def _default(field: dataclasses.Field[Any]) -> Any:
    """The default of a field, ``MISSING`` where it has none."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _options(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _dataclasses(hint: Any) -> dict[str, type]:
    """The dataclasses among the types that a field may have, by name."""
    return {option.__name__: option for option in _options(hint) if isinstance(option, type) and dataclasses.is_dataclass(option)}


_MISFIT = object()


def _fit(hint: Any, value: Any) -> Any:
    """``value`` as ``hint``, or ``_MISFIT``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint in (None, type(None)) and value is None):
        return value
    if origin is Literal:
        return value if value in args else _MISFIT
    if origin is tuple and isinstance(value, list | tuple):
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        fitted = [_fit(kind, item) for kind, item in zip(inner, value, strict=False)]
        return tuple(fitted) if len(inner) == len(value) and _MISFIT not in fitted else _MISFIT
    if (origin or hint) in (dict, Mapping) and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    return _MISFIT


def _name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    return "nothing" if hint is type(None) else getattr(hint, "__name__", str(hint))

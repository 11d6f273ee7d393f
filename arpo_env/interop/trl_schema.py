"""A tool's JSON schema -> a typed method with a Google docstring, from which transformers makes the same schema again.

transformers reads types and docstrings only. What they cannot say (limits, patterns, defaults, the fields of an object) is added to the argument's
description as JSON, so that the model reads it.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Union

from arpo_env.tools.base import Tool

_TYPES: Mapping[str, Any] = {"string": str, "integer": int, "number": float, "boolean": bool, "null": type(None), "array": list, "object": dict}
_RESERVED = ("reset", "get_reward")
_HEADINGS = re.compile(r"\b(Args|Returns|Raises|choices):", re.I)
"""What a docstring parser takes for the start of a section or of a list of choices."""


def method_of(tool: Tool) -> Callable[..., str]:
    """A function whose first argument has a ``_call(name, arguments)``; name, signature and docstring are the tool's. Raises ``ValueError``."""
    if tool.name in _RESERVED or tool.name.startswith("_"):
        raise ValueError(f"tool {tool.name!r} cannot be a method of a TRL environment: {_RESERVED} and names with a leading underscore are not tools there")

    def method(self: Any, **arguments: Any) -> str:
        return str(self._call(tool.name, arguments))

    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", ())
    hints = {name: type_of(schema) for name, schema in properties.items()}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name, hint in hints.items():
        default = inspect.Parameter.empty if name in required else properties[name].get("default")
        try:
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default))
        except ValueError as error:
            raise ValueError(f"tool {tool.name!r}: argument {name!r} cannot be an argument of a Python method, as TRL needs: {error}") from None
    method.__name__ = method.__qualname__ = tool.name
    method.__doc__ = _docstring(tool, properties)
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method


def type_of(schema: Mapping[str, Any]) -> Any:
    """The type hint that says most of a JSON schema."""
    kind, enum = schema.get("type"), schema.get("enum")
    if enum and _literal(enum):
        return Literal[tuple(enum)]
    options = [{**schema, "type": one} for one in kind] if isinstance(kind, list) else schema.get("anyOf")
    if options:
        return Union[tuple(type_of(option) for option in options)]  # noqa: UP007 - of a list made at run time
    if kind == "array" and isinstance(schema.get("items"), Mapping):
        return list[type_of(schema["items"])]  # type: ignore[misc]
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return dict[str, type_of(schema["additionalProperties"])]  # type: ignore[misc]
    return _TYPES.get(str(kind), Any)


def _docstring(tool: Tool, properties: Mapping[str, Any]) -> str:
    described = [f"    {name}: {_description(name, schema)}" for name, schema in properties.items()]
    shared = {key: value for key, value in tool.parameters.items() if key.startswith("$")}  # $defs, which arguments may refer to
    description = f"{tool.description} {json.dumps(shared, ensure_ascii=False)}" if shared else tool.description
    return "\n".join([_inert(description), *(["", "Args:", *described] if described else [])])


def _description(name: str, schema: Mapping[str, Any]) -> str:
    said = " ".join(str(schema.get("description", "")).split()) or name  # transformers wants a description, and it must stay on its line
    unsaid = _unsaid(schema)
    return _inert(f"{said} {json.dumps(unsaid, ensure_ascii=False)}" if unsaid else said)


def _unsaid(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of an argument's schema that its type hint does not hold."""
    left = {key: value for key, value in schema.items() if key not in ("type", "description", "enum", "anyOf", "items", "additionalProperties", "title")}
    for key in ("items", "additionalProperties"):
        inner = schema.get(key)
        if isinstance(inner, Mapping) and (_unsaid(inner) or "description" in inner):
            left[key] = inner
    if any(_unsaid(option) or "description" in option for option in schema.get("anyOf", ())):
        left["anyOf"] = schema["anyOf"]
    return left if _literal(schema.get("enum", ())) else {**left, "enum": schema["enum"]}


def _literal(values: Iterable[Any]) -> bool:
    """Whether a type hint can list these values."""
    return all(isinstance(value, str | int | float | bool | None) for value in values)


def _inert(text: str) -> str:
    """``text`` without anything that a docstring parser would take for its own."""
    return _HEADINGS.sub(r"\1 -", text).strip()

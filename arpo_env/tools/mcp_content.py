"""What a model reads of an MCP server: the result of a call as text, and schemas that our checks of arguments can work with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from arpo_env.sandbox.text import shorten
from arpo_env.tools.base import ToolResult


def as_result(result: Any, output_chars: int) -> ToolResult:
    """The ``CallToolResult`` of the SDK as a result: text parts joined, structured content as JSON where there is no text, the rest in words.

    ``data`` holds the structured content. A result that the server marks as an error is an ``exception``.
    """
    parts = [_as_text(part) for part in result.content]
    if result.structured_content is not None and not any(part.type == "text" for part in result.content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = shorten(readable("\n".join(parts)) or "(no output)", output_chars)
    if result.is_error:
        return ToolResult.failure("exception", text)
    return ToolResult(text, data=result.structured_content)


def _as_text(part: Any) -> str:
    """One part of a result in words. ``getattr``: a later protocol may bring parts of other kinds."""
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        resource = part.resource
        text = getattr(resource, "text", None)
        return f"[{resource.uri}]\n{text}" if text is not None else f"[{resource.uri}: {resource.mime_type or 'data'}, {_size(resource.blob)}]"
    if part.type == "resource_link":
        return f"[{part.name}: {part.uri}]" + (f" {part.description}" if part.description else "")
    return f"[{part.type}: {getattr(part, 'mime_type', 'unknown kind')}, {_size(getattr(part, 'data', ''))}]"


def _size(base64: str) -> str:
    return f"{len(base64.rstrip('=')) * 3 // 4:,} bytes"


def readable(text: str) -> str:
    """``text`` without lone surrogates, which no tokenizer takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_parameters(schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A server's input schema in the form that arguments are checked against. ``ValueError`` naming the tool where it is no object schema.

    Two spellings of "anything" are put into one: a property ``true`` is ``{}``; an object without ``properties`` takes any.
    """
    properties = schema.get("properties", {})
    if schema.get("type") != "object" or not isinstance(properties, Mapping):
        raise ValueError(f"{where}: the input schema must be a JSON schema of type 'object', got {dict(schema)!r:.200}; leave it out with exclude=")
    parameters = dict(schema)
    parameters["properties"] = {name: _property(value, f"{where}: argument {name!r}") for name, value in properties.items()}
    required = schema.get("required", [])
    if not isinstance(required, list) or not set(map(str, required)) <= set(properties):
        raise ValueError(f"{where}: 'required' must name properties out of {list(properties)}, got {required!r}; leave the tool out with exclude=")
    if "properties" not in schema:
        parameters.setdefault("additionalProperties", True)
    return parameters


def _property(schema: Any, where: str) -> dict[str, Any]:
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise ValueError(f"{where}: expected a JSON schema, got {schema!r:.200}; leave the tool out with exclude=")
    kind, choices, options = schema.get("type", ""), schema.get("enum", []), schema.get("anyOf", [{}])
    kinds = kind if isinstance(kind, list) else [kind]
    if not all(isinstance(item, str) for item in kinds) or not isinstance(choices, list) or not isinstance(options, list) or not options:
        raise ValueError(f"{where}: expected a JSON schema, got {dict(schema)!r:.200}; leave the tool out with exclude=")
    found = dict(schema)
    if "anyOf" in schema:
        found["anyOf"] = [_property(option, where) for option in options]
    return found

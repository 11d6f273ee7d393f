"""What a tool is: a name, a JSON schema, a call, and how it forks.

A tool given to an environment is a *prototype*. At every ``reset`` the environment calls :meth:`Tool.bind` and works with what comes back, so two
episodes never share state; when the environment forks it calls :meth:`Tool.fork`, so two branches never do either. Stateless tools return themselves
from both.

Three kinds of failure are kept apart (``ToolResult.error``):

* the policy's fault (``unknown_tool``, ``bad_arguments``) and the called code's fault (``exception``, ``timeout``, ``died``, ``limit``): observations,
  the model reads what went wrong;
* the infrastructure's fault (``unavailable``): retried while the deadline lasts, then an observation that is counted apart;
* a bug in the tool's own contract (bad schema, missing name): :class:`TypeError` or :class:`ValueError` when the environment is built.
"""

from __future__ import annotations

import copy
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from arpo_env._together import all_or_none
from arpo_env.task import Task

if TYPE_CHECKING:
    from arpo_env.sandbox.isolation import IsolationReport

ErrorKind = Literal["unknown_tool", "bad_arguments", "exception", "timeout", "died", "limit", "unavailable"]
ForkSupport = Literal["shared", "native", "copy", "replay", "none"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What one call gave. A failure is a result too: ``ok`` is False, ``error`` its kind, ``text`` what the model reads."""

    text: str
    ok: bool = True
    error: ErrorKind | None = None
    data: Any = None
    """A machine-readable form of the result for programs; never shown to the model."""
    state: Literal["none", "kept", "lost"] = "none"
    """What a stateful tool did with its state: ``lost`` means that the next call starts afresh."""

    @classmethod
    def failure(cls, error: ErrorKind, text: str, *, state: Literal["none", "kept", "lost"] = "none") -> ToolResult:
        """A failed call of kind ``error`` whose explanation the model reads."""
        return cls(text=text, ok=False, error=error, state=state)


class Tool:
    """Base class of all tools. Subclass it for a stateful tool; for a stateless one use :func:`tool` on a function.

    A subclass sets the class attributes below and defines :meth:`call`. A stateful tool whose state is plain Python objects needs nothing more
    (``fork_support = "copy"``: ``bind`` and ``fork`` deep-copy it). One that owns a process, a file or a connection overrides ``bind``, ``fork`` and
    ``close`` and declares ``"native"``.
    """

    name: str = ""
    description: str = ""
    version: str = "1"
    """Part of the key under which results are cached: raise it when the same call means something else than before."""
    parameters: Mapping[str, Any] = types.MappingProxyType({"type": "object", "properties": {}})
    """JSON schema of the arguments, an object schema."""
    stateful: bool = False
    deterministic: bool = True
    """The same calls in the same order give the same results: what replay and caching rely on."""
    fork_support: ForkSupport = "shared"
    unforkable: str = "it declares so; use it without branching, or give it a fork() method"
    """Why it cannot be forked and what to do, where ``fork_support`` is ``"none"``."""
    timeout: float | None = 30.0
    """Deadline of one call in seconds, enforced by the environment. ``None``: the call runs inline, without one (fast pure functions)."""
    retries: int = 2
    """How often a result with ``error == "unavailable"`` is tried again within the deadline. Other failures are never retried."""
    max_concurrency: int | None = None
    """How many calls of this tool may run at once over all episodes of one environment and its forks."""

    def call(self, **arguments: Any) -> ToolResult | str:
        """Run the tool. A returned ``str`` is a success. An exception becomes an ``exception`` result: its type and message, no traceback."""
        raise NotImplementedError

    def bind(self) -> Self:
        """A fresh instance for one episode. Stateless tools return themselves."""
        return copy.deepcopy(self) if self.stateful else self

    def start_episode(self, task: Task) -> None:
        """Called once on the bound instance before the first turn, for tools that depend on the task."""

    def fork(self) -> Self:
        """An independent copy in the present state. Stateless tools return themselves."""
        return copy.deepcopy(self) if self.stateful else self

    def fork_many(self, n: int) -> list[Self]:
        """``n`` independent copies, all or none. Override it where making them at once is cheaper, as with a remote machine that is copied in one request."""
        return all_or_none(n, self.fork, lambda twin: twin.close() if twin.stateful else None)  # a stateless one is this very instance

    def bind_with(self, others: Mapping[str, Tool]) -> Self:
        """:meth:`bind` in an episode for which ``others`` are bound. Override it where several tools have one state, as those of one server."""
        return self.bind()

    def fork_with(self, others: Sequence[Mapping[str, Tool]]) -> list[Self]:
        """:meth:`fork_many`: one copy for each of ``others``, the tools that were copied before it. Override it together with :meth:`bind_with`."""
        return self.fork_many(len(others))

    def close(self) -> None:
        """Free what this instance holds. Idempotent. Never closes what a fork holds."""

    def settings(self) -> Mapping[str, Any]:
        """What the results depend on beside the arguments, as JSON values: part of the key under which they are cached. No secrets."""
        return {}

    def normalised(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The arguments as a cache keys on them: those that mean the same, alike. Every character counts unless a tool knows better."""
        return arguments

    def isolation(self) -> IsolationReport | None:
        """What is protected from foreign code that this tool runs; None for a tool that runs none."""
        return None

    def schema(self) -> dict[str, Any]:
        """The tool in the form chat templates take: ``{"type": "function", "function": {...}}``."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": dict(self.parameters)},
        }

    @property
    def main_argument(self) -> str | None:
        """The argument that the text between ``<name>`` and ``</name>`` goes to: the first required one, else the first."""
        return next(iter(self.parameters.get("required") or self.parameters.get("properties", ())), None)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


def check_tool(tool: Tool) -> None:
    """Raise ``TypeError``/``ValueError`` where the tool breaks its contract. Environments call it at construction, before any token is spent."""
    if not isinstance(tool, Tool):
        raise TypeError(f"a tool must be a Tool (decorate a function with @arpo_env.tool), got {type(tool).__name__}: {tool!r}")
    where = f"tool {tool.name or type(tool).__name__!r}"
    if not isinstance(tool.name, str) or not _NAME.fullmatch(tool.name):
        raise ValueError(f"{where}: name must match {_NAME.pattern}, got {tool.name!r}")
    if not isinstance(tool.parameters, Mapping) or tool.parameters.get("type") != "object":
        raise ValueError(f"{where}: parameters must be a JSON schema of type 'object', got {tool.parameters!r}")
    properties = tool.parameters.get("properties", {})
    missing = [name for name in tool.parameters.get("required", ()) if name not in properties]
    if missing:
        raise ValueError(f"{where}: required names {missing} are not among its properties {sorted(properties)}")
    if tool.timeout is not None and not tool.timeout > 0:
        raise ValueError(f"{where}: timeout must be positive or None, got {tool.timeout!r}")
    if tool.retries < 0:
        raise ValueError(f"{where}: retries must be at least 0, got {tool.retries!r}")
    if tool.max_concurrency is not None and tool.max_concurrency < 1:
        raise ValueError(f"{where}: max_concurrency must be at least 1 or None, got {tool.max_concurrency!r}")
    if tool.fork_support not in typing.get_args(ForkSupport):
        raise ValueError(f"{where}: fork_support must be one of {typing.get_args(ForkSupport)}, got {tool.fork_support!r}")
    _check_call(tool, where)
    if tool.stateful and tool.fork_support == "shared":
        raise ValueError(f"{where}: a stateful tool cannot be shared by forks; declare fork_support 'copy', 'native', 'replay' or 'none'")


def _check_call(tool: Tool, where: str) -> None:
    """Raise ``TypeError`` where ``call`` does not take the arguments that the schema promises."""
    if type(tool).call is Tool.call:
        raise TypeError(f"{where}: define call(self, **arguments)")
    function = tool.function if isinstance(tool, FunctionTool) else tool.call
    if inspect.iscoroutinefunction(function):
        raise TypeError(f"{where}: call must be a plain function, got a coroutine function; run it to its end inside, for example with asyncio.run")
    properties, required = tool.parameters.get("properties", {}), tool.parameters.get("required", ())
    signature = inspect.signature(function)
    for names in (properties, required):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise TypeError(f"{where}: call{signature} does not take the schema's arguments {sorted(names)}: {error}") from None


class FunctionTool(Tool):
    """A stateless tool made from a typed function; see :func:`tool`."""

    def __init__(
        self,
        function: Callable[..., ToolResult | str],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = 30.0,
        version: str = "1",
    ):
        self.function = function
        self.version = version
        self.name = name or function.__name__
        doc = inspect.getdoc(function) or ""
        self.description = description or doc.split("\n\n")[0].replace("\n", " ").strip()
        self.parameters = schema_of(function, doc)
        self.timeout = timeout
        if not self.description:
            raise ValueError(f"tool {self.name!r}: needs a docstring or description=; the model reads it")

    def call(self, **arguments: Any) -> ToolResult | str:
        return self.function(**arguments)

    def settings(self) -> Mapping[str, Any]:
        return {"function": f"{self.function.__module__}.{getattr(self.function, '__qualname__', type(self.function).__qualname__)}"}

    def __deepcopy__(self, memo: dict[int, Any]) -> FunctionTool:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> ToolResult | str:
        return self.function(*args, **kwargs)


@typing.overload
def tool(function: Callable[..., ToolResult | str], /) -> FunctionTool: ...
@typing.overload
def tool(
    *, name: str | None = None, description: str | None = None, timeout: float | None = 30.0, version: str = "1"
) -> Callable[[Callable[..., ToolResult | str]], FunctionTool]: ...
def tool(
    function: Callable[..., ToolResult | str] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    timeout: float | None = 30.0,
    version: str = "1",
) -> FunctionTool | Callable[[Callable[..., ToolResult | str]], FunctionTool]:
    """Make a stateless tool from a typed function and its docstring: ``@tool`` or ``@tool(timeout=2.0)``.

    The first paragraph of the docstring is the description; lines ``name: text`` under ``Args:`` describe the arguments; annotations give their types.
    Raise ``version`` when results are cached and the function has changed.
    """
    if function is None:
        return lambda f: FunctionTool(f, name=name, description=description, timeout=timeout, version=version)
    return FunctionTool(function)


_JSON_TYPES: Mapping[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def schema_of(function: Callable[..., Any], doc: str = "") -> dict[str, Any]:
    """The JSON schema of a function's arguments. Raises ``TypeError`` for an argument without a usable annotation."""
    hints = typing.get_type_hints(function)
    described = dict(re.findall(r"^\s*(\w+)(?:\s*\([^)]*\))?:\s*(.+)$", doc.partition("Args:")[2].partition("\n\n")[0], re.M))
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"tool {function.__name__!r}: *args and **kwargs have no JSON schema")
        if name not in hints:
            raise TypeError(f"tool {function.__name__!r}: argument {name!r} needs a type annotation")
        properties[name] = _json_type(hints[name], f"tool {function.__name__!r}: argument {name!r}")
        if name in described:
            properties[name]["description"] = described[name].strip()
        if parameter.default is parameter.empty:
            required.append(name)
        else:
            properties[name]["default"] = parameter.default
    return {"type": "object", "properties": properties, "required": required}


def _json_type(hint: Any, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else _json_type(a, where) for a in args]}
    if origin is list:
        return {"type": "array", "items": _json_type(args[0], where)}
    kind = _JSON_TYPES.get(origin or hint)
    if kind is None:
        raise TypeError(f"{where}: expected one of str, int, float, bool, list, dict, Literal or a union of them, got {hint!r}")
    return {"type": kind}


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
    "boolean": lambda v: isinstance(v, bool),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
    "null": lambda v: v is None,
}


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with ``arguments`` for ``tool``, in words for the model; None when nothing is.

    Covers names, required names, and the JSON types of the top level: what a policy gets wrong. Deeper structure is the tool's to check.
    """
    properties = tool.parameters.get("properties", {})
    unknown = [name for name in arguments if name not in properties]
    if unknown and not tool.parameters.get("additionalProperties", False):
        return f"unknown argument {', '.join(map(repr, unknown))}; {tool.name} takes: {', '.join(properties) or 'no arguments'}"
    missing = [name for name in tool.parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"missing argument {', '.join(map(repr, missing))}"
    for name, value in arguments.items():
        schema = properties.get(name, {})
        if "enum" in schema and value not in schema["enum"]:
            return f"argument {name!r} must be one of {schema['enum']}, got {value!r}"
        kinds = [kind for option in schema.get("anyOf", [schema]) for kind in _as_list(option.get("type"))]
        if not any(kind not in _CHECKS or _CHECKS[kind](value) for kind in kinds):
            return f"argument {name!r} must be {' or '.join(map(str, kinds))}, got {type(value).__name__} {value!r:.80}"
    return None


def _as_list(kind: Any) -> list[Any]:
    return kind if isinstance(kind, list) else [kind]


class Shared:
    """A value that all forks of an environment hold in common: ``copy.deepcopy`` of it is itself."""

    __slots__: ClassVar[tuple[str, ...]] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

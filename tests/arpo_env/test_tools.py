"""``Tool``, ``ToolResult`` and ``@tool``: schemas, contracts, arguments, binding."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
from env_fakes import TEXT_ARGUMENT, Notebook, Scripted

import arpo_env
from arpo_env.tools.base import FunctionTool, Shared, Tool, ToolResult, check_arguments, check_tool, schema_of, tool


@tool
def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", hours: list[int] | None = None, exact: bool = False) -> str:
    """The weather of a city,
    day by day.

    Longer words for the reader of the code.

    Args:
        city: name of the city
        days (int): how many days

    Returns:
        nothing: that concerns the model
    """
    return f"{city} {days} {unit}"


class TestFunctionTool:
    def test_schema_from_signature_and_docstring(self) -> None:
        assert weather.schema() == {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather of a city, day by day.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string", "description": "name of the city"},
                        "days": {"type": "integer", "description": "how many days", "default": 1},
                        "unit": {"enum": ["C", "F"], "default": "C"},
                        "hours": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": None},
                        "exact": {"type": "boolean", "default": False},
                    },
                    "required": ["city"],
                },
            },
        }
        assert weather.main_argument == "city"

    def test_is_still_the_function(self) -> None:
        assert weather("Oslo", days=2) == "Oslo 2 C"
        assert weather.call(city="Oslo") == "Oslo 1 C"

    def test_is_stateless_and_shared(self) -> None:
        assert weather.bind() is weather.fork() is copy.deepcopy(weather) is weather
        check_tool(weather)

    def test_arguments_of_the_decorator(self) -> None:
        @tool(name="double", description="Doubles.", timeout=None)
        def f(number: float) -> str:
            return str(2 * number)

        assert (f.name, f.description, f.timeout) == ("double", "Doubles.", None)
        assert f.parameters["properties"]["number"] == {"type": "number"}

    def test_no_argument(self) -> None:
        @tool
        def now() -> str:
            """The time."""
            return "noon"

        assert now.parameters == {"type": "object", "properties": {}, "required": []}
        assert now.main_argument is None

    @pytest.mark.parametrize(
        ("function", "problem"),
        [
            (lambda: "", "docstring"),
            (lambda text: "", "annotation"),
            (lambda *texts: "", r"\*args"),
            (lambda **texts: "", r"\*\*kwargs"),
        ],
    )
    def test_what_cannot_be_a_tool(self, function: Any, problem: str) -> None:
        function.__name__ = "f"
        with pytest.raises((TypeError, ValueError), match=problem):
            tool(function)

    def test_an_annotation_without_json_type(self) -> None:
        def f(where: complex) -> str:
            """Finds."""
            return ""

        with pytest.raises(TypeError, match=r"'where'.*complex"):
            schema_of(f)

    def test_a_coroutine_function(self) -> None:
        async def f(text: str) -> str:
            """Fetches."""
            return text

        with pytest.raises(TypeError, match="coroutine"):
            check_tool(tool(f))  # type: ignore[arg-type]


def faulty(**attributes: Any) -> Tool:
    """A notebook with other attributes."""
    thing = Notebook()
    for name, value in attributes.items():
        setattr(thing, name, value)
    return thing


class TestContract:
    """A bug in a tool's own contract stops before the first token."""

    @pytest.mark.parametrize(
        ("attributes", "problem"),
        [
            ({"name": ""}, "name must match"),
            ({"name": "two words"}, "name must match"),
            ({"name": "<x>"}, "name must match"),
            ({"parameters": {"type": "string"}}, "type 'object'"),
            ({"parameters": {**TEXT_ARGUMENT, "required": ["text", "more"]}}, r"\['more'\]"),
            ({"timeout": 0}, "timeout"),
            ({"timeout": -1.0}, "timeout"),
            ({"retries": -1}, "retries"),
            ({"max_concurrency": 0}, "max_concurrency"),
            ({"fork_support": "maybe"}, "fork_support"),
            ({"fork_support": "shared"}, "stateful tool cannot be shared"),
        ],
    )
    def test_faults(self, attributes: dict[str, Any], problem: str) -> None:
        check_tool(faulty())
        with pytest.raises(ValueError, match=problem):
            check_tool(faulty(**attributes))
        with pytest.raises(ValueError, match=problem):
            arpo_env.ToolEnv([{"question": "q", "answer": "a"}], [faulty(**attributes)])

    @pytest.mark.parametrize(
        "parameters",
        [
            {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},  # call takes "text"
            {"type": "object", "properties": {"text": {"type": "string"}}},  # call cannot do without it
            {"type": "object", "properties": {}},
        ],
    )
    def test_a_schema_that_call_does_not_take(self, parameters: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="does not take the schema's arguments"):
            check_tool(faulty(parameters=parameters))

    def test_call_may_take_any_keyword(self) -> None:
        class Any_(Tool):
            name = "any"
            parameters = TEXT_ARGUMENT

            def call(self, **arguments: Any) -> str:
                return str(arguments)

        check_tool(Any_())

    def test_no_call(self) -> None:
        class Silent(Tool):
            name = "silent"

        with pytest.raises(TypeError, match="define call"):
            check_tool(Silent())

    def test_not_a_tool(self) -> None:
        with pytest.raises(TypeError, match="must be a Tool"):
            check_tool(Notebook)  # type: ignore[arg-type]

    def test_a_tool_that_raises_in_its_constructor_is_never_swallowed(self) -> None:
        class Unreachable(Notebook):
            def __init__(self) -> None:
                raise ConnectionError("index server down")

        with pytest.raises(ConnectionError, match="index server down"):
            arpo_env.ToolEnv([{"question": "q", "answer": "a"}], [Unreachable()])


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"city": "Oslo"}, None),
            ({"city": "Oslo", "days": 3, "unit": "F", "hours": [1], "exact": True}, None),
            ({"city": "Oslo", "hours": None}, None),
            ({}, "missing argument 'city'"),
            ({"city": "Oslo", "town": "x"}, "unknown argument 'town'; weather takes: city, days, unit, hours, exact"),
            ({"city": 5}, "argument 'city' must be string, got int 5"),
            ({"city": "Oslo", "days": "3"}, "argument 'days' must be integer, got str '3'"),
            ({"city": "Oslo", "days": True}, "argument 'days' must be integer, got bool True"),
            ({"city": "Oslo", "days": 1.5}, "argument 'days' must be integer, got float 1.5"),
            ({"city": "Oslo", "unit": "K"}, "argument 'unit' must be one of ['C', 'F'], got 'K'"),
            ({"city": "Oslo", "hours": "all"}, "argument 'hours' must be array or null, got str 'all'"),
        ],
    )
    def test_what_is_wrong_in_words_for_the_model(self, arguments: dict[str, Any], problem: str | None) -> None:
        assert check_arguments(weather, arguments) == problem

    def test_additional_properties(self) -> None:
        thing = faulty(parameters={**TEXT_ARGUMENT, "additionalProperties": True})
        assert check_arguments(thing, {"text": "a", "more": 1}) is None

    def test_a_number_is_an_integer_or_a_float(self) -> None:
        thing = faulty(parameters={"type": "object", "properties": {"text": {"type": "number"}}})
        assert check_arguments(thing, {"text": 1}) is check_arguments(thing, {"text": 1.5}) is None
        assert "number" in str(check_arguments(thing, {"text": True}))

    def test_a_long_value_is_not_repeated_whole(self) -> None:
        assert len(str(check_arguments(weather, {"city": "x", "days": "9" * 10_000}))) < 200


class TestState:
    def test_bind_and_fork_copy_a_stateful_tool(self) -> None:
        prototype = Notebook()
        one = prototype.bind()
        one.call(text="a")
        twin = one.fork()
        assert twin.call(text="b") == "a | b"
        assert one.call(text="c") == "a | c"
        assert prototype.bind().call(text="d") == "d"

    def test_a_stateless_tool_is_itself(self) -> None:
        thing = Scripted("x")
        assert thing.bind() is thing.fork() is thing

    def test_shared_values_are_never_copied(self) -> None:
        class Index(Shared):
            pass

        index = Index()
        assert copy.deepcopy({"index": index})["index"] is index

    def test_a_failure_is_a_result(self) -> None:
        result = ToolResult.failure("died", "the interpreter ended", state="lost")
        assert (result.ok, result.error, result.text, result.state) == (False, "died", "the interpreter ended", "lost")
        assert isinstance(weather, FunctionTool)

"""Call formats: what each text of a turn means. Expected values are written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arpo_env.formats import CallFormat, Hermes, ParsedTurn, Tags, ToolCall, boxed
from arpo_env.tools.base import Tool, ToolResult, check_arguments, tool


@tool
def search(query: str, top_k: int = 3) -> str:
    """Search the web."""
    return query


@tool
def python(code: str) -> str:
    """Run Python code."""
    return code


@tool
def square(x: int) -> str:
    """Square a whole number."""
    return str(x * x)


@tool
def half(x: float | None) -> str:
    """Halve a number."""
    return str(x)


@tool
def lookup(key: str | int) -> str:
    """Look a key up."""
    return str(key)


@tool
def switch(on: bool) -> str:
    """Turn the light on or off."""
    return str(on)


@tool
def now() -> str:
    """The time."""
    return "noon"


@tool
def recent(topic: str = "all") -> str:
    """Recent news."""
    return topic


class Nested(Tool):
    name = "f"
    description = "Takes a record."
    parameters = {"type": "object", "properties": {"record": {"type": "object"}}, "required": ["record"]}  # noqa: RUF012


ALL: tuple[Tool, ...] = (search, python, square, half, lookup, switch, now, recent, Nested())
TOOLS: dict[str, Tool] = {t.name: t for t in ALL}


def tags(text: str, form: Tags | None = None) -> ParsedTurn:
    return (form or Tags()).parse(text, TOOLS)


def hermes(text: str) -> ParsedTurn:
    return Hermes().parse(text, TOOLS)


def call(name: str, **arguments: Any) -> tuple[ToolCall, ...]:
    return (ToolCall(name, arguments),)


def block(value: Any) -> str:
    return f"<tool_call>\n{json.dumps(value)}\n</tool_call>"


# --- boxed ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed {x}", "x"),
        (r"{\boxed{3}}}", "3"),
        (r"\boxed{unclosed", None),
        (r"\boxed{3} \boxed{unclosed", "3"),
        (r"\boxed{}", ""),
        ("no box {5}", None),
    ],
)
def test_boxed_matches_nested_braces_and_takes_the_last_complete_box(text: str, content: str | None) -> None:
    assert boxed(text) == content


# --- Tags: calls ----------------------------------------------------------------------------------------------------------------------------------


def test_tags_call_takes_the_text_between_the_tags() -> None:
    assert tags("<think>I need\nfacts</think>\n<search> who wrote Emma </search>") == ParsedTurn(calls=call("search", query="who wrote Emma"))
    assert tags("<python>\nx = 1\nif x < 2:\n    print(x)\n</python>").calls == call("python", code="x = 1\nif x < 2:\n    print(x)")


def test_tags_of_the_prompts_example_are_nothing_special() -> None:
    assert tags("<search> search query here </search>").calls == call("search", query="search query here")


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("<square>12</square>", "square", 12),
        ("<half> 2.5 </half>", "half", 2.5),
        ("<half>3</half>", "half", 3),
        ("<switch>True</switch>", "switch", True),
        ("<square>twelve</square>", "square", "twelve"),
        ("<square>2.5</square>", "square", "2.5"),
        ("<square>true</square>", "square", "true"),
        ("<half>NaN</half>", "half", "NaN"),
        ("<search>12</search>", "search", "12"),
        ("<lookup>12</lookup>", "lookup", "12"),
        (f"<square>{'9' * 5000}</square>", "square", "9" * 5000),
        (f"<square>{'[' * 100_000}</square>", "square", "[" * 100_000),
    ],
)
def test_tags_convert_the_main_argument_where_it_parses(text: str, name: str, value: Any) -> None:
    turn = tags(text)
    assert turn.calls == call(name, **{TOOLS[name].main_argument or "": value})
    assert type(next(iter(turn.calls[0].arguments.values()))) is type(value)
    rejected = check_arguments(TOOLS[name], turn.calls[0].arguments) is not None
    assert rejected == (name not in ("search", "lookup") and isinstance(value, str))


def test_tags_empty_call_is_an_error_only_where_the_argument_is_required() -> None:
    turn = tags("<search>  \n </search>")
    assert turn.calls == () and not turn.well_formed
    assert turn.errors == ("the call is empty: expected the query between <search> and </search>",)
    assert tags("<recent></recent>") == ParsedTurn(calls=call("recent"))
    assert tags("<now></now>") == ParsedTurn(calls=call("now"))
    assert "takes no argument" in tags("<now>please</now>").errors[0]


def test_tags_first_closing_tag_is_the_end_of_the_turn() -> None:
    first_call = tags("<search>a</search><answer>b</answer>")
    assert (first_call.calls, first_call.answer, first_call.well_formed) == (call("search", query="a"), None, False)
    first_answer = tags("<answer>b</answer><search>a</search>")
    assert (first_answer.calls, first_answer.answer, first_answer.well_formed) == ((), "b", False)
    assert tags("<search>a</search><search>b</search>").calls == call("search", query="a")
    assert tags("<search>a</search>.\n").well_formed  # a stop string that ended inside a token


def test_tags_thoughts_are_not_searched() -> None:
    assert tags("<think>maybe <search>x</search>?</think><python>1</python>") == ParsedTurn(calls=call("python", code="1"))
    assert tags("<think><answer>no</answer></think>").answer is None
    unclosed = tags("<think>let me <search>x</search>")
    assert unclosed.calls == () and "<think> was not closed" in unclosed.errors[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<search>who", "<search> was not closed: expected </search>"),
        ("<answer>5", "<answer> was not closed: expected </answer>"),
        ("who</search>", "</search> must close one <search>, but the open tags before it are none"),
        ("<search>a</python>", "</python> must close one <python>, but the open tags before it are <search>"),
        ('<python>print("<answer>5</answer>', "</answer> must close one <answer>, but the open tags before it are <python>, <answer>"),
        ("<search>a <search>b</search>", "must close one <search>"),
        ("<search>a <think>b</think> c</search>", "must hold no tag of the format"),
        ("<search>x <result> y </search>", "must hold no tag of the format"),
        ("<answer> </answer>", "the answer is empty"),
        ("I am thinking.", "neither a call nor an answer was found"),
        ("", "neither a call nor an answer was found"),
        ("</think>", "neither a call nor an answer"),
    ],
)
def test_tags_errors_say_what_was_wrong(text: str, said: str) -> None:
    turn = tags(text)
    assert (turn.calls, turn.answer, turn.well_formed) == ((), None, False)
    assert len(turn.errors) == 1 and said in turn.errors[0]


# --- Tags: tools that are not there, and tools of several arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<browse>x</browse>", "<think>a <b>c</b></think> <browse> x </browse> and then <p>", "1 < 2 <int> <browse></browse>"])
def test_tags_a_call_of_a_tool_that_is_not_there_has_its_name(text: str) -> None:
    turn = tags(text)
    assert [(c.name, c.arguments) for c in turn.calls] == [("browse", {})]
    assert turn.calls[0].hint.startswith("there is no tool 'browse'; expected <search>...</search>, <python>...</python>, <square>")
    assert turn.errors == () and not turn.well_formed


@pytest.mark.parametrize(
    "text",
    [
        "<think><browse>x</browse></think>",  # a thought
        "<think><browse>x</browse>",
        "<browse>x",  # not closed
        "x</browse>",
        "vector<int> a, <p> b",
        "<result>x</result>",  # the format's own mark
        "<search>x <browse>y</browse>",  # inside a call that was not closed
    ],
)
def test_tags_what_is_no_closed_tag_of_its_own_is_no_call(text: str) -> None:
    turn = tags(text)
    assert turn.calls == () and len(turn.errors) == 1


def test_tags_other_tags_beside_a_call_or_an_answer_are_text() -> None:
    assert tags("<p>so</p> <answer>a <b>big</b> town</answer>") == ParsedTurn(answer="a <b>big</b> town")
    assert tags("<browse>x</browse> <search>a</search>") == ParsedTurn(calls=call("search", query="a"))


@tool
def cell(table: str, row: int, note: str = "") -> str:
    """Read a cell."""
    return f"{table}{row}{note}"


def cells(content: str) -> ParsedTurn:
    return Tags().parse(f"<cell>{content}</cell>", {"cell": cell})


def test_tags_a_tool_that_requires_several_arguments_takes_a_json_object() -> None:
    assert cells(' {"table": "towns", "row": 3}\n') == ParsedTurn(calls=call("cell", table="towns", row=3))
    assert cells('{"table": "<b>", "row": 3, "note": "{"}').calls == call("cell", table="<b>", row=3, note="{")
    missing = cells('{"table": "towns"}').calls[0]
    assert check_arguments(cell, missing.arguments) == "missing argument 'row'"
    assert tags('<search>{"query": "a"}</search>').calls == call("search", query='{"query": "a"}')  # one required argument: its text


@pytest.mark.parametrize(
    ("content", "got"),
    [
        ("towns", "got 'towns'"),
        ("", "got ''"),
        ('["towns", 3]', "got '[\"towns\", 3]'"),
        ('{"table": "towns", "row": }', "Expecting value"),
        ('{"table": "towns"} 3', "expected nothing after the JSON value, got '3'"),
    ],
)
def test_tags_other_text_for_such_a_tool_is_an_error_that_names_the_arguments(content: str, got: str) -> None:
    turn = cells(content)
    assert (turn.calls, turn.answer, turn.well_formed) == ((), None, False)
    (error,) = turn.errors
    assert error.startswith("expected a JSON object with the keys table, row between <cell> and </cell>, got ") and got in error


def test_tags_the_prompt_shows_the_object_of_such_a_tool() -> None:
    prompt = Tags().system_prompt([search, cell])
    assert '- <cell> {"table": ..., "row": ..., "note": ...} </cell>: Read a cell.\nWhere braces are shown, write one JSON object' in prompt
    assert "- <search> query </search>: Search the web." in prompt
    assert "JSON" not in Tags().system_prompt([search, now])


# --- Tags: answers and the format check -----------------------------------------------------------------------------------------------------------


def test_tags_answer_is_boxed_content_else_the_text() -> None:
    assert tags(r"<answer>It is \boxed{\frac{1}{2}}.</answer>") == ParsedTurn(answer=r"\frac{1}{2}")
    assert tags("<answer>\n Jane Austen </answer>") == ParsedTurn(answer="Jane Austen")
    assert tags("<think>\nline\nline\n</think>\n<answer>9</answer>") == ParsedTurn(answer="9")
    assert tags(r"<answer>\boxed{}</answer>").errors[0].startswith("the answer is empty")


def test_tags_one_answer_is_enough_whatever_the_prompt_holds() -> None:
    assert tags("<answer>Paris</answer>") == ParsedTurn(answer="Paris")


@pytest.mark.parametrize(
    "text",
    [
        "<result>fake</result><search>a</search>",
        "<think>I imagine <result>fake</result></think><search>a</search>",
        "</result><search>a</search>",
        "</think><search>a</search>",
        "<search>a</search><think>",
        "<search>a</search></search>",
    ],
)
def test_tags_violations_keep_the_call_but_not_the_format(text: str) -> None:
    turn = tags(text)
    assert turn.calls == call("search", query="a") and turn.errors == () and not turn.well_formed


def test_tags_strictness_of_the_papers_reward_is_a_choice() -> None:
    strict = Tags(needs_thought=True, needs_boxed=True)
    assert tags(r"<think>t</think><answer>\boxed{9}</answer>", strict).well_formed
    assert not tags(r"<answer>\boxed{9}</answer>", strict).well_formed
    assert not tags("<think>t</think><answer>9</answer>", strict).well_formed
    assert tags("<think>t</think><answer>9</answer>", strict).answer == "9"
    assert tags("<think>t</think><search>a</search>", strict).well_formed
    assert not tags("<search>a</search>", strict).well_formed


def test_tags_affixes_are_the_marks_that_the_policy_must_not_write() -> None:
    small = Tags(result_prefix=" [obs] ", result_suffix=" ")
    assert small.render_results([("search", ToolResult("a")), ("python", ToolResult(""))]) == " [obs] a  [obs]  "
    assert not small.parse("[obs] <search>a</search>", TOOLS).well_formed
    assert small.parse("<think><result></think><search>a</search>", TOOLS).well_formed


def test_tags_render() -> None:
    assert Tags().role == "inline"
    assert Tags().stop_strings([search, python]) == ("</search>", "</python>", "</answer>")
    assert Tags().render_results([("search", ToolResult("Page 1: </result> <answer>x</answer>"))]) == (
        "\n<result>\nPage 1: </result> <answer>x</answer>\n</result>\n"
    )
    assert Tags().render_error("no such thing") == "\n<result>\nError: no such thing\n</result>\n"


@pytest.mark.parametrize("name", ["think", "answer", "result"])
def test_tags_refuse_tools_named_like_their_own_tags(name: str) -> None:
    other = tool(name=name)(plain_tool)
    with pytest.raises(ValueError, match=name):
        Tags().stop_strings([other])
    with pytest.raises(ValueError, match=name):
        Tags().system_prompt([other])


def plain_tool(query: str) -> str:
    """A tool."""
    return query


# --- Hermes ---------------------------------------------------------------------------------------------------------------------------------------


def test_hermes_calls_in_order() -> None:
    blocks = block({"name": "search", "arguments": {"query": "a", "top_k": 2}}), block({"name": "python", "arguments": {"code": "1"}})
    expected = (*call("search", query="a", top_k=2), *call("python", code="1"))
    assert hermes("<think>t</think>\n" + "\n".join(blocks)) == ParsedTurn(calls=expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"name": "f", "parameters": {"record": {"a": "1", "b": {"c": 2}}}}, call("f", record={"a": "1", "b": {"c": 2}})),
        ({"name": "search", "arguments": '{"query": "a", "top_k": 18}'}, call("search", query="a", top_k=18)),
        ({"name": "now"}, call("now")),
        ({"name": "now", "arguments": None}, call("now")),
        ({"name": "python", "arguments": {"code": "print('</tool_call><think>')"}}, call("python", code="print('</tool_call><think>')")),
    ],
)
def test_hermes_shapes_of_one_call(value: Any, expected: tuple[ToolCall, ...]) -> None:
    assert hermes(block(value)) == ParsedTurn(calls=expected)


def test_hermes_multi_line_json() -> None:
    text = '<tool_call>\n{\n  "name": "search",\n  "arguments": {\n    "query": "a"\n  }\n}\n</tool_call>'
    assert hermes(text) == ParsedTurn(calls=call("search", query="a"))


def test_hermes_bad_call_does_not_stop_the_good_ones() -> None:
    good = [block({"name": "search", "arguments": {"query": q}}) for q in ("a", "b")]
    turn = hermes(good[0] + '<tool_call>{"name": "search", "arguments": {"query": </tool_call>' + good[1])
    assert [c.arguments["query"] for c in turn.calls] == ["a", "b"]
    assert len(turn.errors) == 1 and not turn.well_formed
    assert "bad tool call" in turn.errors[0] and "search, python" in turn.errors[0]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[1, 2]", "expected a JSON object"),
        ('"search"', "expected a JSON object"),
        ("", "Expecting value"),
        ('{"name": "browse\\nsearch", "arguments": {}}', "unknown tool 'browse\\nsearch'"),
        ('{"name": "", "arguments": {}}', "unknown tool ''"),
        ('{"name": "' + 65 * "b" + '"}', "unknown tool 'bbb"),
        ('{"name": "browse", "arguments": [1]}', 'expected "arguments" to be a JSON object, got list'),
        ('{"arguments": {}}', 'expected "name"'),
        ('{"name": ["search"]}', 'expected "name"'),
        ('{"name": "search", "arguments": [1]}', 'expected "arguments" to be a JSON object, got list'),
        ('{"name": "search", "arguments": "who"}', "Expecting value"),
        ('{"name": "search", "arguments": "[1]"}', "got list"),
        ('{"name": "search", "arguments": {"query": NaN}}', "NaN is not JSON"),
        ('{"name": "search", "arguments": {"query": "\\ud800"}}', "surrogates"),
        ("[" * 100_000, "nests too deeply"),
        ('{"name": "now"} and more', "expected </tool_call> after the JSON object, got 'and more"),
    ],
)
def test_hermes_errors_say_what_was_wrong_and_name_the_tools(body: str, said: str) -> None:
    turn = hermes(f"<tool_call>{body}</tool_call>")
    assert (turn.calls, turn.answer, turn.well_formed) == ((), None, False)
    assert len(turn.errors) == 1 and said in turn.errors[0]
    assert turn.errors[0].endswith("available tools: search, python, square, half, lookup, switch, now, recent, f")
    assert len(turn.errors[0]) < 400


def test_hermes_a_call_of_a_tool_that_is_not_there_has_its_name() -> None:
    good = block({"name": "now"})
    turn = hermes(good + block({"name": "web.browse", "arguments": {"url": "x"}}))
    assert turn == ParsedTurn(calls=(*call("now"), *call("web.browse", url="x")), well_formed=False)


def test_hermes_unclosed_and_stray_tags() -> None:
    assert "<tool_call> was not closed" in hermes('<tool_call>{"name": "now"}').errors[0]
    assert "<answer> was not closed" in hermes("<answer>Paris").errors[0]
    assert "</tool_call> closes nothing" in hermes("text</tool_call>").errors[0]
    open_thought = hermes("<think>maybe " + block({"name": "now"}))
    assert open_thought.calls == () and open_thought.answer is None and "<think> was not closed" in open_thought.errors[0]


def test_hermes_thoughts_are_not_searched_also_where_the_template_opened_them() -> None:
    inner = block({"name": "now"})
    assert hermes(f"<think>{inner}</think>9") == ParsedTurn(answer="9")
    assert hermes(f"I could {inner}</think>\n9") == ParsedTurn(answer="9")
    assert hermes(f"thought</think>\n{inner}") == ParsedTurn(calls=call("now"))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think>t</think> It is <answer> Paris </answer>.", "Paris"),
        (r"<answer>so \boxed{\frac{1}{2}}</answer>", r"\frac{1}{2}"),
        (r"<think>\boxed{1}</think> We get \boxed{2}.", "2"),
        ("<think>t</think>\n\nJane Austen\n", "Jane Austen"),
        ("Jane Austen", "Jane Austen"),
    ],
)
def test_hermes_answer(text: str, answer: str) -> None:
    assert hermes(text) == ParsedTurn(answer=answer)


def test_hermes_calls_win_over_an_answer() -> None:
    turn = hermes("<answer>Paris</answer>" + block({"name": "now"}))
    assert turn.calls == call("now") and turn.answer is None and not turn.well_formed
    assert "an answer beside a tool call is ignored" in turn.errors[0]
    bad = hermes("<answer>Paris</answer><tool_call>{</tool_call>")
    assert bad.calls == () and bad.answer is None and len(bad.errors) == 2


def test_hermes_violations() -> None:
    assert not hermes("<tool_response>fake</tool_response>" + block({"name": "now"})).well_formed
    twice = hermes("<answer>a</answer><answer>b</answer>")
    assert twice.answer == "b" and not twice.well_formed
    assert "neither a call nor an answer" in hermes("<think>t</think>  ").errors[0]
    assert "neither a call nor an answer" in hermes("<answer></answer>").errors[0]


def test_hermes_render() -> None:
    assert Hermes().role == "tool"
    assert Hermes().stop_strings([search]) == ()
    assert Hermes().render_results([("search", ToolResult("a"))]) == "a"
    assert Hermes().render_results([("search", ToolResult("a")), ("python", ToolResult("b"))]) == "[1] search\na\n\n[2] python\nb"
    assert Hermes().render_error("no") == "Error: no"
    prompt = Hermes().system_prompt([search, Nested()])
    listed = prompt.rpartition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed if line.startswith("{")] == [search.schema(), Nested().schema()]


# --- both -----------------------------------------------------------------------------------------------------------------------------------------

FORMATS: list[CallFormat] = [Tags(), Hermes(), Tags(result_prefix="", result_suffix="")]


def test_an_example_of_the_prompt_is_parsed_as_what_it_shows() -> None:
    assert "<search> query </search>: Search the web." in Tags().system_prompt([search])
    assert "\\boxed" in Tags().system_prompt([]) and "tools" not in Tags().system_prompt([])
    assert "\\boxed" in Hermes().system_prompt([]) and "tool_call" not in Hermes().system_prompt([])


FRAGMENTS = [
    *("<think>", "</think>", "<search>", "</search>", "<python>", "</python>", "<square>", "</square>", "<now>", "</now>", "<answer>", "</answer>"),
    *("<result>", "</result>", "<tool_call>", "</tool_call>", "<tool_response>", "<", "</", ">", "\\boxed{", "}", "{", "\\{", "\\", "\n", " ", "12", "text"),
    *('{"name": "search", "arguments": {"query": "q"}}', '{"name":', '"arguments": "', '"', "[", "]", "\\ud800", "NaN", ",", "null", "é", "\x00", "\ud800"),
]
any_text = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_parsing_is_total_and_deterministic(text: str) -> None:
    for form in FORMATS:
        turn = form.parse(text, TOOLS)
        assert turn == form.parse(text, TOOLS)
        assert turn.calls or turn.answer is not None or turn.errors
        assert not (turn.calls and turn.answer is not None)
        assert not (turn.errors and turn.well_formed)
        assert turn.answer is None or turn.answer.strip()
        assert all(c.name in TOOLS or not turn.well_formed for c in turn.calls)
        assert all(isinstance(check_arguments(TOOLS[c.name], c.arguments), str | None) for c in turn.calls if c.name in TOOLS)
        form.parse(text, {})


@settings(max_examples=100, deadline=None)
@given(st.text().filter(lambda text: not set(text) & set("<>")))
def test_text_without_tags_is_no_call_and_in_tags_no_answer(text: str) -> None:
    turn = Tags().parse(text, TOOLS)
    assert turn.calls == () and turn.answer is None and turn.errors
    assert Hermes().parse(text, TOOLS).calls == ()


@settings(max_examples=200, deadline=None)
@given(any_text, any_text)
def test_tags_what_follows_the_stop_string_changes_nothing_but_the_format(before: str, after: str) -> None:
    text = f"<think>{before.replace('</think>', '').replace('<think>', '')}</think><search>q</search>"
    turn = Tags().parse(text + after, TOOLS)
    assert turn.calls == call("search", query="q") and turn.answer is None and turn.errors == ()


@pytest.mark.parametrize("piece", ["<think>", "<search>", "</search>", "<tool_call>", "<tool_call>{", "\\boxed{", "<answer>", "\\", "<", "</think>"])
def test_long_repetitions_are_parsed(piece: str) -> None:
    for form in FORMATS:
        form.parse(piece * 20_000, TOOLS)

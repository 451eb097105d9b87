"""Tools: which bodies are taken, and calls found in text however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstdiff.engine.openai_fields import ApiError, Fields
from firstdiff.engine.openai_limits import Limits
from firstdiff.engine.openai_messages import parse_messages, uses_tools
from firstdiff.engine.structure import check_structure
from firstdiff.engine.tools import CallDelta, ToolParser, Tools, parse_tools

LIMITS = Limits(models=("m",), vocab_size=100, max_model_len=64, max_tools=3)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "time"}}


def tools(**fields: Any) -> Tools:
    parsed = parse_tools(Fields({"tools": [WEATHER, TIME], **fields}), LIMITS)
    assert parsed is not None
    return parsed


def ids() -> Callable[[], str]:
    counter = itertools.count()
    return lambda: f"call_{next(counter)}"


def said(parser: ToolParser | None, pieces: Sequence[str]) -> tuple[str, list[tuple[str, Any]]]:
    """(content, calls as name and decoded arguments) of all that the parser gave out."""
    assert parser is not None
    parts = [*map(parser.push, pieces), parser.finish()]
    deltas = [delta for part in parts for delta in part.calls]
    joined: list[CallDelta] = []
    for delta in deltas:
        if delta.index == len(joined):
            assert delta.call_id is not None
            joined.append(delta)
        else:
            assert delta.index == len(joined) - 1
            assert (delta.call_id, delta.name) == (None, None)
            last = joined[-1]
            joined[-1] = CallDelta(last.index, last.call_id, last.name, last.arguments + delta.arguments)
    assert len({delta.call_id for delta in joined}) == len(joined)
    calls = [(str(delta.name), json.loads(delta.arguments)) for delta in joined]
    return "".join(part.content for part in parts), calls


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CASES = {
    "text": ("no call at all <tool", "no call at all <tool", []),
    "one": (call("weather", city="Köln"), "", [("weather", {"city": "Köln"})]),
    "after text": ("Let me see.\n\n" + call("time"), "Let me see.", [("time", {})]),
    "two": (
        call("weather", city="a") + "\n" + call("time") + "\n",
        "",
        [("weather", {"city": "a"}), ("time", {})],
    ),
    "text after": (call("time") + "\n done", "\n done", [("time", {})]),
    "open at the end": (call("time").removesuffix("\n</tool_call>"), "", [("time", {})]),
    "no json": (" <tool_call>{oops</tool_call> x", " <tool_call>{oops</tool_call> x", []),
    "unknown": (call("nuke"), call("nuke"), []),
    "arguments no object": ('<tool_call>{"name": "time", "arguments": 3}</tool_call>',) * 2 + ([],),
    "cut off": ('a <tool_call>{"name": "ti', 'a <tool_call>{"name": "ti', []),
    "a bad one, then a good one": (
        "<tool_call>x</tool_call>" + call("time"),
        "<tool_call>x</tool_call>",
        [("time", {})],
    ),
    "close without open": ("a</tool_call>b", "a</tool_call>b", []),
    "tag in arguments": (call("weather", city="<tool_call>"), "", [("weather", {"city": "<tool_call>"})]),
}


def cuts(text: str, points: Sequence[int]) -> list[str]:
    edges = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(name=st.sampled_from(sorted(CASES)), points=st.lists(st.integers(0, 500), max_size=12))
def test_calls_are_found_however_the_text_is_cut(name: str, points: list[int]) -> None:
    text, content, calls = CASES[name]
    assert said(tools().parser(ids()), cuts(text, points)) == (content, calls)


PARTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", call("time"), "{", "a", " ", "\n", "<", "tool", '{"name": "time"}']
)


@given(parts=st.lists(PARTS, max_size=10), points=st.lists(st.integers(0, 500), max_size=12))
def test_any_text_gives_the_same_whole_and_in_pieces(parts: list[str], points: list[int]) -> None:
    text = "".join(parts)
    whole = said(tools().parser(ids()), [text])
    assert said(tools().parser(ids()), cuts(text, points)) == whole
    if not whole[1]:
        assert whole[0] == text


def test_one_call_at_a_time_when_parallel_ones_are_unwanted() -> None:
    text = call("time") + call("weather", city="a")
    assert said(tools(parallel_tool_calls=False).parser(ids()), [text]) == ("", [("time", {})])


@given(points=st.lists(st.integers(0, 500), max_size=12))
def test_required_calls_are_an_array(points: list[int]) -> None:
    parser = tools(tool_choice="required").parser
    text = '[{"name": "time", "arguments": {}}, {"name": "weather", "arguments": {"city": "}{"}}]'
    expected = [("time", {}), ("weather", {"city": "}{"})]
    assert said(parser(ids()), cuts(text, points)) == ("", expected)
    # Cut off by the length: what is whole counts, and only where nothing is, the text is shown.
    assert said(parser(ids()), cuts(text[:50], points)) == ("", expected[:1])
    assert said(parser(ids()), cuts(text[:20], points)) == (text[:20], [])


@given(points=st.lists(st.integers(0, 500), max_size=12))
def test_a_named_tool_gets_its_arguments_as_they_come(points: list[int]) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    parser = tools(tool_choice=choice).parser(ids())
    assert said(parser, cuts('{"city": "Köln"}', points)) == ("", [("weather", {"city": "Köln"})])


def test_structures_behind_choices() -> None:
    assert tools().structure(LIMITS) is None
    assert tools(tool_choice="none").structure(LIMITS) is None
    assert tools(tool_choice="none").shown is None
    assert tools(tool_choice="none").parser(ids()) is None
    named = tools(tool_choice={"type": "function", "function": {"name": "weather"}}).structure(LIMITS)
    assert named is not None
    assert (named.kind, json.loads(named.spec)) == ("json_schema", SCHEMA)
    required = tools(tool_choice="required", parallel_tool_calls=False).structure(LIMITS)
    assert required is not None
    schema = json.loads(required.spec)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    assert [item["properties"]["name"]["enum"] for item in schema["items"]["anyOf"]] == [
        ["weather"],
        ["time"],
    ]


NODE = {
    "$id": "urn:node",
    "type": "object",
    "properties": {
        "next": {"$ref": "#"},
        "default": {"$ref": "#/$defs/A"},
        "$id": {"const": {"$ref": "#"}},
    },
    "$defs": {"A": {"type": "string", "default": {"$ref": "#"}}},
}


def node(root: str) -> dict[str, Any]:
    """NODE with its references counted from `root`."""
    moved = NODE | {
        "properties": {
            "next": {"$ref": root},
            "default": {"$ref": f"{root}/$defs/A"},
            "$id": {"const": {"$ref": "#"}},
        }
    }
    return {key: value for key, value in moved.items() if key != "$id"}


def tool(name: str, parameters: object = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def test_references_in_a_tool_s_schema_keep_their_meaning() -> None:
    """Two tools may mean different things by one name, and each by `#` itself."""
    other = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}
    structure = tools(tools=[tool("a", NODE), tool("b", other)], tool_choice="required").structure(LIMITS)
    assert structure is not None
    schema = json.loads(structure.spec)
    assert schema["$defs"]["tool0"] == node("#/$defs/tool0")
    assert schema["$defs"]["tool1"] == other | {"$ref": "#/$defs/tool1/$defs/A"}
    arguments = [call["properties"]["arguments"] for call in schema["items"]["anyOf"]]
    assert arguments == [{"$ref": "#/$defs/tool0"}, {"$ref": "#/$defs/tool1"}]
    check_structure(structure)
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="at most 128 levels"):
        tools(tools=[tool("a", deep)], tool_choice="required").structure(LIMITS)


def test_strict_tools_are_held_to_their_schema_where_the_model_may_choose() -> None:
    def spec(**fields: Any) -> Any:
        structure = tools(tools=[tool("a", NODE, strict=True), TIME], **fields).structure(LIMITS)
        assert structure is not None
        assert structure.kind == "tool_calls"
        check_structure(structure)
        return json.loads(structure.spec)

    free = spec()
    assert (free["open"], free["close"], free["most"]) == ("<tool_call>", "</tool_call>", None)
    assert spec(parallel_tool_calls=False)["most"] == 1
    a, time = (call["properties"] for call in free["call"]["anyOf"])
    assert (a["name"]["enum"], a["arguments"]) == (["a"], {"$ref": "#/$defs/tool0"})
    # What is not strict is a call of a known tool, with whatever arguments.
    assert (time["name"]["enum"], time["arguments"]) == (["time"], {"type": "object"})
    assert free["call"]["$defs"] == {"tool0": node("#/$defs/tool0")}
    odd = {"type": "object", "uniqueItems": True}
    loose = tools(tools=[tool("a", {"type": "object"}, strict=True), tool("b", odd)]).structure(LIMITS)
    assert loose is not None
    check_structure(loose)
    strict = tools(tools=[tool("b", odd, strict=True)]).structure(LIMITS)
    assert strict is not None
    with pytest.raises(ValueError, match="uniqueItems"):
        check_structure(strict)
    assert tools(tools=[tool("a", strict=True)], tool_choice="none").structure(LIMITS) is None
    assert tools(tools=[tool("a", strict=False)]).structure(LIMITS) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": {}},
        {"tools": [1]},
        {"tools": [{"type": "function"}]},
        {"tools": [{"type": "other", "function": {"name": "a"}}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        {"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]},
        {"tools": [TIME, TIME]},
        {"tools": [TIME] * 4},
        {"tools": [{"type": "function", "function": {"name": "a", "strict": 1}}]},
        {"tool_choice": "always"},
        {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tool_choice": {"type": "function"}},
        {"tools": [], "tool_choice": "required"},
        {"parallel_tool_calls": 1},
    ],
)
def test_other_tools_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"^expected "):
        tools(**fields)


def messages(*items: Any) -> list[dict[str, object]]:
    return parse_messages(Fields({"messages": list(items)}), LIMITS)


CALL = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}


def test_messages_with_calls_and_their_answers() -> None:
    parsed = messages(
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "now"},
    )
    assert uses_tools(parsed)
    assert not uses_tools(parsed[:1])
    function = {"name": "time", "arguments": {"a": 1}}
    assert parsed[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }
    assert parsed[2] == {"role": "tool", "tool_call_id": "c1", "content": "now"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "a"},
        {"role": "user", "content": "a", "tool_calls": [CALL]},
        {"role": "user", "content": "a", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": []},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "time", "arguments": "["}}]},
        {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "time", "arguments": "3"}}]},
        {"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]},
    ],
)
def test_other_calls_in_messages_are_refused(message: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"^expected "):
        messages(message)

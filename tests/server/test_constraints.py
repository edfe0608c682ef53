"""Grammars of answers: what they allow and refuse, and that what they allow is what is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.grammar_walk import Walker
from support.m3_text import NS, answer, block, call, element, invoke

from winnow.config import Constraint
from winnow.errors import RequestError
from winnow.server.chat_request import ChatRequest
from winnow.server.completion_request import CompletionRequest
from winnow.server.constraints import chat_constraint, completion_constraint
from winnow.server.protocol import FieldError, parse

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["C", "F", None]},
        "places": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
    "required": ["city"],
}
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "where": {"$ref": "#/$defs/place"},
        "more": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "exact": {"type": ["boolean", "number"]},
    },
    "required": ["when", "where", "more", "exact"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "name": {"type": "string", "maxLength": 300}},
            "required": ["x"],
        }
    },
}
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
}


@pytest.fixture(scope="module")
def walker() -> Walker:
    names = (
        "city",
        "days",
        "units",
        "places",
        "when",
        "where",
        "more",
        "exact",
        "x",
        "name",
        "item",
    )
    tags = [f"{NS}<{mark}{name}>" for name in names for mark in ("", "/")]
    begins = [f'{NS}<invoke name="{name}">' for name in ("weather", "deep", "nothing")]
    ends = [f"{NS}<tool_call>\n", f"{NS}</tool_call>", f"{NS}</invoke>\n", "</mm:think>", NS]
    return Walker([*tags, *begins, *ends])


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("weather", WEATHER),
    tool("deep", DEEP),
    tool("nothing", {"type": "object", "properties": {}}),
]


def request(mode: str = "disabled", **fields: Any) -> ChatRequest:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"thinking_mode": mode},
        **fields,
    }
    return parse(ChatRequest, json.dumps(body).encode())


def constraint(mode: str = "disabled", **fields: Any) -> Constraint:
    found = chat_constraint(request(mode, **fields))
    assert found is not None
    return found


def json_format(schema: Any = ANSWER) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def weather(**arguments: Any) -> str:
    return invoke("weather", {"city": "Oslo", **arguments})


def test_an_answer_without_tools_or_format_is_free() -> None:
    assert chat_constraint(request()) is None
    assert chat_constraint(request(response_format={"type": "text"})) is None
    assert chat_constraint(request(tools=TOOLS, tool_choice="none")) is None
    assert completion_constraint(parse(CompletionRequest, b'{"prompt": "a"}')) is None


@pytest.mark.parametrize(
    ("fields", "allowed", "refused"),
    [
        (
            {},
            [
                "",
                "just text",
                f"text {block(weather())} and more",
                block(weather(), weather(days=2)),
            ],
            [
                block(invoke("unknown", {})),
                f"{NS}<tool_call>",
                "text <mm:think>",
                f"text {NS}</tool_call>",
                block(invoke("weather", "stray")),
                block(),
            ],
        ),
        (
            {"parallel_tool_calls": False},
            ["text", block(weather())],
            [block(weather(), weather()), block(weather()) + " and more", block(weather()) * 2],
        ),
        (
            {"tool_choice": "required"},
            [block(weather()), block(weather(), invoke("nothing", {}))],
            ["", "text", "text " + block(weather())],
        ),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            [block(weather(days=9, units=None, places=["a", "b"]))],
            ["text", block(invoke("nothing", {})), block(weather(), weather())],
        ),
        (
            {"response_format": json_format()},
            ['{"ok": true}', '{"ok": false}', block(weather())],
            [
                "text",
                '{"ok": 1}',
                '{\n  "ok": false\n}',
                '{"ok":true}',
                block(weather()) + '{"ok": true}',
            ],
        ),
    ],
    ids=["auto", "auto, one call", "required", "named", "auto or JSON"],
)
def test_tools_allow_what_the_choice_says(
    walker: Walker, fields: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    grammar = constraint(tools=TOOLS, **fields)
    assert [text for text in allowed if not walker.accepts(grammar, text)] == []
    assert [text for text in refused if walker.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("mode", "allowed", "refused"),
    [
        ("disabled", ["{}"], ["<mm:think>a</mm:think>{}", "</mm:think>{}"]),
        ("enabled", ["a</mm:think>{}"], ["{}", "<mm:think>a</mm:think>{}"]),
        ("adaptive", ["{}", "</mm:think>{}", "<mm:think>a</mm:think>{}"], ["a</mm:think>{}"]),
    ],
)
def test_reasoning_comes_before_the_answer_as_the_mode_says(
    walker: Walker, mode: str, allowed: list[str], refused: list[str]
) -> None:
    grammar = constraint(mode, response_format={"type": "json_object"})
    assert [text for text in allowed if not walker.accepts(grammar, text)] == []
    assert [text for text in refused if walker.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        (
            WEATHER,
            [{"city": ""}, {"city": "a", "days": 9}],
            [{}, {"city": "a", "days": 10}, {"days": 1}],
        ),
        (
            WEATHER,
            [{"city": "a", "units": "C"}],
            [{"city": "a", "units": "K"}, {"city": "a", "x": "1"}],
        ),
        (
            DEEP["properties"]["where"] | {"$defs": DEEP["$defs"]},
            [{"x": 1.5, "name": "abc"}, {"x": 1}],
            [{"x": "1.", "name": "abcd"}, {"name": "abc"}],
        ),
        ({"type": "object"}, [{}, {"any": {"thing": [1, "x"]}}], ["text"]),
        (None, [{}], ["text", {"any": "thing"}]),
        ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
        (
            {
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
                "additionalProperties": {},
            },
            [{"a": 1}, {"a": 1, "b": {"c": "d"}}],
            [{}, {"a": "x"}, {"b": "c"}],
        ),
        (
            {"properties": {"a": {}, "b": {"type": "array"}}},
            [{"a": {"b": [1]}, "b": ["x", [2]]}],
            [{"c": 1}],
        ),
        (
            {
                "properties": {
                    "a": {"allOf": [{"type": "array"}, {"items": {"type": "null"}}], "minItems": 1}
                }
            },
            [{"a": [None]}],
            [{"a": []}, {"a": [1]}],
        ),
        (
            {"properties": {"left": {"$ref": "#"}, "v": {"type": "integer"}}},
            [{"left": {"left": {"v": 1}, "v": 2}, "v": 3}],
            [{"v": "x"}, {"left": {"v": "x"}}],
        ),
    ],
    ids=[
        "required",
        "enum",
        "reference",
        "open",
        "none",
        "no properties",
        "additional",
        "items",
        "allOf",
        "circle",
    ],
)
def test_arguments_are_held_to_their_schema(
    walker: Walker, schema: Any, allowed: list[Any], refused: list[Any]
) -> None:
    grammar = constraint(tools=[tool("f", schema)], tool_choice="required")
    assert [value for value in allowed if not walker.accepts(grammar, call(value))] == []
    assert [value for value in refused if walker.accepts(grammar, call(value))] == []


@pytest.mark.parametrize("mode", ["disabled", "adaptive", "enabled"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_every_text_of_the_grammar_is_parsed_into_valid_calls(
    walker: Walker, mode: str, choice: str
) -> None:
    grammar = constraint(mode, tools=TOOLS, tool_choice=choice)
    functions = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    num_calls = 0
    for seed in range(40):
        text = walker.write(grammar, seed)
        if text is None:
            continue
        whole, _ = answer([text], functions, mode)
        calls = whole["message"].get("tool_calls", [])
        assert f"{NS}<tool_call>" not in (whole["message"]["content"] or ""), text
        assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
        num_calls += len(calls)
        for made in calls:
            check(made["function"]["name"], json.loads(made["function"]["arguments"]))
    assert num_calls > 3


def check(name: str, arguments: dict[str, Any]) -> None:
    """Whether arguments are of the schema, by hand."""
    if name == "nothing":
        assert arguments == {}
    elif name == "weather":
        assert set(arguments) <= set(WEATHER["properties"])
        assert isinstance(arguments["city"], str)
        assert 1 <= arguments.get("days", 1) <= 9
        assert arguments.get("units") in ("C", "F", None)
        places = arguments.get("places", [])
        assert len(places) <= 3
        assert all(isinstance(place, str) for place in places)
    else:
        assert isinstance(arguments["when"], str | None)
        assert isinstance(arguments["exact"], bool | int | float)
        for place in (arguments["where"], *arguments["more"]):
            assert isinstance(place["x"], int | float)
            assert isinstance(place.get("name", ""), str)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "allOf"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "properties.a.not"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "x"}}},
            "$defs.b.type",
        ),
    ],
)
def test_a_schema_of_the_answer_that_cannot_be_enforced_is_refused_by_its_place(
    schema: Any, place: str
) -> None:
    place = f"response_format.json_schema.schema.{place}"
    with pytest.raises(FieldError) as error:
        constraint(response_format=json_format(schema))
    assert error.value.param == place
    assert str(error.value).startswith(f"{place} ")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"type": "objekt"}}}, ".properties.a.type"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, ".properties.a.$ref"),
        ({"type": "string"}, ""),
        ({"enum": ["a"]}, ""),
    ],
)
def test_parameters_that_mean_nothing_are_refused_by_their_place(schema: Any, place: str) -> None:
    tools = [tool("nothing", {"type": "object", "properties": {}}), tool("f", schema)]
    with pytest.raises(FieldError) as error:
        constraint(tools=tools)
    assert error.value.param == f"tools[1].function.parameters{place}"
    assert str(error.value).startswith(f"{error.value.param} ")


def test_parameters_that_calls_do_not_enforce_are_taken(walker: Walker) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "not": {"const": "Oslo"}}},
        "required": ["city", "unlisted"],
    }
    grammar = constraint(tools=[tool("weather", schema)], tool_choice="required")
    assert walker.accepts(grammar, block(weather()))


@pytest.mark.parametrize("name", ["", "a<b", "a>b", "/a", "x" * 2000])
def test_a_property_that_cannot_be_written_is_refused_by_name(name: str) -> None:
    schema = {"properties": {"list": {"items": {"properties": {name: {}}}}}}
    with pytest.raises(RequestError, match="tool f: a property is called"):
        constraint(tools=[tool("f", schema)])


def test_a_schema_that_contains_itself_many_times_is_held_to_its_outer_levels(
    walker: Walker,
) -> None:
    itself = {name: {"$ref": "#"} for name in "abcdefgh"}
    schema = {"properties": {"v": {"type": "integer"}, **itself}}
    grammar = constraint(tools=[tool("f", schema)], tool_choice="required")
    assert walker.accepts(grammar, call({"v": 1, "a": {"v": 2, "b": {"v": 3}}}))
    assert not walker.accepts(grammar, call({"v": 1, "a": {"v": "x"}}))


def test_a_schema_of_thousands_of_properties_is_refused() -> None:
    schema = {"properties": {f"p{i}": {"type": "string"} for i in range(1100)}}
    with pytest.raises(RequestError, match="tool f: its schema has more than 1024 properties"):
        constraint(tools=[tool("f", schema)])


def test_a_number_that_json_cannot_hold_is_refused() -> None:
    body = json.dumps({"prompt": "a", "response_format": json_format({"const": "huge"})})
    huge = parse(CompletionRequest, body.replace('"huge"', "1e999").encode())
    with pytest.raises(RequestError, match="JSON cannot hold"):
        completion_constraint(huge)


def test_a_completion_may_be_held_to_a_schema(walker: Walker) -> None:
    body = json.dumps({"prompt": "a", "response_format": json_format()}).encode()
    grammar = completion_constraint(parse(CompletionRequest, body))
    assert grammar is not None
    assert walker.accepts(grammar, '{"ok": true}')
    assert not walker.accepts(grammar, "</mm:think>{}")


def test_a_value_that_the_schema_leaves_open_may_hold_no_stray_tag(walker: Walker) -> None:
    grammar = constraint(tools=[tool("f", {"properties": {"a": {}}})], tool_choice="required")
    assert walker.accepts(grammar, call(element("a", "x ]<]mini y")))
    assert not walker.accepts(grammar, call(element("a", f"x{NS}y")))

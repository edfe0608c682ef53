"""Elements to JSON by schema: one line for each way in which a value may be written."""

from __future__ import annotations

from typing import Any

import pytest
from support.m3_text import NS, answer, call, element, same

S, N, B = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def array(items: Any = None) -> dict[str, Any]:
    return {"type": "array"} if items is None else {"type": "array", "items": items}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def any_of(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def items(*values: Any) -> str:
    return "".join(element("item", value) for value in values)


A, B_, C = (element(name, value) for name, value in (("a", 1), ("b", 2), ("c", 3)))
NULL = {"type": "null"}
OF_FILE = array(obj(path=S, size=N))

VALUES: list[tuple[str, Any, str, str]] = [
    ("string", S, " 12 ", '" 12 "'),
    ("empty string", S, "", '""'),
    ("string with quotes", S, 'a"\\\n\u2028é', '"a\\"\\\\\\n\u2028é"'),
    ("string like null", S, "null", '"null"'),
    ("integer", N, " 12\n", "12"),
    ("huge integer", N, "9" * 5000, "9" * 5000),
    ("number keeps its digits", {"type": "number"}, "1.50e+2", "1.50e+2"),
    ("number with a leading zero is none", N, "012", '"012"'),
    ("NaN is no number", {"type": "number"}, "NaN", '"NaN"'),
    ("word for an integer", N, "twelve", '"twelve"'),
    ("null for an integer", N, "null", '"null"'),
    ("empty integer", N, "", '""'),
    ("true", B, "true", "true"),
    ("True", B, " True", "true"),
    ("yes", B, "yes", '"yes"'),
    ("null", NULL, "null", "null"),
    ("empty null", NULL, "", "null"),
    ("nullable string", any_of(S, NULL), "null", "null"),
    ("nullable string, text", any_of(S, NULL), "nul", '"nul"'),
    ("nullable string, empty", any_of(S, NULL), "", '""'),
    ("nullable integer, empty", any_of(N, NULL), "", "null"),
    ("nullable list, empty", any_of(array(S), NULL), "", "[]"),
    ("nullable list", {"type": ["array", "null"], "items": N}, items(1), "[1]"),
    ("nullable object", any_of(obj(a=S), NULL), "null", "null"),
    ("type list, number", {"type": ["string", "integer"]}, "12", "12"),
    ("type list, text", {"type": ["string", "integer"]}, "12a", '"12a"'),
    ("type list, null is text", {"type": ["string", "integer"]}, "null", '"null"'),
    ("type list, space", {"type": ["string", "integer"]}, " 12", '" 12"'),
    ("long digits where text may be", {"type": ["string", "integer"]}, "1" * 500, f'"{"1" * 500}"'),
    ("enum of strings", {"enum": ["1", "2"]}, "1", '"1"'),
    ("enum, first that fits", {"enum": [True, "true"]}, "true", "true"),
    ("enum of mixed", {"enum": ["a", 1, None]}, "null", "null"),
    ("const", {"const": 1.5}, "1.5", "1.5"),
    ("list of items", array(S), items("a", "b"), '["a", "b"]'),
    ("list of one", array(S), items("a"), '["a"]'),
    ("list of one without item", array(S), "a", '["a"]'),
    ("list of one number", array(N), "5", "[5]"),
    ("empty list", array(S), "", "[]"),
    ("list with space", array(N), f"\n{items(1)}\n {items(2)}\n", "[1, 2]"),
    ("list as JSON", array(N), " [1, 2] ", "[1, 2]"),
    ("list that only looks like JSON", array(S), "[1, 2", '["[1, 2"]'),
    ("items of another name", array(S), element("tag", "a") + element("tag", "b"), '["a", "b"]'),
    ("list of lists", array(array(N)), items([1, 2], [], [3]), "[[1, 2], [], [3]]"),
    ("list of empty strings", array(S), items("", ""), '["", ""]'),
    ("list of objects", OF_FILE, items({"path": "a", "size": 1}), '[{"path": "a", "size": 1}]'),
    ("list of one object, bare", OF_FILE, element("path", "a"), '[{"path": "a"}]'),
    ("list of nullables", array(any_of(S, NULL)), items("a", None), '["a", null]'),
    ("tuple", {"type": "array", "prefixItems": [S, N]}, items("1", "1"), '["1", 1]'),
    ("old tuple", {"type": "array", "items": [S, N]}, items("1", "1"), '["1", 1]'),
    ("untyped list by its items", {"items": S}, items("1"), '["1"]'),
    ("object", obj(a=N, b=S), A + B_, '{"a": 1, "b": "2"}'),
    ("empty object", obj(a=N), "", "{}"),
    ("object as JSON", obj(a=N), '{"a": 1}', '{"a": 1}'),
    ("object with an unknown property", obj(b=S), A, '{"a": 1}'),
    ("object, text beside", obj(a=N), f"x {A} y", '{"a": 1, "$text": "x  y"}'),
    ("object, text alone", obj(a=N), "x", '"x"'),
    ("untyped object by its properties", {"properties": {"a": S}}, A, '{"a": "1"}'),
    ("map", {"type": "object", "additionalProperties": S}, A, '{"a": "1"}'),
    ("siblings are a list", obj(a=array(N)), A + A + B_, '{"a": [1, 1], "b": 2}'),
    ("one sibling is a list", obj(a=array(N)), A, '{"a": [1]}'),
    ("siblings without a schema", {"type": "object"}, A + A, '{"a": [1, 1]}'),
    ("siblings with items", obj(a=array(N)), element("a", items(1, 2)) + A, '{"a": [1, 2, 1]}'),
    ("siblings after none", obj(a=array(N)), element("a", "") + A, '{"a": [1]}'),
    ("siblings after JSON", obj(a=array(N)), element("a", "[7]") + A, '{"a": [7, 1]}'),
    ("string or list, text", any_of(S, array(S)), "a", '"a"'),
    ("string or list, items", any_of(S, array(S)), "\n" + items("a"), '["a"]'),
    ("string or object, text", any_of(S, obj(a=N)), "{}", '"{}"'),
    ("string or object, elements", any_of(S, obj(a=N)), A, '{"a": 1}'),
    ("list or object, items", any_of(array(S), obj(a=S)), items("1"), '["1"]'),
    ("list or object, elements", any_of(array(S), obj(a=S)), A, '{"a": "1"}'),
    ("oneOf objects", {"oneOf": [obj(a=S), obj(b=S)]}, B_, '{"b": "2"}'),
    ("allOf objects", {"allOf": [obj(a=S), obj(b=S)]}, A + B_, '{"a": "1", "b": "2"}'),
    ("open, number", {}, "-1.5", "-1.5"),
    ("open, text", {}, "-1.5.", '"-1.5."'),
    ("open, JSON is text", {}, "[1]", '"[1]"'),
    ("open, empty", {}, "", '""'),
    ("open, items", {}, items(1, "a"), '[1, "a"]'),
    ("open, elements", True, A + element("c", items("x")), '{"a": 1, "c": ["x"]}'),
    ("open, text and elements", {}, f"hey {A}", '{"a": 1, "$text": "hey"}'),
    ("open, text and items", {}, f"hey {items(1)}", '{"item": 1, "$text": "hey"}'),
    ("reference", {"$ref": "#/$defs/word"}, "1", '"1"'),
    ("reference beside words", {"$ref": "#/$defs/word", "description": "x"}, "1", '"1"'),
    ("reference to nowhere", {"$ref": "#/$defs/none"}, "1", "1"),
    ("reference to elsewhere", {"$ref": "file:///etc/passwd"}, "1", "1"),
    ("reference in a circle", {"$ref": "#/$defs/circle"}, "1", "1"),
    ("a schema inside itself", {"$ref": "#/$defs/list"}, items(items(items())), "[[[]]]"),
    ("text in a schema inside itself", {"$ref": "#/$defs/list"}, "x", f'{"[" * 16}"x"{"]" * 16}'),
]
DEFS = {
    "word": S,
    "circle": {"$ref": "#/$defs/circle"},
    "list": {"type": "array", "items": {"$ref": "#/$defs/list"}},
}


@pytest.mark.parametrize(
    ("schema", "written", "value"), [case[1:] for case in VALUES], ids=[case[0] for case in VALUES]
)
def test_a_value_is_read_as_its_schema_says(schema: Any, written: str, value: str) -> None:
    functions = {"f": {"properties": {"v": schema, "after": N}, "$defs": DEFS}}
    text = call(element("v", written) + element("after", 1))
    whole, streamed = answer(list(text), functions)
    assert same(whole, streamed)
    (made,) = whole["message"]["tool_calls"]
    assert made["function"]["arguments"] == f'{{"v": {value}, "after": 1}}'


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (array(S), f"{items('a')} and"),
        (array(S), f"and {items('a')}"),
        (any_of(S, array(S)), f"a{items('b')}"),
        (obj(a=N), A + B_ + A),
        (obj(a=N), A + A),
        (obj(a=array(N)), A + B_ + A),
        (obj(a=any_of(array(N), NULL)), A + element("a", None)),
        ({}, A + B_ + A),
        (obj(**{"$text": S}), element("$text", "a") + "b"),
    ],
)
def test_elements_that_make_no_value_reject_the_call(schema: Any, written: str) -> None:
    text = call(element("v", written))
    whole, _ = answer(list(text), {"f": {"properties": {"v": schema}}})
    assert whole["message"]["content"] == text
    assert "tool_calls" not in whole["message"]


@pytest.mark.parametrize("schema", [None, 5, [], {"type": 5}, {"type": ["x", {}]}, {"anyOf": [1]}])
def test_what_is_no_schema_is_read_as_any_value(schema: Any) -> None:
    whole, _ = answer([call(element("v", "1"))], {"f": {"properties": {"v": schema}}})
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"v": 1}'


@pytest.mark.parametrize(
    "schema", [None, True, {}, {"type": "string"}, {"$ref": "#"}, {"enum": [1]}]
)
def test_arguments_are_an_object_whatever_their_schema_says(schema: Any) -> None:
    whole, _ = answer([call(A)], {"f": schema})
    assert whole["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_schema_of_many_alternatives_is_read_in_bounded_time() -> None:
    level: Any = {"type": "string"}
    for _ in range(14):
        level = any_of(level, level, level, level)
    whole, _ = answer([call(element("v", f"1{NS}"))], {"f": {"properties": {"v": level}}})
    assert "tool_calls" not in whole["message"]

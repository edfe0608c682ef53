"""Schemas: what a grammar would leave out is named, and nothing else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from winnow.engine.schemas import left_out_of_pattern, senseless, unserved

TEXT = {"type": "string"}
COUNT = {"type": "integer"}
NAMED = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    tokens = [bytes([byte]) for byte in range(256)] + [b""]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def holds(compiler: xgrammar.GrammarCompiler, schema: Any, value: Any) -> bool:
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar))
    return matcher.accept_string(json.dumps(value)) and matcher.accept_token(256)


LEFT_OUT: list[tuple[Any, str, Any]] = [
    ({"allOf": [NAMED, {"type": "object", "required": ["b"]}]}, ".allOf", {"z": 1}),
    ({**NAMED, "allOf": [{"type": "object"}]}, ".properties", None),
    ({**TEXT, "if": {}, "then": {"maxLength": 1}}, ".if", "abc"),
    ({**TEXT, "not": {"maxLength": 3}}, ".not", "abc"),
    ({"type": "array", "items": TEXT, "contains": {"const": "b"}}, ".contains", ["a"]),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, ".uniqueItems", ["a", "a"]),
    ({"type": "number", "multipleOf": 5}, ".multipleOf", 7),
    ({"type": "integer", "multipleOf": 5000}, ".multipleOf", 7),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, ".multipleOf", 7),
    ({**NAMED, "dependentRequired": {"a": ["b"]}}, ".dependentRequired", {"a": "x"}),
    ({**TEXT, "minLength": 2, "pattern": "a*"}, ".minLength", "a"),
    ({**TEXT, "maxLength": 2, "format": "date"}, ".maxLength", "2020-01-01"),
    ({**TEXT, "pattern": "^(?=x)a$"}, ".pattern", "a"),
    ({**TEXT, "pattern": "a$b"}, ".pattern", "ab"),
    ({"$ref": "http://example.com/schema"}, ".$ref", 5),
    ({"$ref": "#name"}, ".$ref", 5),
    ({"$ref": "#/$defs/a", "$defs": {"a": TEXT}, "minLength": 3}, ".minLength", "a"),
    ({**NAMED, "required": ["zzz"], "additionalProperties": False}, ".required", {"a": "x"}),
    ({**NAMED, "required": ["zzz"], "additionalProperties": TEXT}, ".required", {"a": "x"}),
    ({"minLength": 3}, ".minLength", "a"),
    ({"required": ["a"]}, ".required", {}),
    ({"enum": ["a", "abcd"], "minLength": 3}, ".minLength", "a"),
    ({"enum": ["a", 5], "type": "string"}, ".type", 5),
    ({"const": "a", "enum": ["b"]}, ".enum", "a"),
    ({**TEXT, "anyOf": [{"minLength": 3}]}, ".type", "a"),
    ({**NAMED, "anyOf": [NAMED]}, ".properties", None),
    ({**NAMED, "propertyNames": {"pattern": "^b$"}}, ".propertyNames", {"a": "x"}),
    ({"anyOf": []}, ".anyOf", None),
    ({"oneOf": []}, ".oneOf", None),
    ({**TEXT, "maxLength": -1}, ".maxLength", "a"),
]


@pytest.mark.parametrize(("schema", "place", "let_through"), LEFT_OUT)
def test_a_word_that_a_grammar_leaves_out_is_named(
    compiler: xgrammar.GrammarCompiler, schema: Any, place: str, let_through: Any
) -> None:
    fault = unserved(schema)
    assert fault is not None
    assert fault.place == place
    assert ": " in fault.says
    if let_through is not None:
        assert holds(compiler, schema, let_through), "the library has learnt it: serve it"


HELD: list[tuple[Any, Any, Any]] = [
    ({"allOf": [TEXT], "title": "t", "description": "d", "default": "x"}, "a", 5),
    ({"$ref": "#/$defs/a b", "$defs": {"a b": TEXT}, "description": "d"}, "a", 5),
    ({"$schema": "s", "$id": "i", "$comment": "c", "examples": [1], **TEXT}, "a", 5),
    ({**TEXT, "deprecated": True, "readOnly": True, "format": "password", "x-mine": 1}, "a", 5),
    ({**TEXT, "format": "date"}, "2020-01-01", "x"),
    ({**TEXT, "const": "a"}, "a", "b"),
    ({"type": ["string", "null"], "enum": ["a", None]}, None, "b"),
    ({"type": "object", "anyOf": [NAMED, NAMED]}, {"a": "x"}, {}),
    ({"type": ["integer", "null"], "multipleOf": 5}, 10, 7),
    ({**COUNT, "multipleOf": 5, "minimum": 0, "maximum": 100}, 10, 7),
    ({**COUNT, "minimum": 3}, 3, 2),
    ({**TEXT, "pattern": r"^[$^(?=]{2}\$(a|b)$"}, "$^$a", "a"),
    ({**TEXT, "minLength": 2, "maxLength": 3}, "ab", "a"),
    ({"properties": {"a": TEXT}, "required": ["a"]}, {"a": "x"}, {}),
    ({"type": "object", "propertyNames": {"maxLength": 2}}, {"ab": 1}, {"abc": 1}),
    ({"type": "object", "patternProperties": {"^a.*$": TEXT}}, {"ab": "x"}, {"ab": 1}),
    ({"type": "object", "additionalProperties": TEXT, "minProperties": 1}, {"a": "x"}, {}),
    ({"type": "array", "items": TEXT, "minItems": 1, "uniqueItems": False}, ["a"], []),
    ({"type": "array", "prefixItems": [TEXT], "items": COUNT}, ["a", 1], ["a", "b"]),
    ({**NAMED, "properties": {"a": TEXT, "not": TEXT, "if": {"$ref": "#"}}}, {"a": "x"}, {}),
]


@pytest.mark.parametrize(("schema", "allowed", "refused"), HELD)
def test_a_schema_that_its_grammar_holds_is_served(
    compiler: xgrammar.GrammarCompiler, schema: Any, allowed: Any, refused: Any
) -> None:
    assert unserved(schema) is None
    assert senseless(schema) is None
    assert holds(compiler, schema, allowed)
    assert not holds(compiler, schema, refused)


WORDS = [
    *("$ref", "$defs", "const", "enum", "anyOf", "oneOf", "allOf", "not", "type", "minLength"),
    *("maxLength", "pattern", "format", "minimum", "maximum", "multipleOf", "required", "items"),
    *("properties", "patternProperties", "propertyNames", "prefixItems", "minItems"),
    *("uniqueItems", "additionalProperties"),
]


def test_the_place_of_a_fault_is_found_wherever_it_is() -> None:
    bad = {"type": "array", "uniqueItems": True}
    for schema, place in [
        ({"properties": {"a": {"items": bad}}}, ".properties.a.items.uniqueItems"),
        ({"anyOf": [TEXT, {"prefixItems": [bad]}]}, ".anyOf[1].prefixItems[0].uniqueItems"),
        ({"$ref": "#/$defs/x/y", "$defs": {"x": {"y": bad}}}, ".$defs.x.y.uniqueItems"),
        ({"additionalProperties": bad}, ".additionalProperties.uniqueItems"),
    ]:
        fault = unserved(schema)
        assert fault is not None
        assert fault.place == place
    assert unserved({**TEXT, "$defs": {"unused": bad}}) is None


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "value", [5, -1, 1e300, 10**400, True, None, "x", "#", [], [5], [[]], [{}], {}, {"a": 5}]
)
def test_a_schema_of_any_shape_is_no_mistake_of_ours(word: str, value: Any) -> None:
    for others in ({}, TEXT, {"type": [{}, 3]}, {"multipleOf": 3, **COUNT}, {"enum": [{}, 1e400]}):
        unserved({**others, word: value})
        senseless({**others, word: value})


def test_a_type_that_is_none_and_a_reference_to_nothing_are_named() -> None:
    fault = senseless({"properties": {"a": {"type": "objekt"}}})
    assert fault is not None
    assert fault.place == ".properties.a.type"
    assert "'objekt'" in fault.says
    fault = senseless({"items": {"$ref": "#/$defs/no"}})
    assert fault is not None
    assert fault.place == ".items.$ref"


@pytest.mark.parametrize("pattern", ["", "^a$", "(^a|b$)", "a\\^b\\$c", "[", "\\", "(?:^a)", "a|$"])
def test_a_pattern_that_is_held_whole_has_nothing_left_out(pattern: str) -> None:
    assert left_out_of_pattern(pattern) is None

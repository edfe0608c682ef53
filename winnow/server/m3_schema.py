"""What a JSON schema says about reading a value that was written without types. Validates nothing.

Of a schema it takes which kinds of value are possible, the schemas of properties and of items, and
listed values. What it does not understand, or cannot resolve, is read as any value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Self

from winnow.engine.schemas import MISSING, resolve

KINDS = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MAX_DEPTH = 16
"""References and combinations followed for one value; a circle of them ends here."""
_MAX_ALTERNATIVES = 64
_OBJECT_WORDS = ("properties", "additionalProperties", "patternProperties", "required")
_ARRAY_WORDS = ("items", "prefixItems")
_ANY: Mapping[str, Any] = {}


class Shape:
    """The possible schemas of one value: one, or one for each branch of anyOf and its like."""

    def __init__(self, root: Any, *schemas: Any) -> None:
        """`root` is the whole schema, for references; `schemas` are parts of it."""
        self._root = root
        found: list[Mapping[str, Any]] = []
        for schema in schemas:
            for alternative in _alternatives(schema, root, _MAX_DEPTH):
                found.append(alternative)
                if len(found) > _MAX_ALTERNATIVES:
                    found = [_ANY]
                    break
        self._alternatives = found or [_ANY]

    @classmethod
    def of(cls, schema: Any) -> Self:
        """The shape of what a whole schema describes."""
        return cls(schema, schema)

    def only(self, kind: str) -> Self:
        """This shape, for a value that is known to be of one kind."""
        fitting = [a for a in self._alternatives if kind in _kinds(a)] or [_ANY]
        unlisted = [{w: v for w, v in a.items() if w not in ("const", "enum")} for a in fitting]
        return type(self)(self._root, *({**schema, "type": kind} for schema in unlisted))

    @cached_property
    def kinds(self) -> frozenset[str]:
        """Of `KINDS`, those that the value may have; integers are numbers."""
        return frozenset[str]().union(*map(_kinds, self._alternatives))

    @cached_property
    def listed(self) -> list[Any]:
        """The values of enum and const, in order."""
        values: list[Any] = []
        for alternative in self._alternatives:
            if "const" in alternative:
                values.append(alternative["const"])
            elif isinstance(alternative.get("enum"), list):
                values += alternative["enum"]
        return values

    @property
    def is_open(self) -> bool:
        """Whether the schema says nothing of the value's kind."""
        return any(_kinds(a) == KINDS for a in self._alternatives)

    @property
    def is_whole(self) -> bool:
        """Whether numbers of this shape are integers."""
        return all(
            "integer" in words and "number" not in words
            for a in self._alternatives
            if (words := _type_words(a)) and {"integer", "number"} & {*words}
        )

    def split(self) -> list[Self]:
        """A shape for each alternative."""
        return [type(self)(self._root, alternative) for alternative in self._alternatives]

    def keyword(self, word: str) -> Any:
        """What the first alternative says under a word of JSON schema; None if nothing."""
        return self._alternatives[0].get(word)

    def property_names(self) -> list[str]:
        """The listed properties, in order."""
        return list(dict.fromkeys(n for a in self._alternatives for n in _mapping(a, "properties")))

    def names(self, name: str) -> bool:
        """Whether the schema lists a property of this name."""
        return any(name in _mapping(a, "properties") for a in self._alternatives)

    def property(self, name: str) -> Shape:
        """The shape of a property: as listed, else as additional ones are."""
        listed = [
            properties[name]
            for a in self._alternatives
            if name in (properties := _mapping(a, "properties"))
        ]
        additional = [a.get("additionalProperties", True) for a in self._alternatives]
        return Shape(self._root, *(listed or additional))

    def item(self, place: int) -> Shape:
        """The shape of an item of an array."""
        return Shape(self._root, *(_item(a, place) for a in self._alternatives))


def _alternatives(schema: Any, root: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema without references and combinations: one for each way to fulfil it."""
    if not isinstance(schema, Mapping) or depth == 0:
        yield _ANY
        return
    if "$ref" in schema:
        rest = {word: value for word, value in schema.items() if word != "$ref"}
        target = _resolve(schema["$ref"], root)
        for found in _alternatives(target, root, depth - 1):
            yield from _alternatives(_merged(found, rest), root, depth - 1)
        return
    for word in ("allOf", "anyOf", "oneOf"):
        branches = schema.get(word)
        if not isinstance(branches, list) or not branches:
            continue
        rest = {other: value for other, value in schema.items() if other != word}
        if word == "allOf":
            yield from _all_of(branches, rest, root, depth - 1)
            return
        for branch in branches[:_MAX_ALTERNATIVES]:
            for found in _alternatives(branch, root, depth - 1):
                yield from _alternatives(_merged(rest, found), root, depth - 1)
        return
    yield schema


def _all_of(
    branches: list[Any], rest: Mapping[str, Any], root: Any, depth: int
) -> Iterator[Mapping[str, Any]]:
    """Branches that hold together; of one that has alternatives itself, the first is taken."""
    merged = rest
    for branch in branches[:_MAX_ALTERNATIVES]:
        merged = _merged(merged, next(_alternatives(branch, root, depth)))
    yield from _alternatives(merged, root, depth)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both schemas in one; where they contradict each other the second counts."""
    merged = {**first, **second}
    properties = {**_mapping(first, "properties"), **_mapping(second, "properties")}
    return {**merged, "properties": properties} if properties else merged


def _resolve(reference: Any, root: Any) -> Any:
    """What a JSON pointer into the same document names; any value for every other reference."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return _ANY
    target = resolve(reference, root)
    return _ANY if target is MISSING else target


def _type_words(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type")
    return [str(word) for word in (named if isinstance(named, list) else [named])]


def _kinds(schema: Mapping[str, Any]) -> frozenset[str]:
    if "const" in schema:
        return frozenset((kind_of(schema["const"]),))
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        return frozenset(map(kind_of, schema["enum"]))
    words = _type_words(schema)
    kinds = KINDS.intersection("number" if word == "integer" else word for word in words)
    if kinds:
        return kinds
    if any(word in schema for word in _OBJECT_WORDS):
        return frozenset(("object",))
    if any(word in schema for word in _ARRAY_WORDS):
        return frozenset(("array",))
    return KINDS


def kind_of(value: Any) -> str:
    """Which of `KINDS` a value of JSON is."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _mapping(schema: Mapping[str, Any], word: str) -> Mapping[str, Any]:
    value = schema.get(word)
    return value if isinstance(value, Mapping) else _ANY


def _item(schema: Mapping[str, Any], place: int) -> Any:
    prefix = schema.get("prefixItems")
    if isinstance(prefix, list) and place < len(prefix):
        return prefix[place]
    items = schema.get("items", True)
    if isinstance(items, list):  # what drafts before 2020-12 call prefixItems
        return items[place] if place < len(items) else True
    return items

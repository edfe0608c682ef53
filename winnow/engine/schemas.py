"""JSON schemas before they are grammars: words that a grammar would leave out. Compiles nothing.

What is left out was found by trying xgrammar: many words hold only where nothing stands beside
them. Words that say nothing of validity, and words that nobody knows, are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of a schema that has one of these, the grammar reads nothing else."""
_NEVER = [
    "not",
    "if",
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
]
_STRING = ("minLength", "maxLength", "pattern")
_NUMBER = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ARRAY = ("minItems", "maxItems", "uniqueItems")
_OBJECT = ("required", "minProperties", "maxProperties", "patternProperties", "propertyNames")
_UNTYPED = (*_STRING, *_NUMBER, *_ARRAY, *_OBJECT)
"""Words that hold only for a value whose kind is known."""
_TELLING = [
    "properties",
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "prefixItems",
    "unevaluatedItems",
]
"""Words that tell the kind themselves: object or array."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_FORMATS = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
]
"""Formats that are enforced; every other is a note to the reader."""
_MAPS = ("properties", "patternProperties")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_PARTS = ["items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems"]
_MAX_MULTIPLE = 1024
_MAX_RANGE = 1000
"""Between the bounds of a number beside multipleOf: the library lists what lies there."""
_AROUND = ("(?=", "(?!", "(?<=", "(?<!")
MISSING = object()
"""What `resolve` returns for a pointer to nothing."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with a schema, to be said after the name of the whole."""

    place: str
    """Where, as `.properties.a.not`; empty for the whole schema."""
    says: str
    """What is wrong there and what to do, to follow the place in a sentence."""


def unserved(schema: Any) -> Fault | None:
    """The first word of a schema that its grammar would leave out; None if it holds all of it.

    Shapes that are no schema, as `allOf: 5`, are left to the compiler, which names them.
    """
    for place, part in _parts(schema):
        for word, says in _left_out(part, schema):
            return Fault(f"{place}.{word}", says)
    return None


def senseless(schema: Any) -> Fault | None:
    """The first type that is none, or reference to nothing, of a schema; None if there is none."""
    for place, part in _parts(schema):
        types = part.get("type")
        for word in types if isinstance(types, list) else [types]:
            if "type" in part and word not in _TYPES:
                return Fault(
                    f"{place}.type", f"is {_shown(word)}, which is none: use {', '.join(_TYPES)}"
                )
        reference = part.get("$ref")
        if (
            isinstance(reference, str)
            and _is_local(reference)
            and resolve(reference, schema) is MISSING
        ):
            return Fault(f"{place}.$ref", _nothing(reference))
    return None


def left_out_of_pattern(pattern: str) -> str | None:
    """What of a regular expression the grammar would leave out, and what to do."""
    in_class = False
    place = 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            if pattern[place + 1 : place + 2] in ("A", "Z", "z"):
                return f"has \\{pattern[place + 1]}, which is not enforced: use ^ and $"
            place += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif pattern.startswith(_AROUND, place):
            return "looks around itself, which is not enforced: write it without (?= and its like"
        elif (character == "^" and place and pattern[place - 1] not in "(|:") or (
            character == "$" and pattern[place + 1 : place + 2] not in ("", ")", "|")
        ):
            return f"has {character} in its middle, which is not enforced: write it without"
        place += 1
    return None


def resolve(reference: str, root: Any) -> Any:
    """What a JSON pointer that begins with # names in a document; MISSING for nothing."""
    target = root
    for step in unquote(reference[1:]).split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and len(key) < 10:
            target = target[int(key)] if int(key) < len(target) else MISSING
        else:
            target = target.get(key, MISSING) if isinstance(target, Mapping) else MISSING
    return target


def _parts(root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schema, each schema in it, and each that they refer to, with their places; each once."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen: dict[int, Any] = {}
    while waiting:
        place, schema = waiting.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen[id(schema)] = schema
        yield place, schema
        waiting += reversed([*_inside(place, schema, root)])


def _inside(place: str, schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, Any]]:
    for word, value in schema.items():
        if word in _MAPS and isinstance(value, Mapping):
            yield from ((f"{place}.{word}.{name}", part) for name, part in value.items())
        elif word in _LISTS and isinstance(value, list):
            yield from ((f"{place}.{word}[{i}]", part) for i, part in enumerate(value))
        elif word == "propertyNames" and isinstance(value, Mapping):
            # Names are strings, whether their schema says so or not.
            known = {} if any(form in value for form in _FORMS) else {"type": "string"}
            yield f"{place}.{word}", {**known, **value}
        elif word in _PARTS:
            yield f"{place}.{word}", value
        elif word == "$ref" and _is_local(value):
            yield value[1:].replace("/", "."), resolve(value, root)


def _is_local(reference: Any) -> bool:
    return isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))


def _left_out(schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    """Words of one schema that its grammar leaves out, and why with what to do."""
    for word in schema:
        if word in _NEVER:
            yield word, "is not enforced while decoding: remove it"
    form = next((word for word in _FORMS if word in schema), None)
    if form is None:
        yield from _of_kind(schema)
        return
    yield from _of_form(form, schema, root)
    for word in schema:
        if word != form and _asserts(word, schema) and not _says_again(word, form, schema):
            where = "remove it" if form in ("const", "enum") else f"say it inside what {form} gives"
            yield word, f"stands beside {form} and would not be enforced: {where}"


def _asserts(word: str, schema: Mapping[str, Any]) -> bool:
    if word in ("uniqueItems", "required") and not schema[word]:
        return False
    if word == "format":
        return any(schema[word] == name for name in _FORMATS)
    return word in ("type", *_FORMS, *_UNTYPED, *_TELLING)


def _says_again(word: str, form: str, schema: Mapping[str, Any]) -> bool:
    """Whether a type is only that which all alternatives have anyway."""
    if word != "type":
        return False
    types = {*_types(schema)}
    listed = schema[form]
    if form == "const":
        return bool(types & _types_of(listed))
    if not isinstance(listed, list):
        return False
    if form == "enum":
        return all(types & _types_of(value) for value in listed)
    return all(
        isinstance(part, Mapping) and _types(part) and types >= {*_types(part)} for part in listed
    )


def _of_form(form: str, schema: Mapping[str, Any], root: Any) -> Iterator[tuple[str, str]]:
    value = schema[form]
    if form == "$ref" and not _is_local(value):
        yield form, f"is {_shown(value)}: only references into the schema itself, as #/$defs/name"
    elif form == "$ref" and resolve(value, root) is MISSING:
        yield form, _nothing(value)
    elif form in ("anyOf", "oneOf", "allOf") and value == []:
        yield form, "lists nothing: give it a schema or remove it"
    elif form == "allOf" and isinstance(value, list) and len(value) > 1:
        yield form, f"has {len(value)} schemas, which are not enforced together: write them as one"


def _of_kind(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Words left out of a schema without a form: its type says which are read."""
    types = _types(schema)
    if "type" not in schema:
        told = any(word in schema for word in _TELLING)
        for word in () if told else schema:
            if _asserts(word, schema):
                yield word, "is not enforced without a type: add type beside it"
    elif schema["type"] == []:
        yield "type", f"lists nothing: use {', '.join(_TYPES)}"
    for word in _COUNTS:
        if type(schema.get(word)) is int and schema[word] < 0:
            yield word, f"is {schema[word]}: give 0 or more"
    if not types or "string" in types:
        yield from _of_strings(schema)
    if "multipleOf" in schema and (not types or {"integer", "number"} & {*types}):
        yield from _of_multiples(schema, types)
    if schema.get("uniqueItems") and (not types or "array" in types):
        yield "uniqueItems", "is not enforced while decoding: remove it"
    if not types or "object" in types:
        yield from _of_objects(schema)


def _of_strings(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    whole = [w for w in ("pattern", "format") if w in schema and _asserts(w, schema)]
    bounds = [w for w in ("minLength", "maxLength") if w in schema]
    if whole and bounds:
        yield bounds[0], f"stands beside {whole[0]} and would not be enforced: remove one of them"
    if len(whole) > 1:
        yield "pattern", "stands beside format and would not be enforced: remove one of them"
    if isinstance(schema.get("pattern"), str) and (says := left_out_of_pattern(schema["pattern"])):
        yield "pattern", says
    names = schema.get("patternProperties")
    for name in names if isinstance(names, Mapping) else ():
        if says := left_out_of_pattern(name):
            yield f"patternProperties.{name}", says


def _of_multiples(schema: Mapping[str, Any], types: list[str]) -> Iterator[tuple[str, str]]:
    step = schema["multipleOf"]
    low = max(_numbers(schema, "minimum", "exclusiveMinimum"), default=None)
    high = min(_numbers(schema, "maximum", "exclusiveMaximum"), default=None)
    if "integer" not in types or "number" in types:
        yield "multipleOf", "is enforced for type integer alone: use that type or remove it"
    elif type(step) is not int or step > _MAX_MULTIPLE:
        yield (
            "multipleOf",
            f"is {_shown(step)}, whole numbers up to {_MAX_MULTIPLE} are enforced: use one",
        )
    elif (low, high) != (None, None) and (low is None or high is None or high > low + _MAX_RANGE):
        yield (
            "multipleOf",
            f"is not enforced within bounds, unless both are given, {_MAX_RANGE} apart at most: "
            "remove it or the bounds",
        )


def _of_objects(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    properties = schema.get("properties") or {}
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if isinstance(name, str) and isinstance(properties, Mapping) and name not in properties:
            yield (
                "required",
                f"names {_shown(name)}, which is not among the properties: add it there or take "
                "it out",
            )
    for word in ("properties", "patternProperties"):
        if "propertyNames" in schema and schema.get(word):
            yield "propertyNames", f"stands beside {word} and would not be enforced: remove it"


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [t for t in (types if isinstance(types, list) else [types]) if isinstance(t, str)]


def _numbers(schema: Mapping[str, Any], *words: str) -> list[int | float]:
    found = [schema[word] for word in words if word in schema]
    return [n for n in found if isinstance(n, int | float)]


def _types_of(value: Any) -> set[str]:
    """The names that JSON schema has for the type of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == value // 1 else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}


def _nothing(reference: str) -> str:
    return f"is {_shown(reference)}, which is not in the schema: add it there or correct the name"


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # Python may refuse to write it out
    text = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."

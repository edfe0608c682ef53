"""Schemas of arguments as grammars of the family's call format. Knows no request and no tool.

A grammar is a format of xgrammar's structural tags, as plain data; its leaves are xgrammar's own
reading of the call format, style minimax_m3_xml. It allows no more than the schema, but for these:

- What the schema leaves open may be any elements or text: values without a kind, objects without
  `properties`, and what follows the listed properties where `additionalProperties` is not false
  but given. The names in it are the model's: they may be repeated, or closed by another.
- `pattern`, `format`, `minLength`, `maxLength`, `multipleOf`, `patternProperties`,
  `propertyNames`, `minProperties`, `maxProperties` and all words that `winnow.engine.schemas`
  refuses are not enforced: a string ends where the next tag begins. Of schemas that nest deep or
  contain themselves, only the outer levels.

It allows less in this: properties come in the order of the schema, and where it lists some and
does not speak of others, there are no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from winnow.errors import RequestError
from winnow.server.m3_format import NAMESPACE
from winnow.server.m3_schema import Shape

Format: TypeAlias = dict[str, Any]

_STYLE = "minimax_m3_xml"
MAX_ELEMENTS = 1024
"""Elements that the grammars of a request may list: more take too long to compile."""
_DEPTHS = (5, 4, 3, 2, 1)
"""Elements inside each other that are held to their schema: the first of these that fits."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_OPEN = rf'''
value ::= text | element+
element ::= "{NAMESPACE}<" name ">" value "{NAMESPACE}</" name ">"
name ::= [^<>/] [^<>]*
text ::= TagDispatch(
  loop_after_dispatch=false,
  excludes=("{NAMESPACE}")
)
'''
_ANY_VALUE: Format = {"type": "grammar", "grammar": f"root ::= value{_OPEN}"}
_ANY_ELEMENTS: Format = {"type": "grammar", "grammar": f"root ::= element*{_OPEN}"}


def arguments_format(schema: Mapping[str, Any], share: int = MAX_ELEMENTS) -> Format:
    """What may stand between the tags of a call whose arguments have this schema.

    Levels of the schema are left open until `share` elements are enough for the others, but for
    the arguments themselves. RequestError for names of properties that the format cannot write,
    and for more than `MAX_ELEMENTS` arguments.
    """
    for name in _property_names(schema):
        if not name or name[0] == "/" or {*"<>"} & {*name} or len(name) > 1024:
            raise RequestError(
                f"a property is called {name[:80]!r}, which the model's call format cannot write: "
                "use up to 1024 characters other than < and >, the first of them no /"
            )
    shape = Shape.of(schema).only("object")
    for depth in _DEPTHS:
        try:
            return _Writer(depth, share if depth > 1 else MAX_ELEMENTS).objects(shape, 0)
        except _TooLargeError:
            continue
    raise RequestError(f"its schema has more than {MAX_ELEMENTS} properties: use fewer")


class _TooLargeError(Exception):
    """A grammar that would take too long to compile."""


class _Writer:
    """Writes one schema as far as it fits."""

    def __init__(self, max_depth: int, max_elements: int) -> None:
        self._max_depth = max_depth
        self._left = max_elements

    def value(self, shape: Shape, depth: int) -> Format:
        """The inside of an element of this shape, `depth` elements inside the call."""
        if self._left == 0:
            raise _TooLargeError
        self._left -= 1
        if shape.is_open or depth > self._max_depth:
            return _ANY_VALUE
        return _one_of([f for part in shape.split() for f in self._formats(part, depth)])

    def _formats(self, shape: Shape, depth: int) -> Iterator[Format]:
        """The formats of a shape of one alternative, one for each kind of value."""
        if shape.listed:
            yield _leaf({"enum": shape.listed})
            return
        for kind in sorted(shape.kinds):
            part = shape.only(kind)
            if kind == "object":
                yield self.objects(part, depth)
            elif kind == "array":
                yield self._lists(part, depth)
            elif kind == "string":
                yield _leaf({"type": "string"})
            elif kind == "number":
                bounds = {w: v for w in _BOUNDS if type(v := shape.keyword(w)) in (int, float)}
                yield _leaf({"type": "integer" if shape.is_whole else "number", **bounds})
            else:
                yield _leaf({"type": kind})

    def objects(self, shape: Shape, depth: int) -> Format:
        """Properties in order; the shape has kind object alone."""
        required = shape.keyword("required")
        elements: list[Format] = []
        for name in shape.property_names():
            tag = _tag(name, self.value(shape.property(name), depth + 1))
            is_required = isinstance(required, list) and name in required
            elements.append(tag if is_required else {"type": "optional", "content": tag})
        additional = shape.keyword("additionalProperties")
        if additional is None:
            additional = shape.keyword("properties") is None
        if additional is not False:
            elements.append(_ANY_ELEMENTS)
        if not elements:
            return {"type": "const_string", "value": ""}
        return {"type": "sequence", "elements": elements}

    def _lists(self, shape: Shape, depth: int) -> Format:
        prefix = shape.keyword("prefixItems")
        item = _ANY_VALUE if prefix else self.value(shape.item(0), depth + 1)
        bounds = [shape.keyword("minItems"), shape.keyword("maxItems")]
        least, most = (b if type(b) is int and 0 <= b < 2**31 else None for b in bounds)
        return {
            "type": "repeat",
            "content": _tag("item", item),
            "min": least or 0,
            "max": -1 if most is None else most,
        }


def _one_of(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _tag(name: str, content: Format) -> Format:
    begin, end = f"{NAMESPACE}<{name}>", f"{NAMESPACE}</{name}>"
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _leaf(schema: Mapping[str, Any]) -> Format:
    return {"type": "json_schema", "json_schema": schema, "style": _STYLE}


def _property_names(schema: Any) -> Iterator[str]:
    """Of all properties anywhere in a schema."""
    if isinstance(schema, list):
        for part in schema:
            yield from _property_names(part)
    elif isinstance(schema, Mapping):
        properties = schema.get("properties")
        if isinstance(properties, Mapping):
            yield from properties
        for part in schema.values():
            yield from _property_names(part)

"""How a text without types is read as a value: the text of an element that holds no elements.

All functions give or take JSON as text, so that a number keeps its digits.
"""

from __future__ import annotations

import json
import re
from typing import Any

from winnow.server.m3_schema import Shape, kind_of

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_SO_FAR = re.compile(
    r"-?(?:0|[1-9][0-9]*)?(?:(?<=[0-9])\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?"
)
_WORDS = {"null": ("null",), "boolean": ("true", "false")}
_LONGEST_LITERAL = 400
"""Characters of a number that is told from a string of digits."""
_DEEPEST_LIST = 16
_EMPTY = {"array": "[]", "object": "{}", "null": "null"}


def escaped(text: str) -> str:
    """A piece of a string's inside, as JSON."""
    return _dumps(text)[1:-1]


def as_json(text: str, shape: Shape, depth: int = 0) -> str:
    """The value that an element's whole text stands for, of the kinds that its shape allows.

    A listed value counts first, then null, true, false and numbers, then strings. White space
    around a value counts only where it may be a string. Text that is no value of the shape stays
    a string: whoever gets the call sees what the model wrote.
    """
    for value in shape.listed:
        if text == (value if isinstance(value, str) else _dumps(value)):
            return _dumps(value)
    kinds = shape.kinds
    if "string" in kinds:
        return text if _is_literal(text, kinds) else _dumps(text)
    stripped = text.strip()
    if not stripped:
        return next((empty for kind, empty in _EMPTY.items() if kind in kinds), '""')
    if "boolean" in kinds and stripped.lower() in _WORDS["boolean"]:
        return stripped.lower()
    if _is_literal(stripped, kinds) or _kind_of_json(stripped) in kinds & {"array", "object"}:
        return stripped
    if "array" in kinds and depth < _DEEPEST_LIST:
        return f"[{as_json(text, shape.item(0), depth + 1)}]"
    return _dumps(text)


def may_be_literal(text: str, kinds: frozenset[str]) -> bool:
    """Whether a text that begins so may still turn out to be no string."""
    if len(text) > _LONGEST_LITERAL:
        return False
    for kind, words in _WORDS.items():
        if kind in kinds and any(word.startswith(text) for word in words):
            return True
    return "number" in kinds and _NUMBER_SO_FAR.fullmatch(text) is not None


def _is_literal(text: str, kinds: frozenset[str]) -> bool:
    """Whether a text is a null, boolean or number that is allowed."""
    if any(kind in kinds and text in words for kind, words in _WORDS.items()):
        return True
    if "number" not in kinds or ("string" in kinds and len(text) > _LONGEST_LITERAL):
        return False
    return _NUMBER.fullmatch(text) is not None


def _kind_of_json(text: str) -> str | None:
    """The kind of a list or object that the model wrote as JSON; None for other text."""
    if text[0] not in "[{":
        return None
    try:
        return kind_of(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

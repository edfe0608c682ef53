"""What grammar an answer has, from what its request asks for. Knows no grammar's compiler.

The result is a structural tag of xgrammar, written as plain data so that nobody who asks for one
needs the library. Calls are always decoded under the schemas of their functions, `strict` or not.
"""

from __future__ import annotations

import json
from typing import Any

from winnow.config import Constraint
from winnow.engine.schemas import Fault, senseless, unserved
from winnow.errors import RequestError
from winnow.server.chat_request import ChatRequest, Function, NamedChoice
from winnow.server.m3_format import (
    BLOCK_BEGIN,
    BLOCK_END,
    INVOKE_BEGIN,
    INVOKE_END,
    THINK_BEGIN,
    THINK_END,
)
from winnow.server.m3_grammar import MAX_ELEMENTS, Format, arguments_format
from winnow.server.m3_schema import Shape
from winnow.server.protocol import FieldError, Generation, ResponseFormat

_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_PLACE_CHARACTERS = 200
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_STRAY_TAGS = [BLOCK_END, INVOKE_BEGIN, INVOKE_END]


def chat_constraint(request: ChatRequest) -> Constraint | None:
    """The grammar of a chat answer; None where it is free.

    Free text with tools may hold calls, and calls are whole; a forced call is all of the answer;
    with tools and a JSON format the answer is calls or JSON. Reasoning comes before, by the
    thinking mode. RequestError for schemas that no grammar can hold.
    """
    functions = request.functions_to_call
    answer = _json_format(request.response_format)
    if functions:
        block = _block(functions, request)
        if request.tool_choice == "required" or isinstance(request.tool_choice, NamedChoice):
            answer = block
        elif answer is not None:
            answer = {"type": "or", "elements": [block, answer]}
        else:
            answer = _text_with(block, request)
    if answer is None:
        return None
    return _constraint([*_reasoning(request.thinking_mode), answer])


def completion_constraint(request: Generation) -> Constraint | None:
    """The grammar of a plain completion; None where it is free."""
    answer = _json_format(request.response_format)
    return None if answer is None else _constraint([answer])


def constraining_field(request: Generation) -> str:
    """The field that an answer has its grammar from, for errors: `tools` where both have one."""
    tools = isinstance(request, ChatRequest) and request.functions_to_call
    return "tools" if tools else "response_format"


def _json_format(wanted: ResponseFormat | None) -> Format | None:
    if wanted is None or wanted.type == "text":
        return None
    schema: Any = {"type": "object"}
    if wanted.json_schema is not None:
        schema = wanted.json_schema.body
        if fault := unserved(schema) or senseless(schema):
            raise _refusal("response_format.json_schema.schema", fault)
    return {"type": "json_schema", "json_schema": schema}


def _text_with(block: Format, request: ChatRequest) -> Format:
    """Text that may hold blocks of calls; after one call alone the answer ends."""
    return {
        "type": "triggered_tags",
        "triggers": [BLOCK_BEGIN],
        "tags": [block],
        "excludes": [THINK_BEGIN, THINK_END, *_STRAY_TAGS],
        "stop_after_first": not _many(request),
    }


def _block(functions: list[Function], request: ChatRequest) -> Format:
    """A block of calls: one where only one may be, else at least one."""
    calls: Format = {
        "type": "tags_with_separator",
        "tags": [_invoke(f, i, MAX_ELEMENTS // len(functions)) for i, f in enumerate(functions)],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": isinstance(request.tool_choice, NamedChoice) or not _many(request),
    }
    return {"type": "tag", "begin": f"{BLOCK_BEGIN}\n", "content": calls, "end": BLOCK_END}


def _many(request: ChatRequest) -> bool:
    return request.parallel_tool_calls is not False


def _invoke(function: Function, place: int, share: int) -> Format:
    schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
    whole = f"tools[{place}].function.parameters"
    if fault := senseless(schema):
        raise _refusal(whole, fault)
    if "object" not in Shape.of(schema).kinds:
        raise FieldError(whole, f"{whole} allows no object: arguments are one, so give an object")
    try:
        arguments = arguments_format(schema, share)
    except RequestError as error:
        raise FieldError(f"tools[{place}].function", f"tool {function.name}: {error}") from None
    begin, end = f'{INVOKE_BEGIN}{function.name}">', f"{INVOKE_END}\n"
    return {"type": "tag", "begin": begin, "content": arguments, "end": end}


def _reasoning(thinking_mode: str) -> list[Format]:
    """What stands before the answer: the prompt of mode enabled has begun the reasoning already."""
    if thinking_mode == "disabled":
        return []
    text = {"type": "any_text", "excludes": [THINK_BEGIN, BLOCK_BEGIN, *_STRAY_TAGS]}
    begin = "" if thinking_mode == "enabled" else THINK_BEGIN
    reasoning: Format = {"type": "tag", "begin": begin, "content": text, "end": THINK_END}
    if thinking_mode == "enabled":
        return [reasoning]
    none: Format = {"type": "const_string", "value": THINK_END}
    return [{"type": "optional", "content": {"type": "or", "elements": [reasoning, none]}}]


def _refusal(whole: str, fault: Fault) -> FieldError:
    """The error for a fault in a schema, by the schema's place in the body."""
    place = f"{whole}{fault.place}"[:_PLACE_CHARACTERS]
    return FieldError(place, f"{place} {fault.says}")


def _constraint(elements: list[Format]) -> Constraint:
    whole = elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}
    tag = {"type": "structural_tag", "format": whole}
    try:
        return Constraint("structural_tag", _COMPACT.encode(tag))
    except (ValueError, RecursionError):
        raise RequestError(
            "a schema holds a number that JSON cannot hold, or nests too deep: simplify it"
        ) from None

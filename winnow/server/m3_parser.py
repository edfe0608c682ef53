"""The family's answer format, read while it comes: reasoning, content and calls of tools.

    <mm:think>reasoning</mm:think>content]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<x>1]<]minimax[>[</x>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

- Reasoning stands at the very beginning or nowhere: a marker later in the answer is text, and what
  the prompt holds does not matter. Reasoning that is not closed goes on to the end.
- Text is given out as the model wrote it, line breaks included, so that a client who sends the
  message back gets the same prompt. Only white space that stands alone before, between or after
  calls belongs to them.
- A call is malformed if its function is not known, or its elements cannot be arguments: all its
  text is content then, from the start of its block if it is the first one there, and so is the
  rest of its block.
- An answer that was cut short leaves its last call open. Anywhere else an open call is malformed.

Knows nothing of tokens, requests or how events are shown.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from winnow.server.chat_request import ChatRequest
from winnow.server.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    CallRejected,
    Content,
    Event,
    Reasoning,
)
from winnow.server.m3_format import (
    BLOCK_BEGIN,
    BLOCK_END,
    INVOKE_BEGIN,
    INVOKE_END,
    NAMESPACE,
    THINK_BEGIN,
    THINK_END,
)
from winnow.server.m3_schema import Shape
from winnow.server.m3_values import Elements, MalformedError, arguments

_SPACE = " \t\r\n"
_INVOKE = re.compile(re.escape(INVOKE_BEGIN) + r'([^"<>]{1,64})">')
_INVOKE_SO_FAR = re.compile(re.escape(INVOKE_BEGIN) + r'[^"<>]{0,64}"?')
# No name that is longer can be waited for: the text of the answer would be held back.
_ELEMENT = re.compile(re.escape(NAMESPACE) + r"<(/?)([^<>]{1,1024})>")
_ELEMENT_SO_FAR = re.compile(re.escape(NAMESPACE) + r"</?[^<>]{0,1024}")


def chat_parser(request: ChatRequest) -> M3Parser:
    """The parser for one answer to a request.

    With `skip_special_tokens` false the answer is content as it stands, tags and all.
    """
    if not request.skip_special_tokens:
        return M3Parser({}, "disabled")
    functions = {f.name: f.parameters or {} for f in request.functions_to_call}
    return M3Parser(functions, request.thinking_mode)


def new_call_id() -> str:
    """An id as OpenAI's look, that nobody guesses."""
    return f"call_{secrets.token_hex(12)}"


class M3Parser:
    """One answer. The events do not depend on how its text is cut into pieces.

    Text that may become a marker is held back; nothing else is, but values that the schema leaves
    open.
    """

    def __init__(
        self,
        functions: Mapping[str, Any],
        thinking_mode: str,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """`functions` are the schemas of arguments by name; without any, calls are content.

        By `thinking_mode` the prompt has opened the reasoning (enabled), closed it (disabled) or
        left both to the model (adaptive).
        """
        self._functions = functions
        self._new_id = new_id
        starts = {"adaptive": self._start, "enabled": self._reason, "disabled": self._content}
        self._read: Callable[[list[Event]], bool] = starts[thinking_mode]
        self._buffer = ""
        self._space = ""
        """White space that is content if other content follows it."""
        self._only_space = True
        """Whether there was no other content since the start, or since the last call."""
        self._raw: list[str] = []
        """All text since the last whole call of the open block."""
        self._num_calls = 0
        self._block_is_empty = True
        self._elements: Elements | None = None
        """The open call's."""

    def push(self, text: str) -> list[Event]:
        """The events that this text makes certain."""
        events: list[Event] = []
        self._buffer += text
        while self._read(events):
            pass
        return events

    def finish(self, *, truncated: bool) -> list[Event]:
        """The last events; call it once. `truncated` if the model had more to say.

        Of a block that is cut before the name of its first call is complete, nothing is left.
        """
        events: list[Event] = []
        rest, self._buffer = self._buffer, ""
        if self._read == self._reason:
            _say(events, Reasoning, rest)
        elif self._read in (self._block, self._call):
            unfinished = "".join(self._raw) + rest
            if not truncated and (self._elements is not None or unfinished.strip()):
                self._reject(events)
                _say(events, Content, rest)
        else:
            self._say_content(events, rest)
            if not self._num_calls:
                _say(events, Content, self._space)
        return events

    def _start(self, events: list[Event]) -> bool:
        """Where the model may open its reasoning, or say that there is none."""
        for marker, then in ((THINK_BEGIN, self._reason), (THINK_END, self._content)):
            if self._buffer.startswith(marker):
                self._take(len(marker))
                self._read = then
                return True
            if marker.startswith(self._buffer):
                return False
        self._read = self._content
        return True

    def _reason(self, events: list[Event]) -> bool:
        text, found = self._until(THINK_END)
        _say(events, Reasoning, text)
        if found:
            self._read = self._content
        return found

    def _content(self, events: list[Event]) -> bool:
        if not self._functions:
            self._say_content(events, self._take(len(self._buffer)))
            return False
        text, found = self._until(BLOCK_BEGIN)
        self._say_content(events, text)
        if found:
            self._raw = [self._space, BLOCK_BEGIN]
            self._space = ""
            self._block_is_empty = True
            self._read = self._block
        return found

    def _block(self, events: list[Event]) -> bool:
        """Between the calls of a block."""
        self._raw.append(self._take(len(self._buffer) - len(self._buffer.lstrip(_SPACE))))
        if self._buffer.startswith(BLOCK_END) and not self._block_is_empty:
            self._take(len(BLOCK_END))
            self._only_space = True
            self._read = self._content
            return True
        invoke = _INVOKE.match(self._buffer)
        if invoke is not None and invoke[1] in self._functions:
            self._raw.append(self._take(invoke.end()))
            self._elements = arguments(Shape.of(self._functions[invoke[1]]))
            events.append(CallBegun(self._num_calls, self._new_id(), invoke[1]))
            self._num_calls += 1
            self._block_is_empty = False
            self._read = self._call
            return True
        if invoke is None and self._may_become_a_tag_of_the_block():
            return False
        self._reject(events)
        return True

    def _may_become_a_tag_of_the_block(self) -> bool:
        begun = self._buffer
        if BLOCK_END.startswith(begun):
            return len(begun) < len(BLOCK_END)
        if len(begun) <= len(INVOKE_BEGIN):
            return INVOKE_BEGIN.startswith(begun)
        return _INVOKE_SO_FAR.fullmatch(begun) is not None

    def _call(self, events: list[Event]) -> bool:
        """Inside a call."""
        assert self._elements is not None
        try:
            return self._call_step(events, self._elements)
        except MalformedError:
            self._reject(events)
            return True

    def _call_step(self, events: list[Event], elements: Elements) -> bool:
        end = self._buffer.find(NAMESPACE)
        if end < 0:
            end = len(self._buffer) - _overlap(self._buffer, NAMESPACE)
        if end:
            text = self._buffer[:end]
            self._say_arguments(events, elements.text(text))
            self._raw.append(self._take(end))
        if not elements.depth and self._buffer.startswith(INVOKE_END):
            self._say_arguments(events, elements.close())
            self._take(len(INVOKE_END))
            events.append(CallEnded(self._num_calls - 1))
            self._elements = None
            self._raw = []
            self._read = self._block
            return True
        tag = _ELEMENT.match(self._buffer)
        if tag is None:
            if not _may_become_an_element(self._buffer):
                raise MalformedError
            return False
        step = elements.end if tag[1] else elements.begin
        self._say_arguments(events, step(tag[2]))
        self._raw.append(self._take(tag.end()))
        return True

    def _say_arguments(self, events: list[Event], piece: str) -> None:
        if piece:
            events.append(CallArguments(self._num_calls - 1, piece))

    def _reject(self, events: list[Event]) -> None:
        """The open call, or what should be one, is text after all."""
        index = None if self._elements is None else self._num_calls - 1
        events.append(CallRejected(index, "".join(self._raw)))
        self._raw, self._elements = [], None
        self._only_space = False
        self._read = self._rest

    def _rest(self, events: list[Event]) -> bool:
        """The rest of a block after a malformed call."""
        text, found = self._until(BLOCK_END)
        _say(events, Content, text + BLOCK_END if found else text)
        if found:
            self._read = self._content
        return found

    def _say_content(self, events: list[Event], text: str) -> None:
        if self._only_space:
            text = self._space + text
            self._space = ""
            if not text.strip(_SPACE):
                self._space = text
                return
            self._only_space = False
        _say(events, Content, text)

    def _until(self, marker: str) -> tuple[str, bool]:
        """Take the text before a marker, and the marker if it is there; hold what may begin it."""
        place = self._buffer.find(marker)
        if place < 0:
            return self._take(len(self._buffer) - _overlap(self._buffer, marker)), False
        text = self._take(place)
        self._take(len(marker))
        return text, True

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def _say(events: list[Event], kind: type[Content] | type[Reasoning], text: str) -> None:
    if text:
        events.append(kind(text))


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that may begin the marker."""
    start = max(0, len(text) - len(marker) + 1)
    while (start := text.find(marker[0], start)) >= 0:
        if marker.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


def _may_become_an_element(text: str) -> bool:
    if len(text) <= len(NAMESPACE):
        return NAMESPACE.startswith(text)
    return _ELEMENT_SO_FAR.fullmatch(text) is not None

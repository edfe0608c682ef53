"""What a parser finds in a model's answer, piece by piece. Plain data.

Pieces of one kind that follow each other belong together; where a text is cut means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; calls are numbered from 0, rejected ones too."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments' JSON."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole: its pieces are one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallRejected:
    """A call that turned out to be malformed: all of its text, which is content now.

    `index` is that of the call if it had begun, else None.
    """

    index: int | None
    text: str


Event: TypeAlias = Reasoning | Content | CallBegun | CallArguments | CallEnded | CallRejected

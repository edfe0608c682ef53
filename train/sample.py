"""A piece of training text and how much each part of it counts. Knows nothing of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

IGNORED = 0
"""Random by nature, such as the values of a list: predicting it teaches nothing."""
TEXT = 1
ANSWER = 2
"""Counts as TEXT does, and the indexer is taught from these tokens first."""
FAINT = 3
"""Counts a tenth: what a user says, which the model reads and seldom writes, and text around facts,
which is real text that it should not learn by heart."""

WEIGHTS = (0.0, 1.0, 1.0, 0.1)
"""Of the loss, by class."""


@dataclass
class Sample:
    """Text in parts, each with its class."""

    parts: list[tuple[str, int]] = field(default_factory=list)

    def add(self, text: str, kind: int = TEXT) -> Sample:
        self.parts.append((text, kind))
        return self

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)

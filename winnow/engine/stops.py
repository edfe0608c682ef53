"""Stop strings in streamed text: what may be shown, and when to end. Knows nothing of tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Ends a text at the stop string that is complete first, however the text is cut into pieces.

    Of several complete at the same character the longest counts, so that nothing of any is shown.
    Text that may yet turn out to begin a stop string is held back, and no other.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops` are not empty strings; `include` shows the stop string itself too."""
        if not all(stops):
            raise ValueError("an empty stop string would end every text")
        self._patterns = [_Pattern(stop) for stop in stops]
        self._firsts = {stop[0] for stop in stops}
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string has ended it.

        Text after a stop string is dropped, in this call and in later ones.
        """
        if self.matched is not None:
            return "", True
        if not self._held and self._firsts.isdisjoint(text):
            return text, False  # most text: no stop string has begun
        seen = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            complete = [p.text for p in self._patterns if p.feed(character)]
            if complete:
                self.matched = max(complete, key=len)
                self._held = ""
                return seen[: end if self._include else end - len(self.matched)], True
        safe = len(seen) - max(pattern.matching for pattern in self._patterns)
        self._held = seen[safe:]
        return seen[:safe], False

    def flush(self) -> str:
        """What is still held, for a text that ends without a stop string; call it last."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Knuth, Morris and Pratt's search, one character at a time, up to the first match."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matching = 0
        """Characters of the longest suffix of the input that begins `text`."""
        self._shorter = [0]
        """For each prefix of `text`, the next shorter prefix that also ends it."""
        for character in text[1:]:
            self._shorter.append(self._advance(self._shorter[-1], character))

    def feed(self, character: str) -> bool:
        """Whether the input now ends in `text`."""
        self.matching = self._advance(self.matching, character)
        return self.matching == len(self.text)

    def _advance(self, matching: int, character: str) -> int:
        while matching and self.text[matching] != character:
            matching = self._shorter[matching - 1]
        return matching + (self.text[matching] == character)

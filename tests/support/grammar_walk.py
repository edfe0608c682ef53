"""Random texts of a grammar, by xgrammar's matcher over a small vocabulary of bytes and tags."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import xgrammar

from winnow.config import Constraint
from winnow.engine.grammar import _grammar


class Walker:
    """Compiles constraints, and writes or accepts texts of them."""

    def __init__(self, tags: Sequence[str]) -> None:
        """`tags` are texts that are one token each, beside all bytes."""
        tokens = [bytes([byte]) for byte in range(256)] + [tag.encode() for tag in tags]
        self._tokens = [*tokens, b"<end>"]
        self._end = len(tokens)
        info = xgrammar.TokenizerInfo(
            self._tokens, xgrammar.VocabType.RAW, stop_token_ids=[self._end]
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def _matcher(self, constraint: Constraint) -> xgrammar.GrammarMatcher:
        return xgrammar.GrammarMatcher(self._compiler.compile_grammar(_grammar(constraint)))

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the whole text is one of the grammar."""
        matcher = self._matcher(constraint)
        return matcher.accept_string(text) and matcher.accept_token(self._end)

    def write(self, constraint: Constraint, seed: int, longest: int = 300) -> str | None:
        """A text of the grammar in printable ASCII; None if it did not end by itself."""
        draw = random.Random(seed)
        matcher = self._matcher(constraint)
        mask = xgrammar.allocate_token_bitmask(1, len(self._tokens))
        text = b""
        for _ in range(longest):
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._tokens)])
            # Mostly tags and the end, or free text would never lead anywhere.
            tags = allowed[allowed >= 256]
            printable = allowed[(allowed >= 32) & (allowed < 127)]
            if not len(printable) or (len(tags) and draw.random() < 0.7):
                token = int(draw.choice(tags if len(tags) else allowed))
            else:
                token = int(draw.choice(printable))
            assert matcher.accept_token(token)
            if token == self._end:
                return text.decode()
            text += self._tokens[token]
        return None

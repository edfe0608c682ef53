"""A source of training text that needs nothing fetched. Only for tests in tests/train."""

from __future__ import annotations

from functools import cached_property

import pytest
from tokenizers import Tokenizer

from train import intents, tokenizer
from train.mixture import Source

TEXT = "It was late. The wind blew over the hills.\n"


class SmallSource(Source):
    """A little text of its own and a small vocabulary."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer.build(iter([TEXT]), 300)

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        kinds = ("austen", "shakespeare", "bible", "docs", "stdlib", "wordnet")
        return {kind: [TEXT * 40] for kind in kinds}


def without_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats define words from a glossary that is fetched with the text."""
    monkeypatch.setattr(intents, "_glossary", lambda: [("violin", "a stringed instrument")])

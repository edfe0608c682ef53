"""Sequences to train on, each made from its number alone: any may be made again, anywhere.

Owns what share of a phase each kind of text has, and packing. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from random import Random

import numpy as np
from tokenizers import Tokenizer
from torch.utils.data import Dataset

from train import chats, corpus, recall, tasks, tokenizer
from train.sample import TEXT, Sample

KINDS = (
    "text",
    "chat",
    "reading",
    "needles",
    "listing",
    "table",
    "copying",
    "variables",
    "arithmetic",
)

_TEXT_SHARES = {"austen": 0.10, "shakespeare": 0.14, "bible": 0.10, "docs": 0.26, "stdlib": 0.12,
                "wordnet": 0.28}  # fmt: skip
"""By size: what is read more often than its size justifies is learnt by heart."""
_TYPICAL_TOKENS = {
    "text": 500, "chat": 130, "reading": 500, "needles": 500, "listing": 350, "table": 250,
    "copying": 120, "variables": 180, "arithmetic": 130,
}  # fmt: skip


@dataclass(frozen=True)
class Mixture:
    """`shares` of the tokens by kind; `long_share` of the sequences are one document that fills
    them: text to recall from, or plain text."""

    seq_len: int
    shares: Mapping[str, float]
    long_share: float = 0.0


class Source:
    """The corpus and the tokenizer, opened on first use: worker processes open their own."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return tokenizer.load()

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        by_kind: dict[str, list[str]] = {kind: [] for kind in _TEXT_SHARES}
        for document in corpus.read():
            if not document.held_out:
                by_kind[document.name.partition("/")[0]].append(document.text)
        return by_kind

    @cached_property
    def characters_per_token(self) -> dict[str, float]:
        """Measured on the middle of some documents of each kind, a twelfth taken off to be safe."""
        ratios = {}
        for kind, texts in self.texts.items():
            some = "\n".join(t[len(t) // 2 :][:4000] for t in texts[:: max(1, len(texts) // 12)])
            ratios[kind] = len(some) / len(self.tokenizer.encode(some).ids) / 1.08
        return ratios

    @cached_property
    def end_id(self) -> int:
        return _token_id(self.tokenizer, tokenizer.END)

    @cached_property
    def start_id(self) -> int:
        return _token_id(self.tokenizer, tokenizer.START)

    def open(self) -> None:
        """Read everything now."""
        _ = self.tokenizer, self.characters_per_token, self._lengths, self.end_id, self.start_id

    def text(self, rng: Random, num_tokens: float) -> str:
        """About as much text of one kind, from the start of a line on, mostly one document."""
        (kind,) = rng.choices(list(_TEXT_SHARES), list(_TEXT_SHARES.values()))
        need = int(num_tokens * self.characters_per_token[kind])
        texts, parts = self.texts[kind], []
        while need > 0:
            # By length, so that each character is as likely as another.
            text = rng.choices(texts, self._lengths[kind])[0]
            start = 0
            if len(text) > need:
                start = text.rfind("\n", 0, rng.randrange(len(text) - need + 1)) + 1
            parts.append(text[start : start + need])
            need -= len(parts[-1])
        return "\n".join(parts)

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        return {kind: [len(t) for t in texts] for kind, texts in self.texts.items()}

    def encode(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        """Token ids uint16 [n] and the class of each, uint8 [n]."""
        encoding = self.tokenizer.encode(sample.text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        ends = np.cumsum([len(text) for text, _ in sample.parts])
        kinds = np.array([kind for _, kind in sample.parts], dtype=np.uint8)
        part = np.searchsorted(ends, starts, side="right").clip(max=len(kinds) - 1)
        return np.array(encoding.ids, dtype=np.uint16), kinds[part]


def _token_id(vocabulary: Tokenizer, token: str) -> int:
    number = vocabulary.token_to_id(token)
    assert number is not None, f"the tokenizer lacks {token}"
    return number


class Sequences(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Sequence number i of a phase: ids uint16 [seq_len + 1], classes uint8 [seq_len + 1]."""

    def __init__(self, mixture: Mixture, seed: int, source: Source | None = None) -> None:
        self.mixture = mixture
        self.seed = seed
        self.source = source or Source()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = Random(f"{self.seed}/{index}")
        length = self.mixture.seq_len + 1
        parts = [*self._documents(rng, length)]
        ids, kinds = (np.concatenate(p)[:length] for p in zip(*parts, strict=True))
        return ids, kinds

    def _documents(self, rng: Random, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        shares = self.mixture.shares
        weights = {kind: share / _TYPICAL_TOKENS[kind] for kind, share in shares.items()}
        if rng.random() < self.mixture.long_share:
            long = {
                k: shares[k]
                for k in ("text", "reading", "needles", "listing", "table")
                if k in shares
            }
            (kind,) = rng.choices(list(long), list(long.values()))
            parts = self._document(rng, kind, length, length)
            yield parts
            left = length - len(parts[0])
        else:
            left = length
        while left > 0:
            (kind,) = rng.choices(list(weights), list(weights.values()))
            parts = self._document(rng, kind, left, _TYPICAL_TOKENS[kind])
            yield parts
            left -= len(parts[0])

    def _document(
        self, rng: Random, kind: str, most: int, typical: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """One document; those that look back fit into `most` tokens if that is 100 or more."""
        tokens = min(most, max(60, int(typical * rng.uniform(0.5, 1.5))))
        ids, kinds = self.source.encode(make(rng, self.source, kind, tokens, most))
        if kind not in ("chat", "reading"):
            if rng.random() < 0.5:
                ids = np.concatenate(([self.source.start_id], ids)).astype(np.uint16)
                kinds = np.concatenate(([TEXT], kinds)).astype(np.uint8)
            ids = np.concatenate((ids, [self.source.end_id])).astype(np.uint16)
            kinds = np.concatenate((kinds, [TEXT])).astype(np.uint8)
        return ids, kinds


def make(rng: Random, source: Source, kind: str, tokens: int, most: int) -> Sample:
    """A sample of about `tokens` tokens. Questions about text need room: up to 200 of `most`."""
    haystack = max(20, min(tokens, most - 200) - 60)
    if kind == "text":
        return Sample().add(source.text(rng, tokens))
    if kind == "reading":
        return chats.reading(rng, source.text(rng, haystack * rng.uniform(0.3, 1.0)))
    if kind == "needles":
        return recall.needles(rng, source.text(rng, haystack * rng.uniform(0.3, 1.0)))
    generators: Mapping[str, Callable[[Random, int], Sample]] = {
        "chat": chats.chat,
        "listing": recall.listing,
        "table": recall.table,
        "copying": tasks.copying,
        "variables": tasks.variables,
        "arithmetic": tasks.arithmetic,
    }
    # These are denser than prose, and ask about half of what they list.
    return generators[kind](rng, int(tokens * 1.6))

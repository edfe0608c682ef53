"""Held-out text as tokens: whole documents that training never saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train import corpus
from train.mixture import Source


@dataclass(frozen=True)
class HeldOut:
    """`ids` uint16 of all documents of one kind, each ended; `num_bytes` of their text."""

    kind: str
    ids: np.ndarray
    num_bytes: int


def held_out(source: Source) -> list[HeldOut]:
    """One entry a kind of text, in the order of their names."""
    ids: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}
    for document in corpus.read():
        if document.held_out:
            kind = document.name.partition("/")[0]
            tokens = source.tokenizer.encode(document.text, add_special_tokens=False).ids
            ids.setdefault(kind, []).append(np.array([*tokens, source.end_id], dtype=np.uint16))
            sizes[kind] = sizes.get(kind, 0) + len(document.text.encode())
    return [HeldOut(kind, np.concatenate(ids[kind]), sizes[kind]) for kind in sorted(ids)]


def windows(parts: list[HeldOut], length: int, count: int) -> np.ndarray:
    """uint16 [count, length + 1], spread evenly over all held-out text, overlapping if need be."""
    everything = np.concatenate([part.ids for part in parts])
    starts = np.linspace(0, len(everything) - length - 1, count).astype(np.int64)
    return np.stack([everything[start : start + length + 1] for start in starts])

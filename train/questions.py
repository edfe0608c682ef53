"""Documents with facts to recall, of an exact length, for evaluation: the answers' tokens and how
far back each stands. Text around the facts is held out."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from train import chats, corpus, recall
from train.mixture import Source
from train.sample import ANSWER, FAINT, IGNORED, Sample

STYLES = ("statement", "question", "chat")
_FACTS = 10


@dataclass(frozen=True)
class Asked:
    """One answer: its tokens are `ids[start:stop]`; `distance` in tokens to the same value in the
    text before; `depth` is where the fact stands, 0 at the start of the text, 1 at its end."""

    start: int
    stop: int
    distance: int
    depth: float


@dataclass(frozen=True)
class Questions:
    """A document of `style` and its questions."""

    style: str
    ids: np.ndarray
    asked: tuple[Asked, ...]


def documents(source: Source, length: int, count: int, seed: int) -> list[Questions]:
    """`count` documents of `length` tokens, styles in turn, ten questions each."""
    texts = [d.text for d in corpus.read() if d.held_out and len(d.text) > 3000]
    return [
        document(Random(f"{seed}/{length}/{i}"), source, texts, length, STYLES[i % 3])
        for i in range(count)
    ]


def document(rng: Random, source: Source, texts: list[str], length: int, style: str) -> Questions:
    """Facts at uniformly random depths of a text; all of them asked for, in random order. Filled
    up to `length` tokens behind the last answer."""
    facts = recall.facts(rng, _FACTS)
    asked = rng.sample(facts, len(facts))
    # A fact takes some 20 tokens, its question up to 50 more in a chat.
    text = recall.hide(rng, facts, _haystack(rng, source, texts, length - 75 * _FACTS))
    sample = _chat(text, asked) if style == "chat" else _plain(text, asked, style)
    ids, classes = source.encode(sample)
    answers = _runs(classes == ANSWER)
    assert len(ids) <= length, f"{len(ids)} tokens do not fit {length}"
    assert len(answers) == _FACTS, f"{len(answers)} answers for {_FACTS} questions"
    placed = []
    whole = source.tokenizer.encode(sample.text, add_special_tokens=False).offsets
    starts = [start for start, _ in whole]
    for fact, (start, stop) in zip(asked, answers, strict=True):
        at = sample.text.index(fact.sentence)
        first = int(np.searchsorted(starts, at + len(fact.statement)))
        placed.append(Asked(start, stop, start - first, at / len(text)))
    filled = np.full(length, source.end_id, dtype=np.uint16)
    filled[: len(ids)] = ids
    return Questions(style, filled, tuple(placed))


def _haystack(rng: Random, source: Source, texts: list[str], tokens: int) -> str:
    """Held-out text of about `tokens` tokens, never more."""
    parts: list[str] = []
    left = tokens
    while left > 8:
        text = rng.choice(texts)
        start = text.rfind("\n", 0, rng.randrange(len(text))) + 1
        piece = text[start : start + 4 * left]
        offsets = source.tokenizer.encode(piece, add_special_tokens=False).offsets
        if len(offsets) > left:
            piece = piece[: offsets[left - 1][0]]
        parts.append(piece)
        left -= min(len(offsets), left) + 1
    return "\n".join(parts)


def _plain(text: str, asked: list[recall.Fact], style: str) -> Sample:
    sample = Sample().add(text.rstrip() + "\n\n", IGNORED)
    for fact in asked:
        head = fact.statement if style == "statement" else f"Question: {fact.question}\nAnswer:"
        sample.add(head, IGNORED).add(f" {fact.value}.", ANSWER).add("\n", IGNORED)
    return sample


def _chat(text: str, asked: list[recall.Fact]) -> Sample:
    messages = []
    for number, fact in enumerate(asked):
        question = f"{text.strip()}\n\n{fact.question}" if number == 0 else fact.question
        messages += [{"role": "user", "content": question},
                     {"role": "assistant", "content": fact.sentence}]  # fmt: skip
    sample = Sample()
    for part, kind in chats.render(messages, chosen=False).parts:
        sentences = [fact for fact in asked if part.startswith(fact.sentence)]
        if kind != ANSWER or not sentences:
            sample.add(part, FAINT)
            continue
        (fact,) = sentences[:1]
        sample.add(fact.statement, FAINT).add(f" {fact.value}.", ANSWER)
        sample.add(part[len(fact.sentence) :], FAINT)
    return sample


def _runs(marks: np.ndarray) -> list[tuple[int, int]]:
    """Start and stop of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marks.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

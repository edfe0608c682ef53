"""Facts hidden in text and asked for later, at any distance: what the indexer must find.

Owns the wording of facts and where they are put. Knows nothing of tokens; lengths are in
characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from train import words
from train.sample import ANSWER, FAINT, IGNORED, Sample


@dataclass(frozen=True)
class Form:
    """`statement` ends in the value; `question` asks for it. Both hold {k}."""

    statement: str
    question: str
    value: Callable[[Random], str]
    key: Callable[[Random], str] = words.name


@dataclass(frozen=True)
class Fact:
    statement: str
    """Without the value and the full stop."""
    question: str
    value: str

    @property
    def sentence(self) -> str:
        return f"{self.statement} {self.value}."


def _code(rng: Random) -> str:
    return words.digits(rng, 4, 6)


FORMS = (
    Form("The code of {k} is", "What is the code of {k}?", lambda r: words.digits(r, 5, 5)),
    Form("The code of {k} is", "What is the code of {k}?", lambda r: words.digits(r, 5, 5)),
    Form("The number of {k} is", "What is the number of {k}?", _code),
    Form("The phone number of {k} is", "What is the phone number of {k}?",
         lambda r: words.digits(r, 6, 7)),
    Form("The password of {k} is", "What is the password of {k}?", words.word),
    Form("The secret word of {k} is", "What is the secret word of {k}?", words.word),
    Form("{k} lives in", "Where does {k} live?", lambda r: r.choice(words.CITIES)),
    Form("The favourite colour of {k} is", "What is the favourite colour of {k}?",
         lambda r: r.choice(words.COLOURS)),
    Form("{k} has a pet", "What pet does {k} have?", lambda r: r.choice(words.ANIMALS)),
    Form("The friend of {k} is", "Who is the friend of {k}?", words.name),
    Form("The owner of {k} is", "Who is the owner of {k}?", words.name, words.thing),
    Form("The price of {k} is", "What is the price of {k}?", lambda r: words.digits(r, 2, 4),
         words.thing),
    Form("The code of {k} is", "What is the code of {k}?", _code, words.thing),
)  # fmt: skip


def facts(rng: Random, count: int, forms: Sequence[Form] = FORMS) -> list[Fact]:
    """`count` facts, no two with the same statement."""
    few = rng.sample(range(len(forms)), min(len(forms), rng.choice((1, 1, 2, 3, 6))))
    made: dict[str, Fact] = {}
    while len(made) < count:
        form = forms[rng.choice(few)]
        key = form.key(rng)
        statement = form.statement.format(k=key)
        statement = statement[0].upper() + statement[1:]
        made[statement] = Fact(statement, form.question.format(k=key), form.value(rng))
    return list(made.values())


def hide(rng: Random, hidden: Sequence[Fact], text: str) -> str:
    """`text` with the facts between its sentences, at uniformly random places, in order."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)] or [len(text)]
    places = sorted(rng.choice(ends) for _ in hidden)
    parts, last = [], 0
    for fact, place in zip(hidden, places, strict=True):
        parts += [text[last:place], fact.sentence, "\n" if text[place - 1] == "\n" else " "]
        last = place
    return "".join((*parts, text[last:]))


_SENTENCE_END = re.compile(r"[.!?] |\n+")


def num_facts(rng: Random, length: int) -> int:
    """Few as often as many, and not so many that text of `length` characters is all facts."""
    most = max(1, min(48, length // 250))
    return max(1, round(float(most ** rng.random())))


def needles(rng: Random, text: str) -> Sample:
    """Facts hidden in real text, then asked for as plain text."""
    hidden = facts(rng, num_facts(rng, len(text)))
    sample = Sample().add(hide(rng, hidden, text).rstrip() + "\n\n", FAINT)
    return _ask(rng, sample, hidden, most=rng.choice((4, 8, 12, 24)))


def listing(rng: Random, length: int) -> Sample:
    """Nothing but facts for `length` characters, then many of them asked for: much signal."""
    listed = facts(rng, max(2, length // 60))
    rng.shuffle(listed)
    sample = Sample()
    for fact in listed:
        sample.add(fact.statement, IGNORED).add(f" {fact.value}.\n", IGNORED)
    return _ask(rng, sample.add("\n"), listed, most=max(4, len(listed) // 2))


_Maker = Callable[[], str]


def table(rng: Random, length: int) -> Sample:
    """Pairs of random keys and values, then some of them again in another order."""
    values: tuple[_Maker, ...] = (lambda: words.digits(rng, 2, 5), lambda: words.word(rng))
    keys: tuple[_Maker, ...] = (lambda: words.digits(rng, 3, 4), lambda: words.name(rng).lower())
    value, key = rng.choice(values), rng.choice(keys)
    mark = rng.choice((" = ", ": ", " -> "))
    pairs = {key(): value() for _ in range(max(3, length // 24))}
    sample = Sample().add("".join(f"{k}{mark}{v}\n" for k, v in pairs.items()), IGNORED).add("\n")
    for asked in rng.sample(list(pairs), max(2, len(pairs) // 2)):
        head = mark.rstrip()
        sample.add(asked + head, IGNORED).add(f" {pairs[asked]}\n", ANSWER)
    return sample


def _ask(rng: Random, sample: Sample, known: Sequence[Fact], most: int) -> Sample:
    asked = rng.sample(known, min(len(known), most))
    # Hardest is the question, whose answer does not begin with the key.
    style = rng.choice(("statement", "question", "question", "answer"))
    for fact in asked:
        if style == "statement":
            sample.add(fact.statement, IGNORED).add(f" {fact.value}.\n", ANSWER)
            continue
        sample.add(f"Question: {fact.question}\nAnswer:", IGNORED)
        if style == "question":
            sample.add(f" {fact.value}.\n", ANSWER)
        else:
            sample.add(f" {fact.sentence}\n", ANSWER)
    return sample

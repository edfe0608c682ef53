"""What the model is taught is true, and made from a number alone."""

from __future__ import annotations

import re
from random import Random

import numpy as np
import pytest
from support.recipe import SmallSource, without_definitions

from train import chats, recall, stories, tasks, tokenizer
from train.mixture import Mixture, Sequences
from train.ngram import KneserNey
from train.plan import DEMO, TINY
from train.questions import _runs
from train.sample import ANSWER, FAINT, IGNORED, Sample


@pytest.mark.parametrize("seed", range(200))
def test_worked_steps_end_in_the_right_digits(seed: int) -> None:
    expression, steps, value = tasks.exercise(Random(seed))
    assert eval(expression) == int(value)
    written = re.findall(r"[wW]rite (\d)", steps)
    assert int("".join(reversed(written))) == int(value)


@pytest.mark.parametrize("seed", range(20))
def test_facts_are_hidden_whole_and_none_is_told_twice(seed: int) -> None:
    rng = Random(seed)
    hidden = recall.facts(rng, 12)
    text = recall.hide(rng, hidden, "It was late. The wind blew. Nobody came. " * 40)
    assert len({fact.statement for fact in hidden}) == 12
    for fact in hidden:
        assert text.count(fact.statement + " ") >= 1
        assert fact.sentence in text


def test_only_what_the_assistant_writes_counts_in_full() -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
    parts = chats.render(messages).parts
    assert [text for text, kind in parts if kind == ANSWER] == ["</mm:think>", "Hi![e~["]
    forced = chats.render(messages, chosen=False).parts
    assert [text for text, kind in forced if kind == IGNORED] == ["</mm:think>"]
    assert all(kind == FAINT for text, kind in parts if "Hello" in text)


def test_chats_read_as_the_server_would_render_them(monkeypatch: pytest.MonkeyPatch) -> None:
    without_definitions(monkeypatch)
    for seed in range(60):
        text = chats.chat(Random(seed), 300).text
        assert text.startswith("]~!b[")
        assert text.endswith("[e~[\n")
        assert text.count("]~b]ai\n") >= 1


def test_stories_leave_no_blank_unfilled() -> None:
    for seed in range(100):
        assert not re.search(r"[{}]", stories.story(Random(seed)))


def test_a_sequence_is_made_from_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    without_definitions(monkeypatch)
    mixture = Mixture(512, DEMO.phases[0].mixture.shares, 0.5)
    sequences = Sequences(mixture, seed=3, source=SmallSource())
    ids, kinds = sequences[7]
    again, _ = Sequences(mixture, seed=3, source=SmallSource())[7]
    assert ids.shape == kinds.shape == (513,)
    assert np.array_equal(ids, again)
    assert not np.array_equal(ids, sequences[8][0])


def test_each_token_has_the_class_of_its_own_text() -> None:
    source = SmallSource()
    ids, kinds = source.encode(Sample().add("wind blew", IGNORED).add(" hills.", ANSWER))
    answer = [int(i) for i, kind in zip(ids, kinds, strict=True) if kind == ANSWER]
    assert source.tokenizer.decode(answer) == " hills."


def test_digits_are_single_tokens_and_tags_survive_decoding() -> None:
    small = SmallSource().tokenizer
    assert len(small.encode("4821").ids) == 4
    tags = "".join(tokenizer.TAGS)
    assert small.decode(small.encode(tags + tokenizer.END).ids) == tags


def test_runs_of_answers_are_found_at_both_ends() -> None:
    assert _runs(np.array([True, True, False, True])) == [(0, 2), (3, 4)]


@pytest.mark.parametrize("plan", [DEMO, TINY])
def test_every_step_of_a_plan_has_a_phase_and_rates_end_at_zero(plan: object) -> None:
    assert isinstance(plan, type(DEMO))
    seen = [plan.phase_at(step)[0] for step in range(plan.steps)]
    assert sorted(set(seen)) == list(range(len(plan.phases)))
    assert seen == sorted(seen)
    assert plan.factor(plan.steps) == 0.0
    assert max(plan.factor(step) for step in range(plan.steps)) == 1.0


def test_the_baseline_gives_probabilities_that_sum_to_one() -> None:
    symbols = np.array([0, 1, 2, 3, 0, 1, 2, 0, 1, 3, 0, 1, 2, 3, 3, 2, 1, 0, 1, 2] * 3)
    model = KneserNey(symbols, bits=2)
    for context in ([0, 1, 2, 3], [3, 3, 3, 3]):
        bits = [model.bits_of(np.array([*context, last])) for last in range(4)]
        assert sum(2.0**-b for b in bits) == pytest.approx(1.0)

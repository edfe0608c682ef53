"""What benchmarks/gpu_tokens.py says of two engines' answers, and that its file keeps them."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LENGTH, TOKENS, DEPTHS = 3, 2, 4
"""Of a prompt, of its answer, and choices of a row: blocks and experts of two layers."""


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module("gpu_notes")


@pytest.fixture
def parting(notes: Any) -> Any:
    return import_module("gpu_parting")


@pytest.fixture
def answer(notes: Any) -> Any:
    best = torch.arange(16.0, 0.0, -1.0).repeat(TOKENS, 1)
    rows = LENGTH + TOKENS - 1
    return notes.Noted(
        length=torch.tensor(LENGTH),
        tokens=torch.tensor([7, 8]),
        rms=torch.full((TOKENS,), 2.0),
        best=best,
        ids=torch.arange(16).repeat(TOKENS, 1),
        columns=best[:, :4].clone(),
        choices=torch.zeros(rows, DEPTHS, 2, dtype=torch.int16),
        leads=torch.full((rows, DEPTHS), 0.25),
    )


def turned(noted: Any, *places: tuple[int, int]) -> Any:
    choices = noted.choices.clone()
    for row, depth in places:
        choices[row, depth] = 1
    return replace(noted, choices=choices)


def test_what_a_layer_chooses_reaches_later_rows_through_the_layers_after_it(
    parting: Any, answer: Any
) -> None:
    early, last = (parting.Pair(answer, turned(answer, (1, depth))) for depth in (1, 3))
    assert [pair.clean(i) for pair in (early, last) for i in range(TOKENS)] == [False] * 2 + [
        True
    ] * 2
    own = parting.Pair(answer, turned(answer, (2, 3)))
    assert [own.clean(i) for i in range(TOKENS)] == [False, True]


def test_only_a_choice_that_follows_from_no_other_must_be_a_near_tie(
    parting: Any, answer: Any
) -> None:
    pair = parting.Pair(answer, turned(answer, (1, 1), (1, 2), (2, 1), (3, 0), (3, 3)))
    assert pair.first() == [(1, 0.25), (1, 0.25), (0, 0.25)]
    got = turned(answer, (1, 1))
    scale = parting.Comparison([answer], [replace(got, leads=got.leads + 0.5)])
    # Past the tie in row 1; what follows from that row's choice does not count.
    assert scale.bounds().experts == pytest.approx(2**0.5 * (0.25 + 0.75))
    assert scale.bounds().blocks == pytest.approx(2**0.5 * 0.5)


def test_a_token_parts_within_what_leads_were_moved_or_fails(
    parting: Any, answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    best = answer.best.clone()
    best[1, 1] += 0.5
    bounds = parting.Comparison([answer], [replace(answer, best=best)]).bounds()
    assert bounds.logits == pytest.approx(2**0.5 * 0.25)
    assert bounds.after == 0.0
    other = replace(answer, tokens=torch.tensor([7, 9]))
    for lead, verdict in ((0.35, "ok"), (0.36, "FAILED")):
        near = answer.best.clone()
        near[1, 1] = near[1, 0] - lead * 2.0
        compared = parting.Comparison([replace(answer, best=near)], [other])
        assert compared.report("these", bounds) is (verdict == "ok")
        listed, said = capsys.readouterr().out.splitlines()[:2]
        assert listed.startswith(f"  prompt 0, 3 tokens: token 1, lead {lead:.4f} (may be 0.3536)")
        assert said.startswith(f"{verdict}: these")
    assert not parting.Comparison([answer], [turned(other, (0, 0))]).report("these", bounds)
    assert "FAILED: these" in capsys.readouterr().out


def test_answers_come_back_from_their_file(notes: Any, answer: Any, tmp_path: Path) -> None:
    longer = replace(
        answer,
        length=torch.tensor(5),
        choices=answer.choices.repeat(2, 1, 1)[:6],
        leads=answer.leads.repeat(2, 1)[:6] * 2,
    )
    notes.save(tmp_path / "a.npz", {"tiny": {"float32": [answer, longer]}}, "here")
    found, where = notes.load(tmp_path / "a.npz")
    assert where == "here"
    back = found["tiny"]["float32"]
    assert len(back) == 2
    for got, want in zip(back, (answer, longer), strict=True):
        for name, value in vars(want).items():
            assert torch.equal(getattr(got, name), value), name


def test_what_is_left_of_prompts_that_begin_together_fits_one_step(notes: Any) -> None:
    tokens = import_module("gpu_tokens")
    for count in tokens.LARGER:
        lengths = [len(one) for one in tokens.prompts_that_begin_together(count, 99, count)]
        assert all(length > 128 and length % 128 for length in lengths)
        assert sum(length % 128 for length in lengths) <= 512
        assert sum(-(-(length + tokens.TOKENS) // 128) for length in lengths) < 1024

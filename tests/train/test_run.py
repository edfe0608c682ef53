"""Training goes on where it stopped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.recipe import SmallSource, without_definitions

from train.optimiser import is_matrix, orthogonal
from train.plan import TINY, Plan
from train.run import Trainer

PLAN = replace(TINY, phases=tuple(replace(phase, steps=1, batch=1) for phase in TINY.phases))


def trainer(plan: Plan = PLAN) -> Trainer:
    made = Trainer(plan, torch.device("cpu"), workers=0)
    made.source = SmallSource()
    made.log_every = 1
    return made


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_definitions(monkeypatch)
    monkeypatch.setattr(Trainer, "_held_out", lambda self, phase: 1.0)
    whole = trainer()
    whole.run(math.inf, tmp_path / "whole.jsonl")
    stopped = trainer()
    for batch in stopped._batches(0, 0):
        stopped.train_step(PLAN.phases[0], *batch)
    stopped.step, stopped.tokens = 1, 256
    stopped.save(tmp_path / "state.pt")
    resumed = trainer()
    resumed.load(tmp_path / "state.pt")
    resumed.run(math.inf, tmp_path / "resumed.jsonl")
    assert resumed.step == whole.step == PLAN.steps
    assert resumed.tokens == whole.tokens
    for (name, ours), theirs in zip(
        resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    lines = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == [phase.name for phase in PLAN.phases]


def test_a_load_that_is_uneven_lowers_the_bias_of_the_busy_and_raises_the_others() -> None:
    made = trainer()
    _, moe = made.model.layers[0], made.model.layers[1].mlp
    made._balance(moe, torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1]))
    assert moe.e_score_correction_bias[0] < 0
    assert (moe.e_score_correction_bias[1:] > 0).all()


@pytest.mark.parametrize("shape", [(2, 16, 48), (2, 48, 16), (1, 32, 32)])
def test_updates_of_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=generator)).float())
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_the_indexer_the_router_and_the_embedding_are_not_orthogonalised() -> None:
    names = {name for name, p in trainer().model.named_parameters() if is_matrix(name, p)}
    assert "layers.1.self_attn.q_proj.weight" in names
    assert "layers.1.mlp.w1.weight" in names
    assert not any("index" in n or ".gate." in n or "embed" in n or "head" in n for n in names)

"""Where a step's tensors lie, and which backend a device gets."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from winnow.config import EngineConfig
from winnow.core.plan import PlannedRows, StepPlan
from winnow.core.request import Request
from winnow.engine import build
from winnow.engine.inputs import StepInputs, step_inputs
from winnow.engine.runner import Runner
from winnow.errors import UnsupportedError

META = torch.device("meta")


def step() -> StepInputs:
    request = Request("a", prompt=(1, 2, 3), max_tokens=1)
    rows = PlannedRows(request_id="a", start=0, count=3, pages=(4,), samples=True)
    return step_inputs(StepPlan(rows=(rows,)), {"a": request})


def test_every_tensor_of_a_step_moves_to_the_device() -> None:
    moved = step().to(META)
    held = [moved.token_ids, moved.logit_rows]
    held += [getattr(moved.batch, field.name) for field in fields(moved.batch)]
    assert len(held) == 7
    assert all(isinstance(tensor, Tensor) and tensor.device == META for tensor in held)
    assert moved.sampled == ("a",)


def test_a_batch_that_is_there_already_is_not_copied() -> None:
    batch = step().batch
    assert batch.to(torch.device("cpu")) is batch


@pytest.mark.parametrize(
    ("count", "samples", "pages", "width"),
    [(1, True, 3, 16), (1, True, 17, 32), (2, True, 3, 3), (1, False, 3, 3)],
)
def test_decode_rows_have_block_tables_as_wide_with_captures_as_without(
    count: int, samples: bool, pages: int, width: int
) -> None:
    request = Request("a", prompt=tuple(range(128 * pages)), max_tokens=1)
    rows = PlannedRows("a", 128 * pages - count, count, tuple(range(1, pages + 1)), samples)
    storage = SimpleNamespace(rows=torch.empty(0))
    runner = Runner(None, storage, None, widths=(16, 32))  # type: ignore[arg-type]
    tables = runner.inputs(StepPlan((rows,)), {"a": request}).batch.block_tables
    assert tables.tolist() == [[*range(1, pages + 1), *[0] * (width - pages)]]


def test_a_gpu_gets_hopper_where_that_serves_and_cuda_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "why_not", lambda backend: None)
    assert build._backend(EngineConfig(device="cuda")) == "hopper"
    monkeypatch.setattr(build, "why_not", lambda backend: f"{backend} needs another GPU")
    assert build._backend(EngineConfig(device="cuda:1")) == "cuda"
    assert build._backend(EngineConfig(device="cuda", backend="hopper")) == "hopper"
    assert build._backend(EngineConfig()) == "cpu"


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cuda"), ("cuda", "reference")])
def test_a_backend_of_another_device_is_refused(device: str, backend: str) -> None:
    with pytest.raises(UnsupportedError, match=f"backend {backend} does not run on device"):
        build._backend(EngineConfig(device=device, backend=backend))


def test_a_gpu_that_is_not_there_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"cuda:5 was asked for, there are 2: use cuda:1"):
        build._prepare(EngineConfig(device="cuda:5"))

"""Hopper's prefill indexer: what it promises on any machine, and against the reference on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from winnow.errors import UnsupportedError
from winnow.ops.case import Case, to_device
from winnow.ops.case_data import Tokens, eighths, filled
from winnow.ops.cuda_build import build, compiler
from winnow.ops.select_blocks import hopper_prefill
from winnow.ops.select_blocks.cases import CASES
from winnow.ops.select_blocks.hopper_prefill import SOURCE, select_blocks, takes
from winnow.ops.select_blocks.reference import select_blocks as reference

needs_nvcc = pytest.mark.skipif(compiler() is None, reason="nvcc is not installed")
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="there is no Hopper GPU",
)

SERVED = [case for case in CASES if "index fp32" not in case.name]
BATCHES = (
    (Tokens(9000, 300), Tokens(0, 1), Tokens(5000, 33), Tokens(130, 130), Tokens(2049, 1)),
    (Tokens(3000, 3000), Tokens(20_000, 9)),
    (Tokens(2500, 64), Tokens(2500, 65), Tokens(2500, 127)),
    (*(Tokens(1 + i % 2, 1) for i in range(200)), Tokens(4000, 2700), *(Tokens(2200, 9),) * 10),
)


def arguments(index: str, *tokens: Tokens, **change: Any) -> dict[str, Any]:
    state = filled(tokens, "fp32", index)
    shape = (state.batch.num_rows, change.get("heads", 4), change.get("dim", 128))
    query = eighths(torch.Generator().manual_seed(5), *shape)
    return {
        "index_q": query.to(change.get("dtype", torch.bfloat16)),
        "index": state.pages.index,
        "batch": state.batch,
        "topk": change.get("topk", 16),
    }


@needs_nvcc
def test_the_kernels_compile() -> None:
    assert build(SOURCE).stat().st_size > 0


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        ("nvfp4", {"topk": 17}, "at most 16, not 17"),
        ("nvfp4", {"dim": 64}, "one of \\(128,\\), not 64"),
        ("nvfp4", {"heads": 3}, "one of \\(1, 2, 4, 8\\), not 3"),
        ("nvfp4", {"dtype": torch.float32}, "not torch\\.float32"),
        ("fp32", {}, "not fp32"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_a_reason(
    index: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        select_blocks(**arguments(index, Tokens(130, 20), **change))


def test_more_blocks_than_are_expanded_at_once_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = arguments("nvfp4", Tokens(1000, 40))
    assert takes(**given)
    monkeypatch.setattr(hopper_prefill, "MAX_IMAGES", 7)
    assert not takes(**given)


def test_a_few_rows_a_request_are_left_to_the_decode_kernels() -> None:
    assert not takes(**arguments("nvfp4", Tokens(1000, 8)))
    assert takes(**arguments("nvfp4", Tokens(1000, 9)))
    assert not takes(**arguments("nvfp4", Tokens(1000, 9), Tokens(1000, 1)))


def test_tensors_on_the_cpu_are_refused_before_a_kernel_reads_their_addresses() -> None:
    with pytest.raises(ValueError, match="on cpu"):
        select_blocks(**arguments("nvfp4", Tokens(130, 20)))


@needs_hopper
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
def test_every_case_selects_what_the_reference_does(case: Case) -> None:
    given = case.inputs()
    given["index_q"] = given["index_q"].bfloat16()
    want = reference(**given)
    assert torch.equal(select_blocks(**to_device(given, "cuda")).cpu(), want)


@needs_hopper
@pytest.mark.parametrize("index", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("tokens", BATCHES)
def test_ragged_batches_select_what_the_general_kernels_do(
    tokens: tuple[Tokens, ...], index: str
) -> None:
    from winnow.ops.select_blocks.cuda import select_blocks as general

    given = to_device(arguments(index, *tokens), "cuda")
    assert torch.equal(select_blocks(**given), general(**given))


@needs_hopper
def test_of_equal_scores_the_lower_blocks_win() -> None:
    given = arguments("nvfp4", Tokens(3000, 40), Tokens(20_000, 9))
    given["index_q"].zero_()
    want = reference(**given)
    assert torch.equal(select_blocks(**to_device(given, "cuda")).cpu(), want)


@needs_hopper
def test_rows_scored_a_part_at_a_time_select_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = to_device(arguments("nvfp4", *BATCHES[0]), "cuda")
    want = select_blocks(**given)
    monkeypatch.setattr(hopper_prefill, "MAX_SCORES", 1 << 16)
    assert torch.equal(select_blocks(**given), want)


@needs_hopper
def test_a_call_in_a_graph_reads_the_lengths_of_its_replay() -> None:
    given = to_device(arguments("nvfp4", Tokens(9000, 64)), "cuda")
    batch = given["batch"]
    want = select_blocks(**given)
    short = {**given, "batch": replace(batch, positions=batch.positions.clone() - 4000)}
    select_blocks(**short)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = select_blocks(**short)
    short["batch"].positions.copy_(batch.positions)
    graph.replay()
    assert torch.equal(ids, want)

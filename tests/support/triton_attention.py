"""What tests/ops/test_triton_attention.py runs in Triton's interpreter: the formats, insertion,
selection and attention on CPU tensors, against their definitions. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch

from winnow.ops.attention_inputs import cases as insertions
from winnow.ops.attention_inputs import cuda as attention_inputs
from winnow.ops.case import Case, judge
from winnow.ops.case_data import Tokens
from winnow.ops.codec import cases as formats
from winnow.ops.codec import cuda as codec_cuda
from winnow.ops.codec import reference as codec_reference
from winnow.ops.dense_attention import cases as dense_cases
from winnow.ops.select_blocks import cases as selections
from winnow.ops.select_blocks import cuda as select_blocks
from winnow.ops.sparse_attention import cases as sparse_cases

FORMATS = (
    "one token bf16", "4 heads fp16", "transposed", "zeros, inf, NaN", "any bits", "huge", "tiny",
    "midpoints", "midpoints of the scale", "global scale", "least global scale", "clipped",
    "greatest global scale", "a scale a row", "scaled", "no rows", "odd", "views of rows",
)  # fmt: skip
RAGGED = (Tokens(1, 1), Tokens(0, 2), Tokens(700, 2), Tokens(129, 0), Tokens(130, 5))
"""Padding, a request without rows, rows on both sides of a block's edge, more than four blocks."""
DECODE = (Tokens(1, 1), Tokens(128, 1), Tokens(0, 1), Tokens(641, 1))


def codec() -> None:
    chosen = (
        case for case in formats.CASES if case.name in FORMATS and "quantise_mx" not in case.op
    )
    _agree("codec", chosen)
    # Half a bf16 step above 1, 1.5 and so on: to even, not away.
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(32, 8)
    parts = codes, torch.ones(32, 1).to(torch.float8_e4m3fn), 1 + 2.0**-8, torch.bfloat16
    values = codec_cuda.dequantise_nvfp4(*parts)
    assert torch.equal(values, codec_reference.dequantise_nvfp4(*parts))


def inserted() -> None:
    few = (Tokens(1, 1), Tokens(0, 2), Tokens(129, 3))
    _agree(
        "attention_inputs",
        (
            insertions._case("bf16", "bf16", "bf16", "bf16", few),
            insertions._case("fp32", "fp32", "fp8", "nvfp4", few),
            insertions._case("fp32", "fp32", "fp32", "fp32", few, fault="full attention"),
            insertions._case("fp32", "fp32", "nvfp4", "nvfp4", few, fault="NaN and huge values"),
        ),
    )
    _counts_what_it_clips()
    _padding_writes_to_the_null_page()
    attention_inputs._MANY_ROWS = 9
    many = (Tokens(0, 1), Tokens(140, 14))
    _agree("attention_inputs", (insertions._case("mxfp8", "bf16", "nvfp4", "fp8", many),))


def _counts_what_it_clips() -> None:
    """In V of a row of huge values, as many as the definition counts, and nothing before reading
    is asked for."""
    case = insertions._case("fp32", "fp32", "nvfp4", "fp8", (Tokens(3, 3),), "NaN and huge values")
    counts = []
    for backend in ("cuda", "reference"):
        inputs = case.inputs()
        _function("attention_inputs", backend, "attention_inputs")(**inputs)
        pages = inputs["pages"]
        held = [paged.clipping for paged in (pages.key, pages.value, pages.index)]
        if backend == "cuda":
            assert [clipping.clipped for clipping in held] == [0, 0, 0]
        counts.append([clipping.settled() for clipping in held])
    assert counts[0] == counts[1]
    assert counts[0][1].clipped > 0


def _padding_writes_to_the_null_page() -> None:
    """Whatever page a padding request's table still names."""
    case = insertions._case("bf16", "bf16", "nvfp4", "nvfp4", (Tokens(0, 2), Tokens(129, 1)))
    inputs = case.inputs()
    taken = int(inputs["batch"].block_tables[1, 0])
    inputs["batch"].block_tables[0] = taken
    pages = inputs["pages"]
    parts = [t for p in (pages.key, pages.value, pages.index) for t in (p.codes, p.scales)]
    before = [part[taken].view(torch.uint8).clone() for part in parts]
    attention_inputs.attention_inputs(**inputs)
    for part, held in zip(parts, before, strict=True):
        assert torch.equal(part[taken].view(torch.uint8), held)


def selected() -> None:
    faults = ("few distinct scores", "+0 and -0", "NaN query", "NaN keys", "infinite keys")
    long = (Tokens(1500, 2), Tokens(700, 1))
    _agree(
        "select_blocks",
        (
            *(selections._case("small", RAGGED, f, "bf16") for f in ("bf16", "fp8", "nvfp4")),
            selections._case("small", DECODE, "fp32", "fp32"),
            selections._case("small", DECODE, "nvfp4", "bf16", topk=1),
            selections._case("more than one program's blocks", (Tokens(5000, 1),), "nvfp4", "bf16"),
            selections._case("no rows", ()),
            *(selections._case("small", long, "nvfp4", "bf16", fault=fault) for fault in faults),
            selections._case("small", RAGGED, "bf16", "bf16", fault="non-contiguous"),
            *(case for case in selections.CASES if "huge page ids" in case.name),
        ),
    )
    _zeros_of_both_signs_tie_and_the_lowest_score_beats_none()
    select_blocks._MIN_ROWS, select_blocks._MAX_SCORES = 3, 1
    _agree("select_blocks", (selections._case("in turns", RAGGED, "nvfp4", "bf16"),))


def _zeros_of_both_signs_tie_and_the_lowest_score_beats_none() -> None:
    """Scores that sums from +0 on do not give, but other units may."""
    scores = torch.tensor([[-0.0, 0.0, -1.0, 7.0], [-torch.inf, -torch.inf, 9.0, 9.0]])
    positions, kv_lens = torch.tensor([3 * 128, 2 * 128]), torch.tensor([400, 300])
    ids = torch.full((2, 1, 4), 99, dtype=torch.int32)
    select_blocks._select[2, 1](
        scores, 4, ids, positions, torch.tensor([0, 1]), kv_lens, 0,
        HEADS=1, TOPK=4, LISTED=4, COLUMNS=4,
    )  # fmt: skip
    assert ids.tolist() == [[[0, 1, 2, 3]], [[0, 1, 2, -1]]]
    two = torch.full((2, 1, 2), 99, dtype=torch.int32)
    select_blocks._select[2, 1](
        scores, 4, two, positions, torch.tensor([0, 1]), kv_lens, 0,
        HEADS=1, TOPK=2, LISTED=2, COLUMNS=4,
    )  # fmt: skip
    assert two.tolist() == [[[0, 3]], [[0, 2]]]


def attended() -> None:
    _agree(
        "sparse_attention",
        (
            sparse_cases._case("small", RAGGED, "nvfp4", "bf16"),
            *(sparse_cases._case("small", DECODE, f, "bf16") for f in ("bf16", "fp8")),
            sparse_cases._case("small", DECODE[:3], "fp32", "fp32"),
            sparse_cases._case("small", DECODE[:2], "fp8", "bf16", topk=1, fault="non-contiguous"),
            sparse_cases._case("no rows", ()),
            sparse_cases._case("small", DECODE[1:2], "bf16", "bf16", fault="NaN in one request"),
            sparse_cases._case("small", DECODE[1:3], "nvfp4", "bf16", fault="huge page ids"),
        ),
    )
    _agree(
        "dense_attention",
        (
            dense_cases._case("small", RAGGED, "nvfp4", "bf16"),
            dense_cases._case("small", DECODE[1:], "fp8", "bf16"),
            dense_cases._case("small", DECODE[:3], "fp32", "fp32"),
            dense_cases._case("small", DECODE[:2], "bf16", "bf16", fault="non-contiguous"),
            dense_cases._case("no rows", ()),
        ),
    )


def _agree(op: str, cases: Iterable[Case]) -> None:
    judged = 0
    for case in cases:
        function, reference = (_function(op, kind, case.op) for kind in ("cuda", "reference"))
        for verdict in judge(case, function, reference):
            assert verdict.passed, verdict
            judged += 1
    assert judged


def _function(op: str, kind: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"winnow.ops.{op}.{kind}"), name)
    return function

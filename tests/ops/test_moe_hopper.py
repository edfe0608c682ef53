"""Hopper's experts for few rows against the reference; without a GPU, what they take, how weights
are prepared, and the build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.case import error, to_device
from winnow.ops.case_data import mlp_weights, moe_weights, small_spec
from winnow.ops.fragments_mxfp8 import PackedMxfp8Weight
from winnow.ops.linear.reference import dequantise
from winnow.ops.moe import hopper
from winnow.ops.moe.reference import moe as reference
from winnow.ops.weights import MoeWeights, PackedNvfp4Weight, tensors
from winnow.spec.model import ModelSpec

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

TOLERANCE = 2.0**-7
"""Relative L2 error of outputs in bf16; the reference rounds weights and hidden values to bf16."""


def spec_of(hidden: int, width: int, shared: int, experts: int = 8, taken: int = 4) -> ModelSpec:
    return replace(
        small_spec(),
        hidden_size=hidden,
        expert_width=width,
        shared_width=shared,
        num_experts=experts,
        experts_per_token=taken,
    )


SMALL = spec_of(256, 128, 128)
ODD = spec_of(1152, 640, 384, 33, 3)
"""Pairs of strips that do not go round evenly among warps, and an odd number of experts."""

WIDE = spec_of(6400, 128, 128)
"""Rows that the router's kernel takes in two pieces."""

LONG = spec_of(3072, 128, 256, 9, 3)
"""Rows so long that a single one's shared expert begins before its experts are chosen, and that
few CTAs are given gate and up's units as they ask."""

TALL = spec_of(256, 3072, 3072)
"""Experts so wide that few CTAs are given down's units as they ask."""


def weights_of(spec: ModelSpec, shared: str = "mxfp8", seed: int = 0) -> MoeWeights:
    generator = torch.Generator().manual_seed(seed)
    weights = moe_weights("nvfp4", generator, spec)
    return replace(
        weights, shared=mlp_weights(shared, generator, spec.shared_width, spec.hidden_size)
    )


def rows_of(spec: ModelSpec, rows: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.hidden_size, generator=generator).bfloat16()


def run(x: Tensor, weights: MoeWeights, spec: ModelSpec) -> Tensor:
    packed = hopper.prepare(to_device(weights, "cuda"), spec)
    return hopper.few_rows(x.to("cuda"), packed, spec).cpu()


@gpu
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 17, 40, 100])
def test_few_rows_equal_the_reference(rows: int) -> None:
    x, weights = rows_of(SMALL, rows), weights_of(SMALL)
    assert error(run(x, weights, SMALL), reference(x, weights, SMALL)) < TOLERANCE


@gpu
@pytest.mark.parametrize("shared", ["mxfp8", "nvfp4"])
def test_ragged_shapes_equal_the_reference(shared: str) -> None:
    x, weights = rows_of(ODD, 21), weights_of(ODD, shared)
    assert error(run(x, weights, ODD), reference(x, weights, ODD)) < TOLERANCE


@gpu
@pytest.mark.parametrize("rows", [3, 17])
def test_wide_rows_equal_the_reference(rows: int) -> None:
    x, weights = rows_of(WIDE, rows), weights_of(WIDE)
    assert error(run(x, weights, WIDE), reference(x, weights, WIDE)) < TOLERANCE


@gpu
@pytest.mark.parametrize("spec", [LONG, TALL], ids=["long", "tall"])
@pytest.mark.parametrize("shared", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("multiprocessors", [1, None])
def test_long_units_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, shared: str, multiprocessors: int | None
) -> None:
    if multiprocessors is not None:
        monkeypatch.setattr(hopper, "_multiprocessors", lambda device: multiprocessors)
    x, weights = rows_of(spec, 8), weights_of(spec, shared)
    want = reference(x, weights, spec)
    assert error(run(x[:1], weights, spec), want[:1]) < TOLERANCE
    assert error(run(x, weights, spec), want) < TOLERANCE


@gpu
@pytest.mark.parametrize("spec", [ODD, LONG, TALL], ids=["odd", "long", "tall"])
@pytest.mark.parametrize("shared", ["mxfp8", "nvfp4"])
def test_who_computes_a_unit_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, spec: ModelSpec, shared: str
) -> None:
    packed = hopper.prepare(to_device(weights_of(spec, shared), "cuda"), spec)
    x = rows_of(spec, 5).to("cuda")
    wanted = [hopper.few_rows(rows, packed, spec) for rows in (x[:1], x)]
    for multiprocessors in (1, 2, 5, 17, 64, 100):
        monkeypatch.setattr(hopper, "_multiprocessors", lambda device, n=multiprocessors: n)
        got = [hopper.few_rows(rows, packed, spec) for rows in (x[:1], x)]
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@gpu
def test_all_rows_may_choose_the_same_experts() -> None:
    bias = torch.tensor([0.0, 9.0, 0.0, 9.0, 9.0, 0.0, 0.0, 9.0])
    x, weights = rows_of(SMALL, 70), replace(weights_of(SMALL), router_bias=bias)
    assert error(run(x, weights, SMALL), reference(x, weights, SMALL)) < TOLERANCE


@gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_leaves_the_others_alone(value: float) -> None:
    x, weights = rows_of(SMALL, 12), weights_of(SMALL)
    clean = run(x, weights, SMALL)
    x[5, 3] = value
    got = run(x, weights, SMALL)
    others = [i for i in range(12) if i != 5]
    assert torch.equal(got[others], clean[others])
    assert not got[5].isfinite().any()


@gpu
@pytest.mark.parametrize("bounds", [(0, 20), (3, 89)])
def test_a_row_does_not_hang_on_the_rows_beside_it(bounds: tuple[int, int]) -> None:
    x, weights = rows_of(ODD, 90), weights_of(ODD)
    some = slice(*bounds)
    assert torch.equal(run(x[some], weights, ODD), run(x, weights, ODD)[some])


@gpu
def test_the_same_rows_give_the_same_bits() -> None:
    x = rows_of(ODD, 33).to("cuda")
    packed = hopper.prepare(to_device(weights_of(ODD), "cuda"), ODD)
    first = hopper.few_rows(x, packed, ODD)
    assert all(torch.equal(hopper.few_rows(x, packed, ODD), first) for _ in range(5))


@gpu
def test_a_graph_serves_any_routing() -> None:
    packed = hopper.prepare(to_device(weights_of(SMALL), "cuda"), SMALL)
    x = rows_of(SMALL, 16).to("cuda")
    hopper.few_rows(x, packed, SMALL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hopper.few_rows(x, packed, SMALL)
    for seed in range(5):
        x.copy_(rows_of(SMALL, 16, seed))
        graph.replay()
        assert torch.equal(out, hopper.few_rows(x, packed, SMALL))


@gpu
@pytest.mark.parametrize("rows", [1, 5])
def test_calls_behind_each_other_give_what_each_gives_alone(rows: int) -> None:
    packed = hopper.prepare(to_device(weights_of(ODD), "cuda"), ODD)
    inputs = [rows_of(ODD, rows, seed).to("cuda") for seed in range(12)]
    wanted = [hopper.few_rows(x, packed, ODD) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [hopper.few_rows(x, packed, ODD) for x in inputs]
    for _ in range(10):
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("shared", "rows", "served"),
    [
        ("mxfp8", hopper.PREFILL_ROWS, ["few"]),
        ("mxfp8", hopper.PREFILL_ROWS + 1, ["many"]),
        ("nvfp4", hopper.PREFILL_ROWS, ["few"]),
        ("nvfp4", hopper.PREFILL_ROWS + 1, ["many, the shared expert too"]),
    ],
)
def test_the_number_of_rows_decides_which_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, shared: str, rows: int, served: list[str]
) -> None:
    called = []

    def few(x: Tensor, *rest: object) -> Tensor:
        called.append("few")
        return x

    def many(x: Tensor, w: object, shared: Callable[[], Tensor] | None, s: object) -> Tensor:
        called.append("many" if shared else "many, the shared expert too")
        return x

    monkeypatch.setattr(hopper, "few_rows", few)
    monkeypatch.setattr(hopper.hopper_prefill, "experts", many)
    monkeypatch.setattr(hopper.hopper_prefill, "takes", lambda *given: True)
    x = rows_of(SMALL, rows)
    out = hopper.moe(lambda x, w, s: x)(x, weights_of(SMALL, shared), SMALL)
    assert torch.equal(out, x)
    assert called == served


@pytest.mark.parametrize("shared", ["mxfp8", "nvfp4"])
def test_only_weights_that_were_packed_before_a_call_may_be_read_early(
    monkeypatch: pytest.MonkeyPatch, shared: str
) -> None:
    given = []

    def few(x: Tensor, weights: MoeWeights, spec: ModelSpec, early: bool) -> Tensor:
        given.append(early)
        return x

    monkeypatch.setattr(hopper, "few_rows", few)
    op, x, stored = hopper.moe(lambda x, w, s: x), rows_of(SMALL, 2), weights_of(SMALL, shared)
    op(x, stored, SMALL)
    packed = hopper.prepare(stored, SMALL)
    op(x, packed, SMALL)
    op(x, replace(packed, shared=weights_of(SMALL, shared).shared), SMALL)
    assert given == [False, True, False]


def test_prepared_weights_stand_for_the_same_values_in_the_same_memory() -> None:
    given, copy = weights_of(SMALL), weights_of(SMALL)
    packed = hopper.prepare(copy, SMALL)
    assert isinstance(packed.gate_up, PackedNvfp4Weight)
    assert isinstance(packed.shared.down, PackedMxfp8Weight)
    assert packed.gate_up.codes.data_ptr() == tensors(copy.gate_up)[0].data_ptr()
    for before, after in (
        (given.gate_up, packed.gate_up),
        (given.down, packed.down),
        (given.shared.gate_up, packed.shared.gate_up),
        (given.shared.down, packed.shared.down),
    ):
        assert torch.equal(dequantise(before, torch.float32), dequantise(after, torch.float32))
        assert sum(t.nbytes for t in tensors(before)) == sum(t.nbytes for t in tensors(after))


def test_preparing_twice_changes_nothing() -> None:
    once = hopper.prepare(weights_of(SMALL), SMALL)
    codes = tensors(once.gate_up)[0].clone()
    assert torch.equal(tensors(hopper.prepare(once, SMALL).gate_up)[0], codes)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (spec_of(192, 128, 128), "nvfp4"),
        (spec_of(256, 64, 128), "nvfp4"),
        (spec_of(256, 128, 128), "mxfp8"),
        (replace(SMALL, swiglu_limit=float("inf")), "nvfp4"),
        (spec_of(256, 128, 128, 300), "nvfp4"),
    ],
    ids=["hidden", "width", "format", "unbounded", "experts"],
)
def test_what_the_kernels_do_not_serve_stays_as_stored(spec: ModelSpec, kind: str) -> None:
    weights = moe_weights(kind, torch.Generator().manual_seed(0), spec)
    assert not hopper.takes(rows_of(spec, 2), weights, spec)
    assert hopper.prepare(weights, spec) is weights
    with pytest.raises(UnsupportedError, match=r"backend \(--backend\) cuda"):
        hopper.moe(lambda x, w, s: x)(rows_of(spec, 2), weights, spec)


def test_rows_in_fp32_are_left_to_the_general_kernels() -> None:
    assert hopper.takes(rows_of(SMALL, 2), weights_of(SMALL), SMALL)
    assert not hopper.takes(rows_of(SMALL, 2).float(), weights_of(SMALL), SMALL)


@pytest.mark.parametrize(("limit", "beta"), [(7.0, 1.0), (7.0, 0.0), (1e4, 1.0), (0.5, -2.0)])
def test_hidden_values_fit_fp16(limit: float, beta: float) -> None:
    scale = hopper.hidden_scale(limit, beta)
    largest = torch.tensor(scale * limit * (limit + abs(beta)))
    assert 2.0**14 <= largest <= 2.0**15
    assert torch.frexp(torch.tensor(scale)).mantissa == 0.5


@nvcc
@pytest.mark.parametrize("source", ["score.cu", "decode.cu"])
def test_the_kernels_build(source: str) -> None:
    assert cuda_build.build(hopper.SOURCES / source).is_file()

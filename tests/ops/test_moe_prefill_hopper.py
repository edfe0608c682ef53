"""What Hopper's kernels give of many rows, against plain arithmetic; without a GPU, limits and the
build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.packed_experts import SPEC, from_slabs, joined, on_gpu, packed, rows_of
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.fragments import unpack
from winnow.ops.linear.reference import dequantise
from winnow.ops.mlp.reference import activation
from winnow.ops.moe import hopper_prefill as prefill
from winnow.ops.moe import reference
from winnow.ops.weights import MoeWeights
from winnow.spec.model import ModelSpec

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

BF16 = 2.0**-8
"""Relative L2 error allowed of outputs that are rounded to bf16 twice."""
FP16 = 2.0**-10
"""The same of hidden values, rounded to fp16 once."""


def plain(
    x: Tensor, weights: MoeWeights, chosen: Tensor, spec: ModelSpec = SPEC
) -> tuple[Tensor, Tensor]:
    """Hidden values [rows, taken, width] and what down gives of them [rows, taken, hidden], fp32 on
    x's device, expert by expert."""
    rows, taken = chosen.shape
    hidden = torch.zeros(rows, taken, spec.expert_width, device=x.device)
    parts = torch.zeros(rows, taken, spec.hidden_size, device=x.device)
    gate_up, down = (dequantise(unpack(w), torch.float32) for w in (weights.gate_up, weights.down))
    for expert in range(spec.num_experts):
        row, choice = (chosen == expert).nonzero(as_tuple=True)
        values = activation(x[row].float() @ gate_up[expert].T, spec)
        hidden[row, choice] = values
        parts[row, choice] = values @ down[expert].T
    return hidden, parts


def whole(x: Tensor, weights: MoeWeights, shared: Tensor, spec: ModelSpec = SPEC) -> Tensor:
    chosen, share = reference.route(x, weights, spec)
    parts = plain(x, weights, chosen, spec)[1]
    return (parts * share.unsqueeze(-1)).sum(1) + shared.float()


def shared_rows(x: Tensor, weights: MoeWeights, spec: ModelSpec = SPEC) -> Tensor:
    """What a packed shared expert gives of the rows, fp32."""
    gate_up, down = (
        dequantise(unpack(w), torch.float32) for w in (weights.shared.gate_up, weights.shared.down)
    )
    return activation(x.float() @ gate_up.T, spec) @ down.T


def error(got: Tensor, want: Tensor) -> float:
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


@gpu
@pytest.mark.parametrize("form", [0, 1, 2, 3])
@pytest.mark.parametrize("rows", [1, 40, 110, 150, 320, 700, 3000])
def test_both_products_are_those_of_the_dequantised_weights(rows: int, form: int) -> None:
    for hidden_size, width in ((512, 384), (384, 256), (128, 128)):
        spec = replace(SPEC, hidden_size=hidden_size, expert_width=width)
        x, weights = rows_of(rows, spec).to("cuda"), on_gpu(packed(spec))
        chosen, share = prefill.route(x, weights, spec)
        found = prefill.order(chosen, share, spec)
        slabs, hidden, parts = (
            prefill._slabs(columns, found.capacity, x.device).fill_(0xFF)
            for columns in (hidden_size, width, hidden_size)
        )
        factors = prefill.gather(x, found, spec, slabs)
        prefill.multiply(slabs, factors, weights, hidden, parts, found, spec, form)
        want_hidden, want_parts = plain(x, weights, chosen, spec)
        places = found.places.long()
        got = from_slabs(hidden, torch.float16)[places].float() / prefill._hidden_factor(spec)
        print(f"hidden {error(got, want_hidden):.2e}")
        assert error(got, want_hidden) <= FP16
        got = from_slabs(parts, torch.bfloat16)[places].float()
        print(f"parts {error(got, want_parts):.2e}")
        assert error(got, want_parts) <= BF16


@gpu
def test_no_shape_changes_a_bit() -> None:
    x, weights = rows_of(320).to("cuda"), on_gpu(packed())
    results = []
    for form in range(4):
        found = prefill.order(*prefill.route(x, weights, SPEC), SPEC)
        slabs, hidden, parts = (
            prefill._slabs(columns, found.capacity, x.device).fill_(0xFF)
            for columns in (SPEC.hidden_size, SPEC.expert_width, SPEC.hidden_size)
        )
        factors = prefill.gather(x, found, SPEC, slabs)
        prefill.multiply(slabs, factors, weights, hidden, parts, found, SPEC, form)
        results.append((hidden, parts))
    for hidden, parts in results[1:]:
        assert torch.equal(hidden, results[0][0])
        assert torch.equal(parts, results[0][1])


@gpu
@pytest.mark.parametrize("rows", [1, 257, 1000, 4100])
def test_output_is_plain_arithmetics_within_bf16(rows: int) -> None:
    x, weights = rows_of(rows).to("cuda"), on_gpu(packed())
    shared = rows_of(rows, seed=6).to("cuda")
    got = prefill.experts(x, weights, lambda: shared, SPEC)
    assert error(got, whole(x, weights, shared)) <= BF16


@gpu
@pytest.mark.parametrize("taken", [1, 3, 8])
def test_a_row_may_take_any_number_of_experts(taken: int) -> None:
    spec = replace(SPEC, experts_per_token=taken)
    x, weights = rows_of(70).to("cuda"), on_gpu(packed(spec))
    shared = rows_of(70, seed=6).to("cuda")
    got = prefill.experts(x, weights, lambda: shared, spec)
    assert error(got, whole(x, weights, shared, spec)) <= BF16


@gpu
def test_all_rows_may_go_to_the_same_experts_and_reach_the_clamp() -> None:
    x, weights = (rows_of(900) * 40).to("cuda"), on_gpu(packed())
    weights.router_bias[torch.tensor([1, 3, 4, 7])] = 9.0
    shared = torch.zeros_like(x)
    got = prefill.experts(x, weights, lambda: shared, SPEC)
    assert error(got, whole(x, weights, shared)) <= BF16


@gpu
def test_nan_stays_in_its_row() -> None:
    x, weights = rows_of(300).to("cuda"), on_gpu(packed())
    shared = torch.zeros_like(x)
    want = prefill.experts(x, weights, lambda: shared, SPEC)
    x[17, 3] = float("nan")
    got = prefill.experts(x, weights, lambda: shared, SPEC)
    assert got[17].isnan().all()
    others = torch.arange(300, device="cuda") != 17
    assert torch.equal(got[others], want[others])


@gpu
def test_a_replayed_graph_serves_another_routing() -> None:
    weights = on_gpu(packed())
    x, shared = rows_of(500).to("cuda"), torch.zeros(500, SPEC.hidden_size, device="cuda")
    shared = shared.bfloat16()
    prefill.experts(x, weights, lambda: shared, SPEC)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill.experts(x, weights, lambda: shared, SPEC)
    for seed in (8, 9):
        x.copy_(rows_of(500, seed=seed) + (3.0 if seed == 9 else 0.0))
        graph.replay()
        assert error(out, whole(x, weights, shared)) <= BF16
        assert torch.equal(out, prefill.experts(x, weights, lambda: shared, SPEC))


@gpu
@pytest.mark.parametrize("rows", [1, 9, 64, 140, 260, 1000, 4100])
@pytest.mark.parametrize("widths", [(512, 384, 256), (384, 256, 256), (256, 128, 640)])
def test_a_packed_shared_expert_is_one_of_the_experts(
    rows: int, widths: tuple[int, int, int]
) -> None:
    hidden_size, expert_width, shared_width = widths
    spec = replace(
        SPEC, hidden_size=hidden_size, expert_width=expert_width, shared_width=shared_width
    )
    x, weights = rows_of(rows, spec).to("cuda"), joined(spec)
    got = prefill.experts(x, weights, None, spec)
    shared = shared_rows(x, weights, spec)
    want = whole(x, weights, shared, spec)
    assert shared.norm() > want.norm() / 8
    assert error(got, want) <= BF16
    assert torch.equal(prefill.experts(x[: rows // 2], weights, None, spec), got[: rows // 2])


@gpu
@pytest.mark.parametrize("form", [0, 1, 2, 3])
def test_no_shape_changes_a_bit_of_a_shared_expert(form: int) -> None:
    x, weights = rows_of(320).to("cuda"), joined()
    results = []
    for which in (form, 1):
        found = prefill.order(*prefill.route(x, weights, SPEC, SPEC.experts_per_token + 1), SPEC)
        slabs, hidden, parts = (
            prefill._slabs(columns, found.capacity, x.device).fill_(0xFF)
            for columns in (SPEC.hidden_size, SPEC.expert_width, SPEC.hidden_size)
        )
        factors = prefill.gather(x, found, SPEC, slabs)
        prefill.multiply(slabs, factors, weights, hidden, parts, found, SPEC, which)
        results.append((hidden, parts))
        shared = from_slabs(parts, torch.bfloat16)[found.places[:, -1].long()]
        assert error(shared, shared_rows(x, weights)) <= BF16
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@gpu
def test_a_shared_expert_among_the_others_reaches_the_clamp() -> None:
    x, weights = (rows_of(200) * 40).to("cuda"), joined()
    got = prefill.experts(x, weights, None, SPEC)
    assert error(got, whole(x, weights, shared_rows(x, weights))) <= BF16


@gpu
def test_a_graph_with_a_shared_expert_serves_another_routing() -> None:
    x, weights = rows_of(140).to("cuda"), joined()
    prefill.experts(x, weights, None, SPEC)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prefill.experts(x, weights, None, SPEC)
    for seed in (8, 9):
        x.copy_(rows_of(140, seed=seed) + (3.0 if seed == 9 else 0.0))
        graph.replay()
        assert error(out, whole(x, weights, shared_rows(x, weights))) <= BF16
        assert torch.equal(out, prefill.experts(x, weights, None, SPEC))


@gpu
def test_calls_behind_each_other_give_what_each_gives_alone() -> None:
    weights = joined()
    inputs = [rows_of(9 + 31 * i, seed=i).to("cuda") for i in range(10)]
    wanted = [prefill.experts(x, weights, None, SPEC) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [prefill.experts(x, weights, None, SPEC) for x in inputs]
    for _ in range(10):
        for out in got:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@gpu
def test_callers_on_two_streams_get_what_each_gets_alone() -> None:
    weights = on_gpu(packed())
    inputs = [rows_of(rows, seed=rows).to("cuda") for rows in (3000, 2900)]
    added = [torch.zeros_like(x) for x in inputs]
    wanted = [
        prefill.experts(x, weights, lambda given=given: given, SPEC)
        for x, given in zip(inputs, added, strict=True)
    ]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(10):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                shared = added[number]
                got[number].append(
                    prefill.experts(inputs[number], weights, lambda given=shared: given, SPEC)
                )
    torch.cuda.synchronize()
    for answers, want in zip(got, wanted, strict=True):
        assert all(torch.equal(one, want) for one in answers)


@gpu
def test_a_shared_expert_that_fails_leaves_the_next_call_alone() -> None:
    x, weights = rows_of(3000).to("cuda"), on_gpu(packed())
    shared = torch.zeros_like(x)
    want = prefill.experts(x, weights, lambda: shared, SPEC)

    def fails() -> Tensor:
        raise RuntimeError("no memory")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="no memory"):
            prefill.experts(x, weights, fails, SPEC)
        assert torch.equal(prefill.experts(x, weights, lambda: shared, SPEC), want)


@gpu
def test_rows_need_not_lie_one_after_another() -> None:
    weights = on_gpu(packed())
    wide = rows_of(300, replace(SPEC, hidden_size=1024)).to("cuda")
    shared = torch.zeros(300, SPEC.hidden_size, device="cuda").bfloat16()
    for x in (wide[:, :512], wide[:, 3:515], wide.T.contiguous().T[:, :512]):
        got = prefill.experts(x, weights, lambda: shared, SPEC)
        assert torch.equal(got, prefill.experts(x.contiguous(), weights, lambda: shared, SPEC))


def test_what_the_kernels_do_not_take_is_refused_in_words() -> None:
    x, weights = rows_of(300), packed()
    assert prefill.takes(x, weights, SPEC)
    assert not prefill.takes(x.float(), weights, SPEC)
    for change, words in (
        ({"hidden_size": 320}, "a hidden size of a multiple of 128"),
        ({"expert_width": 160}, "an expert width of a multiple of 128"),
        ({"num_experts": 512}, "a number of experts of a multiple of 1 up to 256"),
        ({"swiglu_limit": float("inf")}, "must fit fp16"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            prefill.experts(x, weights, lambda: x, replace(SPEC, **change))
    standard = replace(weights, gate_up=unpack(weights.gate_up))
    with pytest.raises(UnsupportedError, match="packed NVFP4"):
        prefill.experts(x, standard, lambda: x, SPEC)
    with pytest.raises(UnsupportedError, match="packed NVFP4"):
        prefill.experts(x, weights, None, SPEC)


def test_the_largest_hidden_value_fits_fp16() -> None:
    for limit, alpha, beta in ((7.0, 1.702, 1.0), (128.0, 1.0, 64.0), (0.1, 0.01, -3.0)):
        spec = replace(SPEC, swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=beta)
        gate = torch.linspace(-2000, limit, 4001).double()
        most = float((gate * torch.sigmoid(alpha * gate)).abs().max()) * (limit + abs(beta))
        assert 2.0**12 <= prefill._hidden_factor(spec) * most < 65504 or alpha < 1
        assert prefill._hidden_factor(spec) * most < 65504


def test_more_rows_an_expert_never_take_a_shape_for_fewer() -> None:
    taken = [prefill._form(rows / 8) for rows in range(1, 8000)]
    assert taken == sorted(taken)
    assert set(taken) == {0, 1, 2, 3}


@nvcc
def test_the_kernel_builds() -> None:
    assert cuda_build.build(prefill.PRODUCTS).is_file()

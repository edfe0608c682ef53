"""Hopper's experts for many rows against plain arithmetic; without a GPU, limits and the build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.case_data import moe_weights, small_spec
from winnow.ops.fragments import pack, unpack
from winnow.ops.linear.reference import dequantise
from winnow.ops.mlp.reference import activation
from winnow.ops.moe import hopper_prefill as prefill
from winnow.ops.moe import reference
from winnow.ops.weights import MlpWeights, MoeWeights, Nvfp4Weight
from winnow.spec.model import ModelSpec

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

SPEC = replace(small_spec(), hidden_size=512, expert_width=384, shared_width=256, num_experts=12)
BF16 = 2.0**-8
"""Relative L2 error allowed of outputs that are rounded to bf16 twice."""
FP16 = 2.0**-10
"""The same of hidden values, rounded to fp16 once."""


def packed(spec: ModelSpec = SPEC, seed: int = 3) -> MoeWeights:
    """Random NVFP4 experts, packed, on the CPU, and a shared one that is not; global scales differ
    from row to row."""
    generator = torch.Generator().manual_seed(seed)
    weights = moe_weights("nvfp4", generator, spec)

    def own(weight: Nvfp4Weight) -> Nvfp4Weight:
        scales = weight.global_scales * (
            0.5 + torch.rand(weight.global_scales.shape, generator=generator)
        )
        return replace(weight, global_scales=scales)

    assert isinstance(weights.gate_up, Nvfp4Weight)
    assert isinstance(weights.down, Nvfp4Weight)
    return replace(weights, gate_up=pack(own(weights.gate_up)), down=pack(own(weights.down)))


def joined(spec: ModelSpec = SPEC) -> MoeWeights:
    """`packed` with a shared expert that is packed, too, on the GPU."""
    weights = on_gpu(packed(spec))
    shared = weights.shared
    assert isinstance(shared.gate_up, Nvfp4Weight)
    assert isinstance(shared.down, Nvfp4Weight)
    return replace(weights, shared=MlpWeights(pack(shared.gate_up), pack(shared.down)))


def on_gpu(weights: MoeWeights) -> MoeWeights:
    def moved(weight: object) -> object:
        return type(weight)(*(t.to("cuda") for t in vars(weight).values()))

    return replace(
        weights,
        router=weights.router.to("cuda"),
        router_bias=weights.router_bias.to("cuda"),
        gate_up=moved(weights.gate_up),
        down=moved(weights.down),
        shared=MlpWeights(moved(weights.shared.gate_up), moved(weights.shared.down)),
    )


def rows_of(count: int, spec: ModelSpec = SPEC, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, spec.hidden_size, generator=generator).bfloat16()


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


def from_slabs(slabs: Tensor, dtype: torch.dtype) -> Tensor:
    """[capacity, columns] of what kernels store by slabs."""
    count, capacity, _ = slabs.shape
    chunks = slabs.view(count, capacity, 8, 16)
    place = torch.arange(capacity, device=slabs.device)
    order = torch.arange(8, device=slabs.device) ^ (place % 8).unsqueeze(1)
    index = order.view(1, capacity, 8, 1).expand(count, capacity, 8, 16)
    straight = chunks.gather(2, index).reshape(count, capacity, 128).view(dtype)
    return straight.permute(1, 0, 2).reshape(capacity, -1)


@gpu
@pytest.mark.parametrize("rows", [1, 33, 300, 1031])
def test_the_router_chooses_what_the_reference_does(rows: int) -> None:
    x, weights = rows_of(rows).to("cuda"), on_gpu(packed())
    weights.router_bias.copy_(weights.router_bias.round(decimals=1))
    chosen, share = prefill.route(x, weights, SPEC)
    logits = (x.double() @ weights.router.double().T).float()
    want, want_share = reference.choose(logits, weights.router_bias, SPEC)
    assert torch.equal(chosen.long(), want)
    assert torch.allclose(share, want_share, rtol=2e-6, atol=0)


@gpu
@pytest.mark.parametrize("experts", [5, 12, 128, 130, 256])
@pytest.mark.parametrize("hidden_size", [128, 384, 1152, 6144])
def test_a_choice_does_not_hang_on_the_number_of_rows(hidden_size: int, experts: int) -> None:
    spec = replace(
        SPEC, hidden_size=hidden_size, num_experts=experts, experts_per_token=min(8, experts)
    )
    generator = torch.Generator().manual_seed(experts)
    weights = replace(
        on_gpu(packed()),
        router=(torch.randn(experts, hidden_size, generator=generator) / hidden_size**0.5).cuda(),
        router_bias=torch.randn(experts, generator=generator).round(decimals=1).cuda(),
    )
    x = rows_of(700, spec).to("cuda")
    chosen, share = prefill.route(x, weights, spec, form=0)
    scores = torch.sigmoid(x.double() @ weights.router.double().T)
    ranks, want = scores + weights.router_bias, chosen.long()
    best = ranks.sort(descending=True).values[:, : spec.experts_per_token]
    # What differs by less may be chosen one for the other.
    assert (ranks.gather(1, want) - best).abs().max() <= 1e-5
    assert all(len(set(row)) == spec.experts_per_token for row in chosen.tolist())
    want_share = scores.gather(1, want) / scores.gather(1, want).sum(1, keepdim=True)
    assert torch.allclose(share.double(), want_share * spec.routed_scale, rtol=1e-5, atol=0)
    for rows in (9, 31, 64, 65, 129, 448, 449, 700):
        for form in (None, 0, 1, 2):
            got, got_share = prefill.route(x[:rows], weights, spec, form=form)
            assert torch.equal(got, chosen[:rows])
            assert torch.equal(got_share, share[:rows])


@gpu
@pytest.mark.parametrize("rows", [9, 600])
def test_a_shared_expert_takes_the_last_slot_of_every_row(rows: int) -> None:
    x, weights = rows_of(rows).to("cuda"), on_gpu(packed())
    chosen, share = prefill.route(x, weights, SPEC)
    both, both_share = prefill.route(x, weights, SPEC, SPEC.experts_per_token + 1)
    assert torch.equal(both[:, :-1], chosen)
    assert torch.equal(both_share[:, :-1], share)
    assert (both[:, -1] == SPEC.num_experts).all()
    assert (both_share[:, -1] == 1.0).all()


@gpu
def test_ties_and_nan_are_chosen_as_by_the_reference() -> None:
    x, weights = rows_of(7).to("cuda"), on_gpu(packed())
    x[3] = float("nan")
    weights = replace(weights, router=torch.zeros_like(weights.router))
    weights.router_bias.zero_()
    weights.router_bias[9] = 0.5
    weights.router_bias[1] = float("nan")
    chosen, share = prefill.route(x, weights, SPEC)
    want, want_share = reference.route(x, weights, SPEC)
    assert torch.equal(chosen.long(), want)
    assert torch.equal(share.isnan(), want_share.isnan())


@gpu
@pytest.mark.parametrize("rows", [1, 33, 300, 5000])
def test_every_pair_has_a_place_of_its_own_among_its_experts(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, SPEC.num_experts, generator=generator).topk(4).indices.int()
    chosen[chosen == 5] = 6 if rows == 300 else 5
    found = prefill.order(chosen.to("cuda"), torch.zeros(rows, 4, device="cuda"), SPEC)
    places, starts, counts = found.places.cpu(), found.starts.cpu(), found.counts.cpu()
    assert not found.next.any()
    end = 0
    for expert in range(SPEC.num_experts):
        own = places.flatten()[(chosen == expert).flatten()]
        start, count = int(starts[expert]), int(counts[expert])
        assert own.tolist() == list(range(start, start + count))
        assert start % 8 == 0
        assert start >= end
        end = start + count
    assert end + 128 <= found.capacity + 7


@gpu
def test_gathered_rows_are_the_rows_times_a_power_of_two() -> None:
    x, weights = rows_of(300).to("cuda"), on_gpu(packed())
    x[0] = 0.0
    x[1] *= 2.0**-100
    x[2] *= 2.0**100
    x[3, 7] = float("nan")
    x[4, 9] = float("inf")
    x[5] = 2.0**-133
    found = prefill.order(*prefill.route(x, weights, SPEC), SPEC)
    slabs = prefill._slabs(SPEC.hidden_size, found.capacity, x.device)
    factors = prefill.gather(x, found, SPEC, slabs)
    values = from_slabs(slabs, torch.float16)[found.places.long()]
    back = values.double() * factors[found.places.long()].double().unsqueeze(-1) * 2.0**-14
    want = x.double().unsqueeze(1).expand_as(back)
    assert torch.equal(back.isnan(), want.isnan())
    assert torch.equal(back.isinf(), want.isinf())
    finite = want.isfinite()
    assert (back[finite] - want[finite]).abs().max() <= 2.0**100 * 8 * 2.0**-31
    assert torch.equal(back[6:][finite[6:]].float(), want[6:][finite[6:]].float())


@gpu
def test_few_rows_are_ordered_by_what_has_just_been_chosen() -> None:
    weights = on_gpu(packed())
    inputs = [rows_of(prefill._PLACED_ROWS, seed=seed).to("cuda") for seed in range(8)]
    alone = [prefill.order(*prefill.route(x, weights, SPEC), SPEC) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    slabs = prefill._slabs(SPEC.hidden_size, alone[0].capacity, inputs[0].device)
    with torch.cuda.graph(graph):
        found = [prefill.place(x, *prefill.route(x, weights, SPEC), SPEC, slabs)[0] for x in inputs]
    for _ in range(5):
        for one in found:
            one.places.fill_(-1)
        graph.replay()
        for one, want in zip(found, alone, strict=True):
            assert torch.equal(one.places, want.places)
            assert torch.equal(one.counts, want.counts)


@gpu
@pytest.mark.parametrize("rows", [1, 9, 300, 512])
@pytest.mark.parametrize("hidden_size", [128, 512, 6144])
def test_one_launch_orders_and_gathers_to_the_same_bits(rows: int, hidden_size: int) -> None:
    spec = replace(SPEC, hidden_size=hidden_size)
    x = rows_of(rows, spec).to("cuda")
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, spec.num_experts, generator=generator).topk(4).indices.int()
    chosen[chosen == 5] = 6
    for extra in (0, 1):
        visited = torch.nn.functional.pad(chosen, (0, extra), value=spec.num_experts).cuda()
        shares = torch.zeros(visited.shape, device="cuda")
        want = prefill.order(visited, shares, spec)
        wanted, slabs = (
            prefill._slabs(hidden_size, want.capacity, x.device).fill_(0xFF) for _ in range(2)
        )
        want_factors = prefill.gather(x, want, spec, wanted)
        got, factors = prefill.place(x, visited, shares, spec, slabs)
        assert torch.equal(got.places, want.places)
        assert torch.equal(got.counts, want.counts)
        assert torch.equal(got.starts, want.starts)
        assert not got.next.any()
        assert torch.equal(slabs, wanted)
        assert torch.equal(factors[got.places.long()], want_factors[got.places.long()])


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
@pytest.mark.parametrize(
    "source", [prefill.PRODUCTS, prefill.ROUTE, prefill.ROWS], ids=lambda p: p.stem
)
def test_the_kernels_build(source: object) -> None:
    assert cuda_build.build(source).is_file()  # type: ignore[arg-type]

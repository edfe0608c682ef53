"""Which experts Hopper's kernels choose for many rows, in which places these lie, and the build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.packed_experts import SPEC, from_slabs, on_gpu, packed, rows_of

from winnow.ops import cuda_build
from winnow.ops.moe import hopper_prefill as prefill
from winnow.ops.moe import reference

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")


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
@pytest.mark.parametrize("most", [65, 700])
def test_a_choice_does_not_hang_on_the_number_of_rows(
    most: int, hidden_size: int, experts: int
) -> None:
    spec = replace(
        SPEC, hidden_size=hidden_size, num_experts=experts, experts_per_token=min(8, experts)
    )
    generator = torch.Generator().manual_seed(experts)
    weights = replace(
        on_gpu(packed()),
        router=(torch.randn(experts, hidden_size, generator=generator) / hidden_size**0.5).cuda(),
        router_bias=torch.randn(experts, generator=generator).round(decimals=1).cuda(),
    )
    x = rows_of(most, spec).to("cuda")
    chosen, share = prefill.route(x, weights, spec, form=0)
    scores = torch.sigmoid(x.double() @ weights.router.double().T)
    ranks, want = scores + weights.router_bias, chosen.long()
    best = ranks.sort(descending=True).values[:, : spec.experts_per_token]
    # What differs by less may be chosen one for the other.
    assert (ranks.gather(1, want) - best).abs().max() <= 1e-5
    assert all(len(set(row)) == spec.experts_per_token for row in chosen.tolist())
    want_share = scores.gather(1, want) / scores.gather(1, want).sum(1, keepdim=True)
    assert torch.allclose(share.double(), want_share * spec.routed_scale, rtol=1e-5, atol=0)
    for rows in (rows for rows in (9, 31, 64, 65, 129, 448, 449, 700) if rows <= most):
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


@nvcc
@pytest.mark.parametrize("source", [prefill.ROUTE, prefill.ROWS], ids=lambda p: p.stem)
def test_the_kernels_build(source: object) -> None:
    assert cuda_build.build(source).is_file()  # type: ignore[arg-type]

"""Hopper's insertion of K, V and index keys: its arithmetic anywhere, its outputs on a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build
from winnow.ops.attention_inputs import hopper
from winnow.ops.attention_inputs.cases import CASES
from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.case import Case, judge, to_device
from winnow.ops.case_data import LAYER, Tokens, filled, small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.linear.cuda import linear
from winnow.ops.norm.reference import norm
from winnow.ops.paged import CacheScales, LayerPages, Paged, encode, layer_pages
from winnow.ops.weights import AttentionWeights, PlainWeight, Weight
from winnow.spec.formats import FORMATS
from winnow.spec.page import RowLayout

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an H100 or H200",
)
nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")

SPEC = replace(small_spec(), num_heads=20, num_kv_heads=5, head_dim=128, rotary_dim=64)
"""Tasks of four heads that are not full, of every kind."""
RAGGED = (Tokens(1, 1), Tokens(0, 2), Tokens(129, 3), Tokens(300, 130), Tokens(128, 128))
FORMAT_PAIRS = tuple(product(("model", "fp8", "nvfp4"), repeat=2))


def both(x: Tensor, first: Weight, second: Weight) -> tuple[Tensor, Tensor]:
    return linear(x, first), linear(x, second)


@nvcc
def test_the_kernel_builds() -> None:
    assert cuda_build.build(hopper.SOURCE).is_file()


def test_what_the_kernel_cannot_take_is_refused_with_numbers() -> None:
    x, spec = torch.zeros(1, 4), small_spec()
    pages = filled((Tokens(5, 1),)).pages
    other = replace(spec, head_dim=32, rotary_dim=32)
    with pytest.raises(UnsupportedError, match=r"not \(32, 128\) and 32"):
        hopper.attention_inputs(linear, both)(x, None, other, None, None, pages)  # type: ignore[arg-type]
    far = replace(pages, key=replace(pages.key, global_scale=2.0**50))
    with pytest.raises(UnsupportedError, match="cache scales from"):
        hopper.attention_inputs(linear, both)(x, None, spec, None, None, far)  # type: ignore[arg-type]
    assert not hopper.takes(x.half(), None, spec, None, None, pages)  # type: ignore[arg-type]


@gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_gives_what_the_reference_gives(case: Case) -> None:
    from winnow.ops.attention_inputs.reference import attention_inputs as reference

    op = hopper.attention_inputs(linear, both)
    for verdict in judge(case, op, reference, "cuda"):
        print(f"{verdict.output}: {verdict.error:.2e} of {verdict.tolerance:.2e}")
        assert verdict.passed, verdict


@gpu
@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("kv", "index"), FORMAT_PAIRS)
def test_what_is_stored_is_the_codec_of_the_heads_bit_for_bit(
    kv: str, index: str, dtype: torch.dtype, parts: int
) -> None:
    scales = CacheScales(key=0.37, value=3.1, index=2.0**-7)
    inputs = projected(kv, index, dtype, scales)
    got = run(inputs, parts)
    want = expected(inputs)
    for name in ("q", "index_q"):
        a, b = got[name].float(), want[name].float()
        step = 2.0**-7 if dtype is torch.bfloat16 else 2.0**-20
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.allclose(a.nan_to_num(), b.nan_to_num(), rtol=step, atol=1e-5), name
    # Value heads are not normed, so their codes must be equal whatever the norms' last bit.
    assert torch.equal(got["value codes"], want["value codes"])
    for name, stored in (("key codes", kv), ("index codes", index)):
        if stored == "model" and dtype is torch.float32:
            a, b = got[name].view(torch.float32), want[name].view(torch.float32)
            assert torch.allclose(a, b, rtol=2.0**-20, atol=1e-5), name
            continue
        differing = (got[name] != want[name]).float().mean()
        print(f"{name}: {differing:.2e} of the bytes differ")
        assert differing <= 0.01
    assert got["counts"] == want["counts"]


@gpu
def test_values_of_every_size_are_stored_as_the_codec_says() -> None:
    for kv, index in (("nvfp4", "nvfp4"), ("fp8", "fp8")):
        for scale in (1.0, 0.037, 2.0**-20, 3e7):
            inputs = projected(kv, index, torch.float32, CacheScales(value=scale))
            generator = torch.Generator().manual_seed(3)
            value = inputs["qkv"][:, (SPEC.num_heads + SPEC.num_kv_heads) * 128 :]
            exponents = torch.randint(-149, 128, (value.shape[0], value.shape[1] // 16, 1))
            spread = torch.randn(value.shape[0], value.shape[1] // 16, 16, generator=generator)
            value.copy_((spread * 2.0 ** exponents.double()).float().flatten(1))
            value[3, :64] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0] * 16)
            value[4, :64] = torch.tensor([-0.0, 1e-45, 464.0, -465.0] * 16) * scale
            got, want = run(inputs, 1), expected(inputs)
            assert torch.equal(got["value codes"], want["value codes"])
            assert got["counts"] == want["counts"]


@gpu
def test_a_graph_counts_what_each_replay_writes() -> None:
    inputs = to_device(projected("nvfp4", "fp8", torch.bfloat16, CacheScales()), "cuda")
    pages: LayerPages = inputs["pages"]
    hopper.insert(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper.insert(**inputs)
    before = pages.key.clipping.settled().written
    for _ in range(3):
        graph.replay()
    rows = inputs["qkv"].shape[0]
    assert pages.key.clipping.settled().written == before + 3 * rows * SPEC.num_kv_heads * 128


def projected(kv: str, index: str, dtype: torch.dtype, scales: CacheScales) -> dict[str, Any]:
    """Arguments of `hopper.insert` with random projections, on the CPU."""
    model = "bf16" if dtype is torch.bfloat16 else "fp32"
    kv, index = (model if f == "model" else f for f in (kv, index))
    state = filled(RAGGED, kv, index, spec=SPEC)
    state.rows.fill_(0xFF)
    layout = RowLayout.of(SPEC, FORMATS[kv], FORMATS[index])
    generator = torch.Generator().manual_seed(1)
    rows, dim = state.batch.num_rows, SPEC.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    unused = PlainWeight(torch.empty(0))
    norms = [random(dim) * 0.2 for _ in range(4)]
    weights = AttentionWeights(unused, norms[0], norms[1], unused, norms[2], norms[3], unused)
    heads = SPEC.num_heads + 2 * SPEC.num_kv_heads
    return {
        "qkv": (random(rows, heads * dim) * 2).to(dtype),
        "index": (random(rows, (SPEC.num_index_heads + 1) * dim) * 2).to(dtype),
        "weights": weights,
        "spec": SPEC,
        "rope": rope_tables(state.batch.positions, SPEC),
        "batch": state.batch,
        "pages": layer_pages(state.rows, layout, LAYER, scales),
    }


def run(inputs: dict[str, Any], parts: int) -> dict[str, Any]:
    moved = to_device(inputs, "cuda")
    poison = torch.full((1 << 22,), float("nan"), device="cuda")
    del poison
    q, index_q = hopper.insert(**moved, parts=parts)
    assert index_q is not None
    torch.cuda.synchronize()
    return {"q": q.cpu(), "index_q": index_q.cpu(), **stored(moved["pages"], inputs)}


def expected(inputs: dict[str, Any]) -> dict[str, Any]:
    """The reference's operations after the projections, into pages of their own."""
    from winnow.ops.attention_inputs.reference import rotate

    spec, dim, pages = inputs["spec"], inputs["spec"].head_dim, inputs["pages"]
    weights, batch, dtype = inputs["weights"], inputs["batch"], inputs["qkv"].dtype

    def heads(values: Tensor, weight: Tensor) -> Tensor:
        return rotate(norm(values.float(), weight, spec.norm_eps), inputs["rope"]).to(dtype)

    split = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    q, k, v = inputs["qkv"].unflatten(-1, (-1, dim)).split(split, dim=1)
    index = inputs["index"].unflatten(-1, (-1, spec.index_dim))
    index_q, index_k = index.split((spec.num_index_heads, 1), dim=1)
    result = {"q": heads(q, weights.q_norm), "index_q": heads(index_q, weights.index_q_norm)}
    kinds = (
        ("key", pages.key, heads(k, weights.k_norm)),
        ("value", pages.value, v),
        ("index", pages.index, heads(index_k, weights.index_k_norm)),
    )
    counts = {}
    real = batch.kv_lens[batch.row_request] > 0
    for name, paged, values in kinds:
        fresh = replace(paged, clipping=type(paged.clipping)())
        codes, scales = encode(codec, fresh, values)
        parts = [codes.view(torch.uint8).flatten(1)]
        parts += [] if scales is None else [scales.view(torch.uint8).flatten(1)]
        result[f"{name} codes"] = torch.cat(parts, 1)[real]
        counts[name] = (fresh.clipping.written, fresh.clipping.clipped)
    return {**result, "counts": counts}


def stored(pages: LayerPages, inputs: dict[str, Any]) -> dict[str, Any]:
    """The bytes of each real row's tokens, codes then scales, and what was counted."""
    batch = inputs["batch"]
    real = batch.kv_lens[batch.row_request] > 0
    slots = [slot[real].cuda() for slot in batch.slots]

    def bytes_of(part: Tensor) -> Tensor:
        data = part if part.dtype.itemsize > 1 else part.view(torch.uint8)
        return data[slots[0], :, slots[1]].contiguous().view(torch.uint8).flatten(1)

    result: dict[str, Any] = {}
    counts = {}
    kinds: tuple[tuple[str, Paged | None], ...] = (
        ("key", pages.key),
        ("value", pages.value),
        ("index", pages.index),
    )
    for name, paged in kinds:
        assert paged is not None
        parts = [bytes_of(paged.codes)]
        parts += [] if paged.scales is None else [bytes_of(paged.scales)]
        result[f"{name} codes"] = torch.cat(parts, 1).cpu()
        settled = paged.clipping.settled()
        counts[name] = (settled.written, settled.clipped)
    return {**result, "counts": counts}

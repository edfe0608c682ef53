"""Kinds of faults that servers of block-sparse models have shipped, each as a promise: number
formats, norms, experts, and layers of different kinds.

What is expected is worked out here, as in test_fault_kinds.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import driving, oracle
from torch import Tensor

from winnow.ops.batch import Batch
from winnow.ops.case import error
from winnow.ops.case_data import small_spec
from winnow.ops.codec import cpu as cpu_codec
from winnow.ops.codec import reference as reference_codec
from winnow.ops.paged import CacheScales, LayerPages, Paged, layer_pages, read, write
from winnow.ops.table import Kernels, kernels
from winnow.ops.weights import MlpWeights, MoeWeights, Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from winnow.spec.formats import FORMATS
from winnow.spec.page import RowLayout

SPEC = small_spec()
KV_HEADS, DIM, INDEX_DIM = 4, 64, 128
LAYER = 2


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


@pytest.fixture(params=[reference_codec, cpu_codec], ids=["reference", "cpu"])
def codec(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 += [-value for value in E2M1]


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = math.ldexp(8 + mantissa, exponent - 10) if exponent else math.ldexp(mantissa, -9)
    return -size if byte & 0x80 else size


E4M3 = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def by_hand(row: Tensor, start: int, dim: int, fmt: str) -> Tensor:
    """fp64 [128, dim] of the codes at byte `start` of a row, and the scales behind them."""
    if fmt == "fp8":
        return E4M3[row[start : start + 128 * dim].long()].view(128, dim)
    codes = row[start : start + 64 * dim].long().view(128, dim // 2)
    first = start + 64 * dim
    scales = E4M3[row[first : first + 8 * dim].long()].view(128, dim // 16)
    nibbles = torch.stack((codes % 16, codes // 16), dim=-1).view(128, dim)
    return torch.tensor(E2M1, dtype=torch.float64)[nibbles] * scales.repeat_interleave(16, 1)


def pages_of(fmt: str, scales: CacheScales) -> LayerPages:
    """Pages of one layer; all that is not written is NaN."""
    layout = RowLayout.of(SPEC, FORMATS[fmt], FORMATS[fmt])
    rows = torch.full((5, layout.row_bytes), 0xFF, dtype=torch.uint8)
    return layer_pages(rows, layout, LAYER, scales)


@pytest.mark.parametrize(
    "scales", [CacheScales(), CacheScales(key=0.01, value=3.7, index=0.5)], ids=["1.0", "scaled"]
)
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_every_value_lies_in_its_page_row_where_and_as_the_formats_page_says(
    codec: ModuleType, fmt: str, scales: CacheScales
) -> None:
    """Groups of 16, tokens, and K, V and index keys differ in size by factors: a scale or a code
    that is read in another's place, or grouped along another axis, is far off."""
    layout = RowLayout.of(SPEC, FORMATS[fmt], FORMATS[fmt])
    rows = torch.full((4, layout.row_bytes), 0xFF, dtype=torch.uint8)
    pages = layer_pages(rows, layout, LAYER, scales)
    assert pages.index is not None
    generator = torch.Generator().manual_seed(1)
    slots = torch.full((128,), 3), torch.arange(128)
    bits = {"fp8": 8, "nvfp4": 4.5}[fmt]
    index_bytes, piece = 2 * int(16 * bits * INDEX_DIM), int(2 * 16 * bits * DIM)

    def start(head: int) -> int:
        return index_bytes + (head * SPEC.num_layers + LAYER) * piece

    def check(paged: Paged, starts: list[int], size: float, scale: float) -> None:
        dim = INDEX_DIM if len(starts) == 1 else DIM
        groups = 4.0 ** (torch.arange(dim) // 16 % 4)
        sizes = size * groups * 2.0 ** (torch.arange(128) % 5 - 2).view(-1, 1, 1)
        unit = torch.randn(128, len(starts), dim, generator=generator).clamp(-3, 3)
        write(codec, paged, unit * sizes, *slots)
        held = torch.stack([by_hand(rows[3], s, dim, fmt) for s in starts], 1) * scale
        share = (held / sizes - unit).norm() / unit.norm()
        assert 0.5 * FORMATS[fmt].tolerance < share < FORMATS[fmt].tolerance
        got = read(codec, paged, torch.tensor([3]), torch.float32)[0]
        torch.testing.assert_close(got.transpose(0, 1).double(), held, rtol=1e-6, atol=0)

    check(pages.key, [start(head) for head in range(KV_HEADS)], 0.25 * scales.key, scales.key)
    values = [start(head) + piece // 2 for head in range(KV_HEADS)]
    check(pages.value, values, 0.5 * scales.value, scales.value)
    check(pages.index, [index_bytes // 2], 0.5 * scales.index, scales.index)


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_attention_reads_k_and_v_each_with_the_scale_that_it_was_written_with(
    ops: Kernels, fmt: str, count: int
) -> None:
    """Scales far apart give what the same values give in a cache that has none."""
    generator = torch.Generator().manual_seed(3)
    length, table = 300, [4, 1, 3]
    slots = torch.tensor(table)[torch.arange(length) // 128], torch.arange(length) % 128
    own = pages_of(fmt, CacheScales(key=0.01, value=37.0))
    plain = pages_of("fp32", CacheScales())
    for part, size in (("key", 0.02), ("value", 80.0)):
        paged, exact = getattr(own, part), getattr(plain, part)
        values = torch.randn(length, KV_HEADS, DIM, generator=generator) * size
        write(reference_codec, paged, values, *slots)
        held = read(reference_codec, paged, torch.tensor(table), torch.float32)
        write(reference_codec, exact, held.transpose(1, 2).flatten(0, 1)[:length], *slots)
    batch = Batch.of([length - count], [count], [table])
    q = torch.randn(count, 2 * KV_HEADS, DIM, generator=generator) * 20
    ids = torch.tensor([0, 2, -1], dtype=torch.int32).expand(count, KV_HEADS, -1).contiguous()
    for attend in (ops.dense_attention, partial(ops.sparse_attention, ids=ids)):
        got, want = (attend(q, batch=batch, pages=pages) for pages in (own, plain))
        assert error(got, want) < 1e-5
        assert 1.0 < float(want.abs().mean()) < 80.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_weights_of_zero_are_identity(ops: Kernels, dtype: torch.dtype) -> None:
    """1 is added to a norm's weight, once."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(24)
    x = torch.stack((signs, -signs, signs * 2.0**-3)).to(dtype)
    got = ops.norm(x, torch.zeros(96), 1e-9)
    torch.testing.assert_close(got, x.sign(), rtol=0, atol=1e-6)


GATES = (24.0, 12.0, 6.0, 3.0, -3.0, -6.0, -12.0, -24.0)
UPS = (24.0, 12.0, 6.0, 1.5, -1.5, -6.0, -12.0, -24.0)
WIDTH = 64
FORMS = ("fp32", "bf16", "mxfp8", "nvfp4")


def exact(data: Tensor, form: str) -> Weight:
    """A weight that holds `data` exactly: one value other than 0 a group, 6 or 12 or 24 ..."""
    match form:
        case "fp32":
            return PlainWeight(data)
        case "bf16":
            return PlainWeight(data.bfloat16())
        case "mxfp8":
            return Mxfp8Weight(*reference_codec.quantise_mxfp8(data))
        case "nvfp4":
            # Not 1.0, so that a global scale that is dropped shows.
            scales = torch.full(data.shape[:-1], 0.25)
            parts = reference_codec.quantise_nvfp4(data, scales.unsqueeze(-1))
            return Nvfp4Weight(*parts, scales)
    raise ValueError(form)


def probe(form: str, size: float) -> tuple[Weight, Weight]:
    """gate_up and down of an MLP that gives channel 8 i + j the value `size` * act(GATES[i],
    UPS[j]) for an input of 1 in channel 0."""
    gate_up = torch.zeros(2 * WIDTH, WIDTH)
    gate_up[:WIDTH, 0] = torch.tensor(GATES).repeat_interleave(8)
    gate_up[WIDTH:, 0] = torch.tensor(UPS).repeat(8)
    return exact(gate_up, form), exact(torch.eye(WIDTH) * size, form)


def activations() -> Tensor:
    def act(gate: float, up: float) -> float:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)

    return torch.tensor([act(gate, up) for gate in GATES for up in UPS])


def probe_spec() -> Any:
    return replace(
        SPEC, hidden_size=WIDTH, dense_width=WIDTH, expert_width=WIDTH, shared_width=WIDTH,
        num_experts=4, experts_per_token=2,
    )  # fmt: skip


def stack(weights: list[Weight]) -> Weight:
    def joined(name: str) -> Tensor:
        parts = [getattr(weight, name) for weight in weights]
        raw = [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]
        return torch.stack(raw).view(parts[0].dtype)

    return type(weights[0])(**{name: joined(name) for name in vars(weights[0])})


def experts(form: str, router: list[float], bias: list[float]) -> MoeWeights:
    """Expert e gives 6 * 2^e times the probe's activations, the shared expert 48 times."""
    each = [probe(form, 6.0 * 2**number) for number in range(4)]
    logits = torch.zeros(4, WIDTH)
    logits[:, 0] = torch.tensor(router)
    return MoeWeights(
        router=logits,
        router_bias=torch.tensor(bias),
        gate_up=stack([gate_up for gate_up, _ in each]),
        down=stack([down for _, down in each]),
        shared=MlpWeights(*probe(form, 48.0)),
    )


def one_hot(rows: int, form: str) -> Tensor:
    """1 in channel 0, in the dtype that goes with weights of `form`."""
    x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16 if form == "bf16" else torch.float32)
    x[:, 0] = 1.0
    return x


def near(got: Tensor, want: Tensor) -> bool:
    """Whether every row is `want` up to roundings of its dtype."""
    bound = 2.0**-7 if got.dtype is torch.bfloat16 else 1e-5
    return bool(((got - want).abs() <= bound * want.abs() + 1e-4).all())


@pytest.mark.parametrize("form", FORMS)
def test_gate_and_up_are_clamped_at_seven_with_every_weight_format(ops: Kernels, form: str) -> None:
    x = one_hot(3, form)
    out = ops.mlp(x, MlpWeights(*probe(form, 6.0)), probe_spec())
    assert near(out, 6.0 * activations())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 20])
def test_the_router_chooses_with_the_bias_weighs_without_it_and_leaves_the_shared_expert_alone(
    ops: Kernels, rows: int, form: str
) -> None:
    weights = experts(form, router=[2.0, 1.0, 0.0, -1.0], bias=[-5.0, 0.0, 0.0, 5.0])
    out = ops.moe(one_hot(rows, form), weights, probe_spec())
    first, last = (1 / (1 + math.exp(-logit)) for logit in (1.0, -1.0))
    routed = (first * 12.0 + last * 48.0) / (first + last)
    assert near(out, (2.0 * routed + 48.0) * activations())


@pytest.mark.parametrize(
    ("router", "bias", "sizes"),
    [
        ([0.0] * 4, [0.0] * 4, (6.0, 12.0)),
        ([0.0] * 4, [0.0, 0.5, 0.0, 0.0], (6.0, 12.0)),
        ([0.0] * 4, [0.0, 0.0, 0.0, 0.5], (6.0, 48.0)),
        ([torch.nan, 0.0, 0.0, 0.0], [0.0] * 4, (12.0, 24.0)),
        ([0.0] * 4, [torch.nan, 0.0, 0.0, 0.0], (12.0, 24.0)),
    ],
)
def test_equal_experts_are_chosen_from_the_lowest_and_nan_is_the_lowest_of_all(
    ops: Kernels, router: list[float], bias: list[float], sizes: tuple[float, float]
) -> None:
    out = ops.moe(one_hot(2, "fp32"), experts("fp32", router, bias), probe_spec())
    assert near(out, (2.0 * sum(sizes) / 2 + 48.0) * activations())


def test_a_bfloat16_model_routes_in_fp32(ops: Kernels) -> None:
    """Router weights that bfloat16 cannot tell apart still choose."""
    weights = experts("bf16", [1.0, 1.0 + 2.0**-12, 1.0, 1.0 + 2.0**-12], [0.0] * 4)
    out = ops.moe(one_hot(3, "bf16"), weights, probe_spec())
    assert near(out, (12.0 + 48.0 + 48.0) * activations())


@pytest.mark.parametrize(
    ("sparse", "routed"),
    [("1111", "0001"), ("0101", "1010")],
    ids=["dense MLPs under sparse attention", "kinds in turn"],
)
def test_a_layers_kind_of_attention_does_not_follow_from_its_kind_of_mlp(
    tmp_path: Path, sparse: str, routed: str
) -> None:
    model = oracle.build(
        64,
        layer_types=["minimax_m3_sparse" if bit == "1" else "full_attention" for bit in sparse],
        mlp_layer_types=["sparse" if bit == "1" else "dense" for bit in routed],
    )
    engine = driving.engine(oracle.save(model, tmp_path), num_pages=12, max_step_tokens=300)
    prompt = driving.prompt_of(900, oracle.VOCAB)
    logits, _ = driving.all_logits(engine, prompt)
    assert (logits - oracle.logits(model, prompt)).abs().max() <= 1e-4

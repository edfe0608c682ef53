"""Kinds of faults that servers of block-sparse models have shipped, each as a promise.

What is expected is worked out here, by hand or in other arithmetic, and shares nothing with the
reference: a fault in the definition shows as well as one in a kernel.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import driving, oracle
from torch import Tensor

from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.batch import Batch
from winnow.ops.case_data import Tokens, filled, small_spec
from winnow.ops.codec import cpu as cpu_codec
from winnow.ops.codec import reference as reference_codec
from winnow.ops.paged import CacheScales, LayerPages, Paged, layer_pages, read, write
from winnow.ops.table import Kernels, kernels
from winnow.ops.weights import (
    AttentionWeights,
    MlpWeights,
    MoeWeights,
    Mxfp8Weight,
    Nvfp4Weight,
    PlainWeight,
    Weight,
)
from winnow.spec.formats import FORMATS
from winnow.spec.page import RowLayout

SPEC = small_spec()
HEADS, KV_HEADS, DIM, INDEX_DIM = 8, 4, 64, 128
LAYER = 2


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


@pytest.fixture(params=[reference_codec, cpu_codec], ids=["reference", "cpu"])
def codec(request: pytest.FixtureRequest) -> ModuleType:
    module: ModuleType = request.param
    return module


@dataclass(frozen=True)
class Stored:
    """One sequence in pages whose order is not logical; all else in the rows is NaN."""

    rows: Tensor
    pages: LayerPages
    table: list[int]

    def batch(self, first: int, count: int) -> Batch:
        return Batch.of([first], [count], [self.table])


def stored(
    *, key: Tensor | None = None, value: Tensor | None = None, index: Tensor | None = None
) -> Stored:
    """Keys and values [tokens, KV_HEADS, DIM], index keys [tokens, INDEX_DIM], in fp32 pages."""
    layout = RowLayout.of(SPEC, FORMATS["fp32"], FORMATS["fp32"])
    given = [part for part in (key, value, index) if part is not None]
    num_tokens = given[0].shape[0]
    num_blocks = -(-num_tokens // 128)
    table = random.Random(num_blocks).sample(range(1, num_blocks + 3), num_blocks)
    rows = torch.full((num_blocks + 3, layout.row_bytes), 0xFF, dtype=torch.uint8)
    pages = layer_pages(rows, layout, LAYER)
    tokens = torch.arange(num_tokens)
    slots = torch.tensor(table)[tokens // 128], tokens % 128
    for paged, values in ((pages.key, key), (pages.value, value)):
        if values is not None:
            write(reference_codec, paged, values, *slots)
    if index is not None:
        assert pages.index is not None
        write(reference_codec, pages.index, index.unsqueeze(1), *slots)
    return Stored(rows, pages, table)


# Selection


def block_keys(scores: list[float], num_tokens: int | None = None) -> Tensor:
    """Index keys of blocks that score as given against a query of 1 in channel 0."""
    keys = torch.zeros(len(scores) * 128, INDEX_DIM)
    keys[:, 0] = -100.0
    keys[77::128, 0] = torch.tensor(scores)
    return keys[:num_tokens]


def selected(
    ops: Kernels, keys: Tensor, topk: int, first: int | None = None, query: Tensor | None = None
) -> list[list[list[int]]]:
    """ids of the rows from token `first` (left out: the last alone), by row and head."""
    state = stored(index=keys)
    first = keys.shape[0] - 1 if first is None else first
    count = keys.shape[0] - first
    if query is None:
        query = torch.zeros(KV_HEADS, INDEX_DIM)
        query[:, 0] = 1.0
    assert state.pages.index is not None
    ids = ops.select_blocks(
        query.expand(count, -1, -1), state.pages.index, state.batch(first, count), topk
    )
    found: list[list[list[int]]] = ids.tolist()
    return found


@pytest.mark.parametrize(
    ("scores", "topk", "expected"),
    [
        ([1.0] * 10, 4, [0, 1, 2, 9]),
        ([0.0] * 10, 4, [0, 1, 2, 9]),
        ([-0.0, 0.0] * 5, 4, [0, 1, 2, 9]),
        ([0.0, -0.0] * 5, 4, [0, 1, 2, 9]),
        ([0.0, 7.0, 3.0, 3.0, 3.0, 7.0, 3.0, 9.0], 5, [1, 2, 3, 5, 7]),
        ([3.0] * 40, 16, [*range(15), 39]),
    ],
)
def test_equal_blocks_are_chosen_from_the_lowest_id_and_zeros_are_equal(
    ops: Kernels, scores: list[float], topk: int, expected: list[int]
) -> None:
    assert selected(ops, block_keys(scores), topk) == [[expected] * KV_HEADS]


@pytest.mark.parametrize("current", [-50.0, 0.5, 99.0])
def test_the_current_block_takes_one_of_sixteen_places_and_never_two(
    ops: Kernels, current: float
) -> None:
    scores = [float(17 * block % 39) for block in range(39)]
    best = sorted(range(39), key=lambda block: -scores[block])[:15]
    found = selected(ops, block_keys([*scores, current]), 16)
    assert found == [[[*sorted(best), 39]] * KV_HEADS]


@pytest.mark.parametrize("last", [0, 1, 76, 77, 78, 127])
def test_a_partial_last_block_is_selected_and_what_lies_behind_it_is_not_looked_at(
    ops: Kernels, last: int
) -> None:
    scores = [1.0, 4.0, 2.0, 5.0, 3.0, 0.0]
    keys = block_keys(scores, num_tokens=5 * 128 + last + 1)
    assert selected(ops, keys, 3) == [[[1, 3, 5]] * KV_HEADS]


def test_each_row_of_a_chunk_ranks_its_own_past_only(ops: Kernels) -> None:
    keys = block_keys([float(block) for block in range(4)])
    found = selected(ops, keys, 2, first=250)
    for row, ids in enumerate(found):
        current = (250 + row) // 128
        assert ids == [[current - 1, current]] * KV_HEADS


def test_each_kv_group_has_a_list_of_its_own(ops: Kernels) -> None:
    keys = torch.zeros(7 * 128, INDEX_DIM)
    query = torch.zeros(KV_HEADS, INDEX_DIM)
    for head, best in enumerate((4, 0, 5, 2)):
        keys[128 * best + 9, head] = 1.0
        query[head, head] = 1.0
    assert selected(ops, keys, 2, query=query) == [[[4, 6], [0, 6], [5, 6], [2, 6]]]


def test_a_nan_key_counts_as_the_lowest_and_hides_no_other_key_of_its_block(
    ops: Kernels,
) -> None:
    keys = block_keys([3.0, 1.0, 9.0, 0.0, 8.0, 2.0, 4.0, 1.0, 0.0])
    keys[2 * 128 + 5] = torch.nan
    keys[4 * 128 : 5 * 128] = torch.nan
    assert selected(ops, keys, 4) == [[[0, 2, 6, 8]] * KV_HEADS]
    assert selected(ops, keys, 8) == [[[0, 1, 2, 3, 5, 6, 7, 8]] * KV_HEADS]
    assert selected(ops, keys, 9) == [[list(range(9))] * KV_HEADS]


def test_an_infinite_block_wins_one_ranked_place_and_not_that_of_the_current_block(
    ops: Kernels,
) -> None:
    keys = block_keys([3.0, 1.0, torch.inf, 0.0, 8.0, torch.inf, 4.0, 1.0, 0.0])
    keys[7 * 128 : 8 * 128, 0] = -torch.inf
    assert selected(ops, keys, 4) == [[[2, 4, 5, 8]] * KV_HEADS]
    assert selected(ops, keys, 8) == [[[0, 1, 2, 3, 4, 5, 6, 8]] * KV_HEADS]
    assert selected(ops, keys, 9) == [[list(range(9))] * KV_HEADS]


# Attention and layout


def counting_values(num_tokens: int) -> Tensor:
    """V of token t and head h is t + 1000 h throughout."""
    tokens = torch.arange(num_tokens).float().view(-1, 1, 1)
    return (tokens + 1000.0 * torch.arange(KV_HEADS).view(1, -1, 1)).expand(-1, -1, DIM)


def every_block(batch: Batch, topk: int) -> Tensor:
    """A selection of all visible blocks."""
    ids = torch.arange(topk).expand(batch.num_rows, topk)
    ids = torch.where(ids <= (batch.positions // 128).unsqueeze(-1), ids, -1)
    return ids.int().unsqueeze(1).expand(-1, KV_HEADS, -1).contiguous()


@pytest.mark.parametrize("chunk", [1, 3, 300])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_sees_its_own_token_and_none_after_it(ops: Kernels, sparse: bool, chunk: int) -> None:
    """Equal keys make attention a mean, of which one token more or less is seen in the result."""
    length = 300
    state = stored(key=torch.zeros(length, KV_HEADS, DIM), value=counting_values(length))
    ends = {1, 127, 128, 129, 256, 257, length} if chunk < length else {length}
    for end in sorted(ends):
        count = min(chunk, end)
        # A sequence that ends here: what lies behind it must not be seen either.
        short = stored(key=torch.zeros(end, KV_HEADS, DIM), value=counting_values(end))
        for own in (state, short):
            batch = own.batch(end - count, count)
            q = torch.ones(count, HEADS, DIM)
            if sparse:
                out = ops.sparse_attention(q, every_block(batch, 4), batch, own.pages)
            else:
                out = ops.dense_attention(q, batch, own.pages)
            groups = 1000.0 * (torch.arange(HEADS) // 2)
            want = batch.positions.unsqueeze(-1) / 2 + groups
            torch.testing.assert_close(out, want.unsqueeze(-1).expand_as(out), rtol=0, atol=0.05)


@pytest.mark.parametrize("count", [2, 60])
def test_the_heads_of_a_group_attend_to_their_own_groups_blocks(ops: Kernels, count: int) -> None:
    length = 5 * 128 + 64
    state = stored(key=torch.zeros(length, KV_HEADS, DIM), value=counting_values(length))
    batch = state.batch(length - count, count)
    chosen = (3, 0, 4, 1)
    ids = torch.tensor([[block, 5, -1] for block in chosen], dtype=torch.int32)
    ids = ids.expand(count, -1, -1).contiguous()
    out = ops.sparse_attention(torch.ones(count, HEADS, DIM), ids, batch, state.pages)
    for row, position in enumerate(batch.positions.tolist()):
        for head in range(HEADS):
            start = 128 * chosen[head // 2]
            seen = [*range(start, start + 128), *range(640, position + 1)]
            want = sum(seen) / len(seen) + 1000.0 * (head // 2)
            assert float(out[row, head, 0]) == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize("sparse", [False, True])
def test_as_many_tokens_as_heads_are_not_taken_for_heads(ops: Kernels, sparse: bool) -> None:
    """Sharp keys make attention a look-up of one token, another for each row and head."""
    keys = torch.zeros(HEADS, KV_HEADS, DIM)
    keys[torch.arange(HEADS), :, torch.arange(HEADS)] = 60.0
    state = stored(key=keys, value=counting_values(HEADS))
    batch = state.batch(0, HEADS)
    wanted = torch.tensor([[(3 * r + h) % (r + 1) for h in range(HEADS)] for r in range(HEADS)])
    q = torch.nn.functional.one_hot(wanted, DIM).float() * 60.0
    if sparse:
        out = ops.sparse_attention(q, every_block(batch, 4), batch, state.pages)
    else:
        out = ops.dense_attention(q, batch, state.pages)
    want = wanted + 1000.0 * (torch.arange(HEADS) // 2)
    torch.testing.assert_close(out, want.unsqueeze(-1).expand_as(out), rtol=1e-6, atol=1e-4)


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


def test_rows_of_padding_write_to_the_null_page_alone_whatever_their_table_says(
    ops: Kernels,
) -> None:
    generator = torch.Generator().manual_seed(2)
    state = filled((Tokens(200, 3),))
    table = state.batch.block_tables[0].tolist()
    stale = replace(Batch.of([197, 128], [3, 2], [table, table]), kv_lens=torch.tensor([200, 0]))
    kinds = [kind for kind in vars(state.pages).values() if kind]

    def tokens() -> list[Tensor]:
        held = (read(reference_codec, kind, torch.tensor(table), torch.float32) for kind in kinds)
        return [kind.transpose(1, 2).flatten(0, 1)[:197] for kind in held]

    before, tokens_before = state.rows.clone(), tokens()
    x = torch.randn(5, SPEC.hidden_size, generator=generator)
    rope = rope_tables(stale.positions, SPEC)
    ops.attention_inputs(x, attention_weights(generator), SPEC, rope, stale, state.pages)
    changed = (state.rows != before).any(-1).nonzero().flatten().tolist()
    assert changed == sorted({0, table[1]})
    for was, now in zip(tokens_before, tokens(), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("fmt", ["fp32", "fp8", "nvfp4"])
def test_a_row_copied_to_another_page_is_that_page_for_every_op(ops: Kernels, fmt: str) -> None:
    """What offloading does; the block that the query looks for lies beyond 2,048 tokens."""
    generator = torch.Generator().manual_seed(4)
    state = filled((Tokens(2900, 1),), fmt, fmt, seed=5)
    assert state.pages.index is not None
    layout = RowLayout.of(SPEC, FORMATS[fmt], FORMATS[fmt])
    q = torch.randn(1, HEADS, DIM, generator=generator)
    pages = state.batch.block_tables[0]
    needle = read(reference_codec, state.pages.index, pages[5], torch.float32)[0, 31]
    index_q = needle.expand(1, KV_HEADS, -1).contiguous()

    moved = torch.full((2 * len(pages) + 1, layout.row_bytes), 0xFF, dtype=torch.uint8)
    table = 2 * torch.randperm(len(pages), generator=generator) + 2
    moved[table] = state.rows[pages]
    copies = replace(state.batch, block_tables=table.unsqueeze(0))
    results = []
    for rows, batch in ((state.rows, state.batch), (moved, copies)):
        own = layer_pages(rows, layout, 1)
        assert own.index is not None
        ids = ops.select_blocks(index_q, own.index, batch, 4)
        assert (ids == 5).any(-1).all()
        sparse = ops.sparse_attention(q, ids, batch, own)
        results.append((ids, sparse, ops.dense_attention(q, batch, own)))
    for before, after in zip(*results, strict=True):
        assert torch.equal(before, after)


# Projections, norms and rotation


def attention_weights(generator: torch.Generator) -> AttentionWeights:
    def matrix(rows: int) -> PlainWeight:
        data = torch.randn(rows, SPEC.hidden_size, generator=generator)
        return PlainWeight(data * SPEC.hidden_size**-0.5)

    norms = [torch.randn(n, generator=generator) * 0.3 for n in (DIM, DIM, INDEX_DIM, INDEX_DIM)]
    return AttentionWeights(
        qkv=matrix((HEADS + 2 * KV_HEADS) * DIM),
        q_norm=norms[0],
        k_norm=norms[1],
        index=matrix((KV_HEADS + 1) * INDEX_DIM),
        index_q_norm=norms[2],
        index_k_norm=norms[3],
        out=matrix(HEADS * DIM),
    )


def turned(values: Tensor, norm_weight: Tensor | None, positions: Tensor) -> Tensor:
    """fp64 [rows, heads, dim]: normed, then channels i and i + 16 of the first 32 as one complex
    number, turned by position * theta^(-2i / 32)."""
    assert norm_weight is not None
    x = values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    x = x * (1 + norm_weight.double())
    angles = positions.double().view(-1, 1, 1) * 5e6 ** (-2 * torch.arange(16).double() / 32)
    pairs = torch.complex(x[..., :16], x[..., 16:32]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag, x[..., 32:]), dim=-1)


@pytest.mark.parametrize("count", [1, KV_HEADS, HEADS, 130])
def test_attention_and_indexer_rotate_by_one_convention_and_v_is_left_as_it_is(
    ops: Kernels, count: int
) -> None:
    generator = torch.Generator().manual_seed(6)
    weights = attention_weights(generator)
    x = torch.randn(count, SPEC.hidden_size, generator=generator)
    state = filled((Tokens(1000 + count, count),))
    positions = state.batch.positions
    rope = rope_tables(positions, SPEC)
    q, index_q = ops.attention_inputs(x, weights, SPEC, rope, state.batch, state.pages)

    def project(weight: Weight | None, dim: int) -> Tensor:
        assert isinstance(weight, PlainWeight)
        return (x.double() @ weight.data.double().T).unflatten(-1, (-1, dim))

    def held(paged: Paged | None) -> Tensor:
        assert paged is not None
        pages = state.batch.block_tables[0]
        tokens = read(reference_codec, paged, pages, torch.float32).transpose(1, 2).flatten(0, 1)
        return tokens[positions].double()

    qkv, index = project(weights.qkv, DIM), project(weights.index, INDEX_DIM)
    wanted = {
        "q": (q, turned(qkv[:, :HEADS], weights.q_norm, positions)),
        "k": (held(state.pages.key), turned(qkv[:, HEADS:-KV_HEADS], weights.k_norm, positions)),
        "v": (held(state.pages.value), qkv[:, -KV_HEADS:]),
        "index_q": (index_q, turned(index[:, :-1], weights.index_q_norm, positions)),
        "index_k": (
            held(state.pages.index),
            turned(index[:, -1:], weights.index_k_norm, positions),
        ),
    }
    for name, (got, want) in wanted.items():
        assert got is not None
        assert (got - want).norm() < 1e-4 * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_weights_of_zero_are_identity(ops: Kernels, dtype: torch.dtype) -> None:
    """1 is added to a norm's weight once: not by the loader too, and not twice by the op."""
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(24)
    x = torch.stack((signs, -signs, signs * 2.0**-3)).to(dtype)
    got = ops.norm(x, torch.zeros(96), 1e-9)
    torch.testing.assert_close(got, x.sign(), rtol=0, atol=1e-6)


# Experts and their activation

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


# Whole models


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

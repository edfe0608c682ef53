"""Kinds of faults that servers of block-sparse models have shipped, each as a promise: selection,
what a row sees, and pages.

What is expected is worked out here, by hand or in other arithmetic, and shares nothing with the
reference: a fault in the definition shows as well as one in a kernel.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from winnow.ops.attention_inputs.reference import rope_tables
from winnow.ops.batch import Batch
from winnow.ops.case_data import Tokens, filled, small_spec
from winnow.ops.codec import reference as codec
from winnow.ops.paged import LayerPages, Paged, layer_pages, read, write
from winnow.ops.table import Kernels, kernels
from winnow.ops.weights import AttentionWeights, PlainWeight, Weight
from winnow.spec.formats import FORMATS
from winnow.spec.page import RowLayout

SPEC = small_spec()
HEADS, KV_HEADS, DIM, INDEX_DIM = 8, 4, 64, 128
LAYER = 2


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Kernels:
    return kernels(request.param)


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
            write(codec, paged, values, *slots)
    if index is not None:
        assert pages.index is not None
        write(codec, pages.index, index.unsqueeze(1), *slots)
    return Stored(rows, pages, table)


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
        product: Tensor = x.double() @ weight.data.double().T
        return product.unflatten(-1, (-1, dim))

    def held(paged: Paged | None) -> Tensor:
        assert paged is not None
        pages = state.batch.block_tables[0]
        tokens = read(codec, paged, pages, torch.float32).transpose(1, 2).flatten(0, 1)
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


def test_rows_of_padding_write_to_the_null_page_alone_whatever_their_table_says(
    ops: Kernels,
) -> None:
    generator = torch.Generator().manual_seed(2)
    state = filled((Tokens(200, 3),))
    table = state.batch.block_tables[0].tolist()
    stale = replace(Batch.of([197, 128], [3, 2], [table, table]), kv_lens=torch.tensor([200, 0]))
    kinds = [kind for kind in vars(state.pages).values() if kind]

    def tokens() -> list[Tensor]:
        held = (read(codec, kind, torch.tensor(table), torch.float32) for kind in kinds)
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
def test_a_page_beyond_two_gibibytes_is_written_like_any_other(ops: Kernels, fmt: str) -> None:
    layout = RowLayout.of(SPEC, FORMATS[fmt], FORMATS[fmt])
    written = []
    for first_page in (1, (1 << 31) // layout.row_bytes + 3):
        generator = torch.Generator().manual_seed(8)
        state = filled((Tokens(5, 3),), fmt, fmt, first_page=first_page)
        weights = attention_weights(generator)
        x = torch.randn(3, SPEC.hidden_size, generator=generator)
        rope = rope_tables(state.batch.positions, SPEC)
        ops.attention_inputs(x, weights, SPEC, rope, state.batch, state.pages)
        written.append(state.rows[first_page].clone())
    assert torch.equal(*written)


@pytest.mark.parametrize("fmt", ["fp32", "fp8", "nvfp4"])
def test_a_row_copied_to_another_page_is_that_page_for_every_op(ops: Kernels, fmt: str) -> None:
    """What offloading does; the block that the query looks for lies beyond 2,048 tokens."""
    generator = torch.Generator().manual_seed(4)
    state = filled((Tokens(2900, 1),), fmt, fmt, seed=5)
    assert state.pages.index is not None
    layout = RowLayout.of(SPEC, FORMATS[fmt], FORMATS[fmt])
    q = torch.randn(1, HEADS, DIM, generator=generator)
    pages = state.batch.block_tables[0]
    needle = read(codec, state.pages.index, pages[5], torch.float32)[0, 31]
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

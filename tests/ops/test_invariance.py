"""In fp32 a row's result is the same to the bit whatever rows stand beside it: the ground of
equal tokens."""

from __future__ import annotations

import pytest
import torch

from winnow.ops.batch import Batch
from winnow.ops.case_data import Filled, Tokens, eighths, filled, moe_weights, small_spec, weight
from winnow.ops.table import kernels

CPU = kernels("cpu")
SPEC = small_spec()


def rows_of(state: Filled, first: int, count: int) -> Batch:
    """The same request's rows first .. first + count - 1 as a step of their own."""
    return Batch.of([first], [count], [state.batch.block_tables[0].tolist()])


def whole() -> tuple[Filled, torch.Generator]:
    return filled((Tokens(1400, 1400),)), torch.Generator().manual_seed(3)


@pytest.mark.parametrize("count", [1, 3, 16, 100, 700])
@pytest.mark.parametrize("kind", ["fp32", "mxfp8", "nvfp4"])
def test_a_projection_gives_a_row_the_same_alone_and_among_others(kind: str, count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    own = weight(kind, generator, 320, 1120)
    x = torch.randn(1400, 1120, generator=generator)
    together = CPU.linear(x, own)
    assert torch.equal(CPU.linear(x[5 : 5 + count], own), together[5 : 5 + count])


@pytest.mark.parametrize("count", [1, 5, 64])
def test_experts_give_a_row_the_same_alone_and_among_others(count: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = moe_weights("fp32", generator, SPEC)
    x = torch.randn(400, SPEC.hidden_size, generator=generator)
    together = CPU.moe(x, weights, SPEC)
    alone = CPU.moe(x[9 : 9 + count], weights, SPEC)
    assert torch.equal(alone, together[9 : 9 + count])


@pytest.mark.parametrize(("first", "count"), [(0, 1), (127, 2), (513, 1), (640, 100), (1399, 1)])
def test_attention_and_selection_do_not_depend_on_the_chunk(first: int, count: int) -> None:
    state, generator = whole()
    q = torch.randn(1400, SPEC.num_heads, SPEC.head_dim, generator=generator)
    index_q = eighths(generator, 1400, SPEC.num_index_heads, SPEC.index_dim)
    chunk, part = rows_of(state, first, count), slice(first, first + count)
    assert state.pages.index is not None

    ids = CPU.select_blocks(index_q, state.pages.index, state.batch, 4)
    own = CPU.select_blocks(index_q[part], state.pages.index, chunk, 4)
    assert torch.equal(own, ids[part])

    sparse = CPU.sparse_attention(q, ids, state.batch, state.pages)
    own = CPU.sparse_attention(q[part], ids[part], chunk, state.pages)
    assert torch.equal(own, sparse[part])

    dense = CPU.dense_attention(q, state.batch, state.pages)
    own = CPU.dense_attention(q[part], chunk, state.pages)
    assert torch.equal(own, dense[part])


def test_each_row_of_a_verification_has_its_own_selection() -> None:
    state, generator = whole()
    assert state.pages.index is not None
    index_q = eighths(generator, 4, SPEC.num_index_heads, SPEC.index_dim)
    ids = CPU.select_blocks(index_q, state.pages.index, rows_of(state, 1396, 4), 4)
    assert len({tuple(row.flatten().tolist()) for row in ids}) == 4


def test_kv_groups_have_selections_of_their_own() -> None:
    state, generator = whole()
    assert state.pages.index is not None
    index_q = eighths(generator, 1, SPEC.num_index_heads, SPEC.index_dim)
    ids = CPU.select_blocks(index_q, state.pages.index, rows_of(state, 1399, 1), 4)
    assert len({tuple(head.tolist()) for head in ids[0]}) > 1

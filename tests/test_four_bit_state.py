"""Quantised KV and index caches mean attention over the dequantised rows, and nothing else.

Checked twice: op by op, in a running engine, against the reference reading the same rows; and
end to end against transformers whose keys, values and index keys are rounded on the way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import driving, oracle
from torch import Tensor

from winnow.engine.engine import Engine
from winnow.ops.case import error
from winnow.ops.codec import reference as codec
from winnow.ops.table import kernels

REFERENCE = kernels("reference")
LENGTH = 1300
"""More than twice the window of 4 blocks, and no whole number of blocks or steps."""


@pytest.fixture(scope="module", params=(128, 64), ids=("head_dim 128", "head_dim 64"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model with its checkpoint saved beside it."""
    built = oracle.build(request.param, seed=3)
    built.directory = oracle.save(built, tmp_path_factory.mktemp("oracle"))
    built.plain = oracle.logits(built, driving.prompt_of(LENGTH, oracle.VOCAB))
    return built


def engine_of(directory: Path, kv: str, index: str, budget: int = 200) -> Engine:
    return driving.engine(directory, kv_format=kv, index_format=index, max_step_tokens=budget)


@pytest.mark.parametrize(("kv", "index"), [("nvfp4", "nvfp4"), ("fp8", "nvfp4"), ("nvfp4", "fp8")])
def test_selections_and_outputs_are_the_references_over_the_same_rows(
    model: Any, kv: str, index: str
) -> None:
    engine = engine_of(model.directory, kv, index)
    own = engine.runner.model.kernels
    seen = {"selections": 0, "selected": 0, "outputs": 0}

    def select(index_q: Tensor, paged: Any, batch: Any, topk: int) -> Tensor:
        ids = own.select_blocks(index_q, paged, batch, topk)
        assert torch.equal(ids, REFERENCE.select_blocks(index_q, paged, batch, topk))
        seen["selections"] += 1
        seen["selected"] += int((batch.positions // 128 >= topk).sum())
        return ids

    def sparse(q: Tensor, ids: Tensor, batch: Any, pages: Any) -> Tensor:
        out = own.sparse_attention(q, ids, batch, pages)
        assert error(out, REFERENCE.sparse_attention(q, ids, batch, pages)) < 1e-5
        seen["outputs"] += 1
        return out

    def dense(q: Tensor, batch: Any, pages: Any) -> Tensor:
        out = own.dense_attention(q, batch, pages)
        assert error(out, REFERENCE.dense_attention(q, batch, pages)) < 1e-5
        return out

    engine.runner.model.kernels = replace(
        own, select_blocks=select, sparse_attention=sparse, dense_attention=dense
    )
    driving.greedy(engine, driving.prompt_of(LENGTH, oracle.VOCAB), 4)
    assert seen["selections"] == seen["outputs"] >= 3 * 10
    assert seen["selected"] > 3 * (LENGTH - 600)


def rounded(x: Tensor, fmt: str) -> Tensor:
    """What a cache in `fmt` gives back for x [..., dim]."""
    if fmt == "nvfp4":
        return codec.dequantise_nvfp4(*codec.quantise_nvfp4(x))
    if fmt == "fp8":
        return codec.dequantise_fp8(codec.quantise_fp8(x))
    return x


@pytest.mark.parametrize(
    ("kv", "index"),
    [("nvfp4", "nvfp4"), ("fp8", "fp8"), ("nvfp4", "model"), ("model", "nvfp4")],
)
def test_the_model_is_transformers_with_rounded_keys_and_values(
    model: Any, kv: str, index: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling

    prompt = driving.prompt_of(LENGTH, oracle.VOCAB)
    rotate = modeling.apply_rotary_pos_emb

    def rotate_and_round(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        q, k = rotate(q, k, *args, **kwargs)
        # The index key is the one that all heads share.
        return q, rounded(k, index if k.shape[1] == 1 else kv)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", rotate_and_round)
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda _m, _x, out: rounded(out, kv))
        for layer in model.model.layers
    ]
    try:
        want = oracle.logits(model, prompt)
    finally:
        for hook in hooks:
            hook.remove()
    got, _ = driving.all_logits(engine_of(model.directory, kv, index), prompt)
    # A key that lies on a rounding boundary in fp32 may fall to either side, and so may a block
    # at the cut; nearly every position must agree closely, and rounding itself must show.
    apart = torch.linalg.vector_norm(got - want, dim=-1) / torch.linalg.vector_norm(want, dim=-1)
    plain = model.plain
    effect = torch.linalg.vector_norm(got - plain, dim=-1) / torch.linalg.vector_norm(plain, dim=-1)
    assert apart.median() < 1e-3
    assert (apart < 2e-2).float().mean() > 0.98
    assert effect.median() > 20 * apart.median()

"""What transformers itself saves, by both of its classes, loads as the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
)
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3SparseForConditionalGeneration,
    MiniMaxM3VLForCausalLM,
)

from winnow.model.checkpoint import load_checkpoint, make_tiny, read_spec
from winnow.model.weights import ModelWeights
from winnow.ops.weights import MoeWeights, PlainWeight, Weight

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "index_head_dim": 32,
    "num_local_experts": 4,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 48,
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse"],
}


@pytest.fixture(params=["text", "vl"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    """A directory that transformers wrote, and the text model's parameters without prefix."""
    torch.manual_seed(0)
    text = MiniMaxM3VLTextConfig(**SMALL)
    if request.param == "text":
        model = MiniMaxM3VLForCausalLM(text)
    else:
        vision = {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
        both = MiniMaxM3VLConfig(
            text_config=text.to_dict(), vision_config=vision, projector_hidden_size=32
        )
        model = MiniMaxM3SparseForConditionalGeneration(both)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    return tmp_path, {
        name.replace("model.language_model.", "model."): state[name] for name in state
    }


def data(weight: Weight | None) -> Tensor:
    assert isinstance(weight, PlainWeight)
    return weight.data


def test_both_of_transformers_dialects_load_as_the_model_that_was_saved(
    saved: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, state = saved
    model = load_checkpoint(directory, read_spec(directory), torch.float32, progress=False)
    assert torch.equal(model.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(model.head.data, state["lm_head.weight"])
    assert torch.equal(model.final_norm, state["model.norm.weight"])
    dense, sparse = model.layers
    root = "model.layers.0.mlp"
    assert not isinstance(dense.mlp, MoeWeights)
    assert torch.equal(data(dense.mlp.gate_up), state[f"{root}.gate_up_proj.weight"])
    assert torch.equal(data(dense.mlp.down), state[f"{root}.down_proj.weight"])
    root = "model.layers.1.self_attn"
    qkv = torch.cat([state[f"{root}.{p}_proj.weight"] for p in "qkv"])
    index = torch.cat([state[f"{root}.indexer.{p}_proj.weight"] for p in "qk"])
    attention = sparse.attention
    assert torch.equal(data(attention.qkv), qkv)
    assert torch.equal(data(attention.index), index)
    assert torch.equal(data(attention.out), state[f"{root}.o_proj.weight"])
    assert attention.index_q_norm is not None
    assert attention.index_k_norm is not None
    assert torch.equal(attention.q_norm, state[f"{root}.q_norm.weight"])
    assert torch.equal(attention.k_norm, state[f"{root}.k_norm.weight"])
    assert torch.equal(attention.index_q_norm, state[f"{root}.indexer.q_norm.weight"])
    assert torch.equal(attention.index_k_norm, state[f"{root}.indexer.k_norm.weight"])
    root = "model.layers.1.mlp"
    assert isinstance(sparse.mlp, MoeWeights)
    assert torch.equal(sparse.mlp.router, state[f"{root}.gate.weight"])
    assert torch.equal(sparse.mlp.router_bias, state[f"{root}.gate.e_score_correction_bias"])
    assert torch.equal(data(sparse.mlp.gate_up), state[f"{root}.experts.gate_up_proj"])
    assert torch.equal(data(sparse.mlp.down), state[f"{root}.experts.down_proj"])
    shared = f"{root}.shared_experts"
    assert torch.equal(data(sparse.mlp.shared.gate_up), state[f"{shared}.gate_up_proj.weight"])
    assert torch.equal(data(sparse.mlp.shared.down), state[f"{shared}.down_proj.weight"])


def test_the_tiny_checkpoint_loads_whole_in_transformers_with_sane_activations(
    tmp_path: Path,
) -> None:
    spec = make_tiny(tmp_path)
    model, report = MiniMaxM3SparseForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert {key: len(value) for key, value in report.items()} == dict.fromkeys(report, 0)
    text = model.config.get_text_config()
    assert text.rope_parameters["partial_rotary_factor"] * spec.head_dim == spec.rotary_dim
    ids = torch.randint(0, 256, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    assert out.logits.isfinite().all()
    assert 0.5 < float(out.logits.std()) < 2
    # Without the final norm, which comes last.
    assert all(0.5 < float(state.std()) < 5 for state in out.hidden_states[:-1])


def test_the_tiny_checkpoint_holds_the_same_values_here_and_in_transformers(
    tmp_path: Path,
) -> None:
    spec = make_tiny(tmp_path, seed=3)
    ours: ModelWeights = load_checkpoint(tmp_path, spec, torch.float32, progress=False)
    theirs = MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    experts = theirs.model.language_model.layers[2].mlp.experts
    mlp = ours.layers[2].mlp
    assert isinstance(mlp, MoeWeights)
    assert torch.equal(data(mlp.gate_up), experts.gate_up_proj)
    assert torch.equal(data(mlp.down), experts.down_proj)

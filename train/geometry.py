"""The demo model's shape, as a config.json in the hub's dialect. Makes no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from winnow.spec.model import BLOCK_TOKENS, ModelSpec


@dataclass(frozen=True)
class Geometry:
    """The first `num_dense_layers` layers have full attention and a dense MLP."""

    vocab_size: int = 4096
    hidden_size: int = 384
    num_layers: int = 8
    num_dense_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    index_dim: int = 128
    topk_blocks: int = 8
    num_experts: int = 16
    experts_per_token: int = 4
    expert_width: int = 160
    shared_width: int = 160
    dense_width: int = 768
    max_positions: int = 32768


def config(geometry: Geometry, bos_id: int, eos_id: int) -> dict[str, Any]:
    """config.json of an unquantised checkpoint of this shape."""
    num_sparse = geometry.num_layers - geometry.num_dense_layers
    per_layer = [0] * geometry.num_dense_layers + [1] * num_sparse
    return {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "minimax_m3_vl_text",
        "vocab_size": geometry.vocab_size,
        "hidden_size": geometry.hidden_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "rotary_dim": geometry.head_dim // 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "qk_norm_type": "per_head",
        "max_position_embeddings": geometry.max_positions,
        "dense_intermediate_size": geometry.dense_width,
        "intermediate_size": geometry.expert_width,
        "shared_intermediate_size": geometry.shared_width,
        "num_local_experts": geometry.num_experts,
        "num_experts_per_tok": geometry.experts_per_token,
        "routed_scaling_factor": 2.0,
        "use_routing_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "swiglu_beta": 1.0,
        "moe_layer_freq": per_layer,
        "sparse_attention_config": {
            "sparse_index_dim": geometry.index_dim,
            "sparse_num_index_heads": geometry.num_kv_heads,
            "sparse_topk_blocks": geometry.topk_blocks,
            "sparse_block_size": BLOCK_TOKENS,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": per_layer,
        },
        "tie_word_embeddings": False,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "torch_dtype": "bfloat16",
    }


def spec(geometry: Geometry) -> ModelSpec:
    """The same shape as the server reads it."""
    return ModelSpec.from_hf(config(geometry, bos_id=0, eos_id=1))

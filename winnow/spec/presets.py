"""Configs of known models, as their checkpoints give them, for planning without a checkpoint."""

from __future__ import annotations

from typing import Any

from winnow.errors import UnsupportedError
from winnow.spec.model import ModelSpec

_M3_LAYERS = 60


def _config(
    first_dense: int, first_full: int, quantization: dict[str, Any], num_mtp_modules: int
) -> dict[str, Any]:
    return {
        "model_type": "minimax_m3_vl",
        "vocab_size": 200064,
        "hidden_size": 6144,
        "num_hidden_layers": _M3_LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524288,
        "dense_intermediate_size": 12288,
        "intermediate_size": 3072,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "swiglu_beta": 1.0,
        "moe_layer_freq": [0] * first_dense + [1] * (_M3_LAYERS - first_dense),
        "sparse_attention_config": {
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0] * first_full + [1] * (_M3_LAYERS - first_full),
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": quantization,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
        "num_mtp_modules": num_mtp_modules,
        "vision_config": {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_channels": 3,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
        },
        "projector_hidden_size": 6144,
    }


_MXFP8: dict[str, Any] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
_MIXED: dict[str, Any] = {
    **_MXFP8,
    "moe_quant_algo": "NVFP4",
    "moe_quant_format": "nvfp4-pack-quantized",
    "index_k_quant_type": "nvfp4",
}

_PRESETS = {
    # M3 keeps its first three layers dense and fully attended.
    "minimax-m3": _config(3, 3, _MXFP8, 1),
    # Every layer of M3.1-Flash is sparse: 125 pieces a row follow only from that. Its published
    # 250.1 GB leave no room for an MTP module.
    "minimax-m3.1-flash": _config(3, 0, _MIXED, 0),
}

PRESETS = tuple(_PRESETS)


def preset_config(name: str) -> dict[str, Any]:
    """The config.json of a known model; UnsupportedError names the known ones."""
    if name not in _PRESETS:
        raise UnsupportedError(f"no preset {name!r}; known: {', '.join(PRESETS)}")
    return _PRESETS[name]


def preset(name: str) -> ModelSpec:
    """The spec of a known model; UnsupportedError names the known ones."""
    return ModelSpec.from_hf(preset_config(name))

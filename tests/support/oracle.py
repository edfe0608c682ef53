"""The implementation that no one here wrote: transformers' MiniMax-M3, small and random."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 300


def build(head_dim: int, seed: int = 0, **overrides: Any) -> Any:
    """A text-only model in fp32 whose selection, norms, biases and clamps all matter."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLTextConfig,
    )

    logging.getLogger("transformers").setLevel(logging.ERROR)
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "dense_intermediate_size": 160,
        "shared_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": head_dim,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "index_topk_blocks": 4,
        "index_head_dim": 128,
        "layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 3,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = MiniMaxM3VLTextConfig(**{**shape, **overrides})
    torch.manual_seed(seed)
    model = modeling.MiniMaxM3VLForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith("norm.weight"):
                weight.normal_(0.0, 0.2)
            elif "e_score_correction_bias" in name:
                weight.normal_(0.0, 0.1)
            else:
                # Gate and up reach past the activation's limit now and then.
                size = 3.0 if "gate_up" in name else 1.0
                weight.normal_(0.0, size * weight.shape[-1] ** -0.5)
    return model


def save(model: Any, directory: Path) -> Path:
    """Save as transformers does; give the directory back."""
    model.save_pretrained(directory)
    return directory


@torch.inference_mode()
def logits(model: Any, prompt: list[int]) -> Tensor:
    """fp32 [tokens, vocab] of one prompt in one pass, without a cache."""
    out: Tensor = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return out


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """The continuation that transformers' own generate gives."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        pad_token_id=0,
    )
    return [int(token) for token in out[0, len(prompt) :]]

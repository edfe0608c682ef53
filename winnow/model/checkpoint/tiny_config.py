"""Geometry, config and tokenizer of the tiny model. Makes no weights and writes no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from winnow.spec.model import BLOCK_TOKENS

BEGIN, END, ROLE = "]~!b[", "[e~[", "]~b]"
"""Start of a text, end of a turn, and what stands before the role of one who speaks."""
SPECIAL_TOKENS = (BEGIN, END, ROLE)
TAGS = ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>")
"""Tags of the chat format that are one token each."""

_VOCABULARY_MULTIPLE = 16
VISION_WIDTH = 32
"""Of every layer of the vision tower."""


@dataclass(frozen=True)
class TinyGeometry:
    """What may be changed of the tiny model. The first `num_dense_layers` have a dense MLP and
    full attention, the rest routed experts and sparse attention, as in MiniMax-M3."""

    hidden_size: int = 256
    num_layers: int = 4
    num_dense_layers: int = 1
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 128
    index_dim: int = 128
    topk_blocks: int = 4
    num_experts: int = 8
    experts_per_token: int = 4
    expert_width: int = 128
    shared_width: int = 128
    dense_width: int = 512
    max_positions: int = 65536


def byte_tokenizer() -> Tokenizer:
    """One token a byte, then special tokens and tags, then reserved ones up to a round number."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    named = len(alphabet) + len(SPECIAL_TOKENS) + len(TAGS)
    reserved = [f"<reserved_{i}>" for i in range(-named % _VOCABULARY_MULTIPLE)]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in reserved])
    return tokenizer


def tiny_config(geometry: TinyGeometry, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json in the hub's dialect, as MiniMax-M3 has it."""
    num_sparse = geometry.num_layers - geometry.num_dense_layers
    per_layer = [0] * geometry.num_dense_layers + [1] * num_sparse
    text = {
        "model_type": "minimax_m3_vl_text",
        "vocab_size": tokenizer.get_vocab_size(),
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
        "bos_token_id": tokenizer.token_to_id(BEGIN),
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "bfloat16",
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "projector_hidden_size": VISION_WIDTH,
        "text_config": text,
        "vision_config": {
            "model_type": "minimax_m3_vl_vision",
            "hidden_size": VISION_WIDTH,
            "intermediate_size": VISION_WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": 2,
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json, for those who load the tokenizer through transformers."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "clean_up_tokenization_spaces": False,
    }

"""Small checkpoints of every kind that is served, written tensor by tensor under literal names, so
that nothing here is shared with the code that reads them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCABULARY, HIDDEN, LAYERS = 48, 64, 3
HEADS, KV_HEADS, DIM, INDEX_DIM = 4, 2, 32, 32
EXPERTS, EXPERT_WIDTH, SHARED_WIDTH, DENSE_WIDTH = 5, 32, 96, 128

KINDS = (
    "hub",
    "hub-prefixed",
    "transformers-text",
    "mxfp8",
    "mxfp8-e8m0",
    "mxfp8-plain-index",
    "modelopt-nvfp4",
    "mixed-nvfp4",
)

_MXFP8 = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
_QUANTIZATION = {
    "mxfp8": _MXFP8,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "mixed": {
        **_MXFP8,
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
        "index_k_quant_type": "nvfp4",
        "kv_cache_quant_algo": "FP8",
        "attention_quant_algo": "FP8",
    },
}


@dataclass(frozen=True)
class SmallCheckpoint:
    """A checkpoint on disk and what was written: tensors by the hub's names without prefix, in
    the hub's pieces whatever the dialect on disk."""

    directory: Path
    tensors: dict[str, Tensor]
    config: dict[str, Any]


def config(kind: str = "hub", **changes: Any) -> dict[str, Any]:
    """config.json of a kind, in the hub's dialect; layer 0 is dense and fully attended."""
    values: dict[str, Any] = {
        "model_type": "minimax_m3_vl_text",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rotary_dim": DIM // 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5_000_000,
        "dense_intermediate_size": DENSE_WIDTH,
        "intermediate_size": EXPERT_WIDTH,
        "shared_intermediate_size": SHARED_WIDTH,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "swiglu_beta": 1.0,
        "moe_layer_freq": [0, 1, 1],
        "sparse_attention_config": {
            "sparse_index_dim": INDEX_DIM,
            "sparse_num_index_heads": KV_HEADS,
            "sparse_topk_blocks": 4,
            "sparse_block_size": 128,
            "sparse_attention_freq": [0, 1, 1],
        },
        "torch_dtype": "bfloat16",
    }
    quantization = _QUANTIZATION.get(kind.split("-")[0])
    if quantization:
        values["quantization_config"] = quantization
    return values | changes


def build(
    directory: Path,
    kind: str = "hub",
    *,
    seed: int = 0,
    shards: int = 1,
    extra: dict[str, Tensor] | None = None,
    drop: tuple[str, ...] = (),
    dtype: torch.dtype = torch.bfloat16,
    **config_changes: Any,
) -> SmallCheckpoint:
    """Write a checkpoint of `kind`, with `extra` and without `drop` by the names on disk."""
    made = tensors(kind, seed, dtype)
    stored = dict(made)
    if kind == "transformers-text":
        stored = _transformers_names(made)
    elif kind != "hub":
        stored = {f"language_model.{name}": tensor for name, tensor in made.items()}
    stored |= extra or {}
    for name in drop:
        del stored[name]
    directory.mkdir(parents=True, exist_ok=True)
    write(directory, stored, shards)
    values = config(kind, **config_changes)
    (directory / "config.json").write_text(json.dumps(values))
    return SmallCheckpoint(directory, made, values)


def write(directory: Path, stored: dict[str, Tensor], shards: int = 1) -> None:
    """One file, or `shards` files with an index, dealt round robin."""
    if shards == 1:
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: stored[name] for name in list(stored)[shard::shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors(kind: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All tensors of a kind, random, by the hub's names without prefix."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}

    def plain(name: str, *shape: int) -> None:
        made[name] = torch.randn(shape, generator=generator).to(dtype)

    def linear(name: str, rows: int, columns: int) -> None:
        if not kind.startswith(("mxfp8", "mixed")):
            plain(f"{name}.weight", rows, columns)
            return
        scales = _bytes((rows, columns // 32), 120, 130, generator)
        if kind == "mxfp8-e8m0":
            scales = scales.view(torch.float8_e8m0fnu)
        made[f"{name}.weight"] = _e4m3((rows, columns), generator)
        made[f"{name}.weight_scale_inv"] = scales

    def expert(name: str, rows: int, columns: int, number: int) -> None:
        if not kind.endswith("nvfp4"):
            linear(name, rows, columns)
            return
        codes = _bytes((rows, columns // 2), 0, 256, generator)
        scales = _bytes((rows, columns // 16), 1, 0x7F, generator).view(torch.float8_e4m3fn)
        # Unlike in every tensor, so that a scale in the wrong place shows.
        scale = 0.25 + len(made) / 1024 + number
        if kind == "mixed-nvfp4":
            made[f"{name}.weight_packed"] = codes
            made[f"{name}.weight_scale"] = scales
            made[f"{name}.weight_global_scale"] = torch.tensor([scale])
            made[f"{name}.input_global_scale"] = torch.tensor([1.0])
        else:
            made[f"{name}.weight"] = codes
            made[f"{name}.weight_scale"] = scales
            made[f"{name}.weight_scale_2"] = torch.tensor(scale)
            made[f"{name}.input_scale"] = torch.tensor(1.0)

    plain("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    plain("model.norm.weight", HIDDEN)
    plain("lm_head.weight", VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        root = f"model.layers.{layer}"
        plain(f"{root}.input_layernorm.weight", HIDDEN)
        plain(f"{root}.post_attention_layernorm.weight", HIDDEN)
        attention = f"{root}.self_attn"
        linear(f"{attention}.q_proj", HEADS * DIM, HIDDEN)
        linear(f"{attention}.k_proj", KV_HEADS * DIM, HIDDEN)
        linear(f"{attention}.v_proj", KV_HEADS * DIM, HIDDEN)
        linear(f"{attention}.o_proj", HIDDEN, HEADS * DIM)
        plain(f"{attention}.q_norm.weight", DIM)
        plain(f"{attention}.k_norm.weight", DIM)
        if layer == 0:
            linear(f"{root}.mlp.gate_proj", DENSE_WIDTH, HIDDEN)
            linear(f"{root}.mlp.up_proj", DENSE_WIDTH, HIDDEN)
            linear(f"{root}.mlp.down_proj", HIDDEN, DENSE_WIDTH)
            continue
        for name, rows in (("index_q_proj", KV_HEADS * INDEX_DIM), ("index_k_proj", INDEX_DIM)):
            if kind == "mxfp8-plain-index":
                plain(f"{attention}.{name}.weight", rows, HIDDEN)
            else:
                linear(f"{attention}.{name}", rows, HIDDEN)
        plain(f"{attention}.index_q_norm.weight", INDEX_DIM)
        plain(f"{attention}.index_k_norm.weight", INDEX_DIM)
        moe = f"{root}.block_sparse_moe"
        plain(f"{moe}.gate.weight", EXPERTS, HIDDEN)
        plain(f"{moe}.e_score_correction_bias", EXPERTS)
        for number in range(EXPERTS):
            expert(f"{moe}.experts.{number}.w1", EXPERT_WIDTH, HIDDEN, number)
            expert(f"{moe}.experts.{number}.w2", HIDDEN, EXPERT_WIDTH, number)
            expert(f"{moe}.experts.{number}.w3", EXPERT_WIDTH, HIDDEN, number)
        linear(f"{moe}.shared_experts.gate_proj", SHARED_WIDTH, HIDDEN)
        linear(f"{moe}.shared_experts.up_proj", SHARED_WIDTH, HIDDEN)
        linear(f"{moe}.shared_experts.down_proj", HIDDEN, SHARED_WIDTH)
    return made


def _bytes(shape: tuple[int, ...], low: int, high: int, generator: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def _e4m3(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """E4M3 without its two NaNs."""
    codes = _bytes(shape, 0, 256, generator)
    return torch.where(codes & 0x7F == 0x7F, 0, codes).view(torch.float8_e4m3fn)


def _transformers_names(made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Plain hub tensors as transformers' text-only class saves them."""
    left = dict(made)
    stored: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        root = f"model.layers.{layer}"
        mlps = [f"{root}.mlp"] if layer == 0 else [f"{root}.block_sparse_moe.shared_experts"]
        for old in mlps:
            new = old.replace("block_sparse_moe", "mlp")
            gate_up = [left.pop(f"{old}.{p}_proj.weight") for p in ("gate", "up")]
            stored[f"{new}.gate_up_proj.weight"] = torch.cat(gate_up)
            stored[f"{new}.down_proj.weight"] = left.pop(f"{old}.down_proj.weight")
        if layer == 0:
            continue
        moe = f"{root}.block_sparse_moe"
        stacks: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for number in range(EXPERTS):
            w1, w2, w3 = (left.pop(f"{moe}.experts.{number}.w{i}.weight") for i in (1, 2, 3))
            stacks["gate_up_proj"].append(torch.cat((w1, w3)))
            stacks["down_proj"].append(w2)
        for name, stack in stacks.items():
            stored[f"{root}.mlp.experts.{name}"] = torch.stack(stack)
        for old, new in (
            ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
            ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
            ("self_attn.index_q_proj.weight", "self_attn.indexer.q_proj.weight"),
            ("self_attn.index_k_proj.weight", "self_attn.indexer.k_proj.weight"),
            ("self_attn.index_q_norm.weight", "self_attn.indexer.q_norm.weight"),
            ("self_attn.index_k_norm.weight", "self_attn.indexer.k_norm.weight"),
        ):
            stored[f"{root}.{new}"] = left.pop(f"{root}.{old}")
    return stored | left

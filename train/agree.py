"""`python -m train.agree`: greedy tokens of the shipped checkpoint through transformers and through
the engine, both in fp32, on held-out prompts. Writes a JSON line a prompt.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from train import chats, corpus, intents, recall
from winnow.config import SamplingParams
from winnow.engine.llm import LLM
from winnow.engine.text import load_tokenizer
from winnow.model.checkpoint import load_checkpoint, read_spec
from winnow.model.weights import LayerWeights
from winnow.ops.linear.reference import dequantise
from winnow.ops.weights import MlpWeights, MoeWeights, Weight
from winnow.spec.embedded import DEMO, checkpoint_path
from winnow.spec.model import ModelSpec

_TEXT_PROMPT_TOKENS = (12, 60, 200, 700, 1500, 2200)
"""Beyond 1,024 tokens not every block is selected."""


def transformers_model(directory: Path) -> Any:
    """The checkpoint's values, dequantised, in transformers' text-only class, in fp32."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as modeling
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import (
        MiniMaxM3VLTextConfig,
    )

    logging.getLogger("transformers").setLevel(logging.ERROR)
    spec = read_spec(directory)
    model: Any = modeling.MiniMaxM3VLForCausalLM(MiniMaxM3VLTextConfig(**_config(spec)))
    model.eval()
    model.load_state_dict(_state(directory, spec))
    return model


def _config(spec: ModelSpec) -> dict[str, Any]:
    kinds = ("full_attention", "minimax_m3_sparse"), ("dense", "sparse")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.expert_width,
        "dense_intermediate_size": spec.dense_width,
        "shared_intermediate_size": spec.shared_width,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "routed_scaling_factor": spec.routed_scale,
        "index_n_heads": spec.num_index_heads,
        "index_head_dim": spec.index_dim,
        "index_topk_blocks": spec.topk_blocks,
        "layer_types": [kinds[0][sparse] for sparse in spec.layer_is_sparse],
        "mlp_layer_types": [kinds[1][moe] for moe in spec.layer_is_moe],
        "max_position_embeddings": spec.max_positions,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": spec.rope_theta,
            "partial_rotary_factor": spec.rotary_dim / spec.head_dim,
        },
        "bos_token_id": spec.bos_id,
        "eos_token_id": None,
    }


def _state(directory: Path, spec: ModelSpec) -> dict[str, Tensor]:
    weights = load_checkpoint(directory, spec, torch.float32, progress=False)
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head.data,
    }
    for number, layer in enumerate(weights.layers):
        root = f"model.layers.{number}"
        state |= {f"{root}.{name}": tensor for name, tensor in _layer(layer, spec)}
    return state


def _layer(layer: LayerWeights, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.post_norm
    attention = layer.attention
    rows = [heads * spec.head_dim for heads in (spec.num_heads, *[spec.num_kv_heads] * 2)]
    for name, part in zip("qkv", _values(attention.qkv).split(rows), strict=True):
        yield f"self_attn.{name}_proj.weight", part
    yield "self_attn.o_proj.weight", _values(attention.out)
    yield "self_attn.q_norm.weight", attention.q_norm
    yield "self_attn.k_norm.weight", attention.k_norm
    if attention.index is not None:
        assert attention.index_q_norm is not None
        assert attention.index_k_norm is not None
        rows = [spec.num_index_heads * spec.index_dim, spec.index_dim]
        for name, part in zip("qk", _values(attention.index).split(rows), strict=True):
            yield f"self_attn.indexer.{name}_proj.weight", part
        yield "self_attn.indexer.q_norm.weight", attention.index_q_norm
        yield "self_attn.indexer.k_norm.weight", attention.index_k_norm
    if isinstance(layer.mlp, MoeWeights):
        yield "mlp.gate.weight", layer.mlp.router
        yield "mlp.gate.e_score_correction_bias", layer.mlp.router_bias
        yield "mlp.experts.gate_up_proj", _values(layer.mlp.gate_up)
        yield "mlp.experts.down_proj", _values(layer.mlp.down)
        yield from _mlp("mlp.shared_experts", layer.mlp.shared)
    else:
        yield from _mlp("mlp", layer.mlp)


def _mlp(root: str, mlp: MlpWeights) -> Iterator[tuple[str, Tensor]]:
    yield f"{root}.gate_up_proj.weight", _values(mlp.gate_up)
    yield f"{root}.down_proj.weight", _values(mlp.down)


def _values(weight: Weight) -> Tensor:
    return dequantise(weight, torch.float32)


def prompts(count: int) -> list[str]:
    """Held-out prompts: every second one a chat, the others text of several lengths, some with
    facts and a question behind them."""
    rng = Random("held-out prompts")
    texts = [d.text for d in corpus.read() if d.held_out and len(d.text) > 12000]
    made = []
    for number in range(count):
        if number % 2 == 0:
            user = intents.any_turn(rng).user
            made.append(chats.prompt([{"role": "user", "content": user}]))
            continue
        length = 3 * _TEXT_PROMPT_TOKENS[number // 2 % len(_TEXT_PROMPT_TOKENS)]
        text = rng.choice(texts)
        start = rng.randrange(len(text) - length)
        text = text[start : start + length]
        if length > 600:
            facts = recall.facts(rng, 4)
            text = recall.hide(rng, facts, text) + f"\n\nQuestion: {facts[0].question}\nAnswer:"
        made.append(text)
    return made


@torch.inference_mode()
def greedy(model: Any, ids: Sequence[int], num_tokens: int) -> list[int]:
    """What transformers' own generate gives."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
        max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in out[0, len(ids) :]]


def served(directory: Path, ids: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """What the engine gives, in fp32 with K, V and index keys unquantised."""
    llm = LLM(str(directory), progress=False, dtype="float32", kv_format="model",
              index_format="model", num_pages=256)  # fmt: skip
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [list(done.token_ids) for done in llm.generate(list(ids), params)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records/agree.jsonl")
    args = parser.parse_args()
    directory = checkpoint_path(DEMO)
    tokenizer = load_tokenizer(directory)
    assert tokenizer is not None
    ids = [tokenizer.encode(prompt) for prompt in prompts(args.count)]
    ours = served(directory, ids, args.tokens)
    model = transformers_model(directory)
    same = 0
    with args.out.open("w") as out:
        for prompt, tokens in zip(ids, ours, strict=True):
            theirs = greedy(model, prompt, args.tokens)
            same += tokens == theirs
            record = {"prompt_tokens": len(prompt), "tokens": args.tokens, "same": tokens == theirs}
            out.write(json.dumps(record) + "\n")
            out.flush()
    print(f"{same} of {len(ids)} prompts gave the same {args.tokens} tokens")


if __name__ == "__main__":
    main()

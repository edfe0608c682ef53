"""Which tensors a model consists of and what a checkpoint calls them. Opens no file.

Two dialects name the same tensors: the hub's, with or without a `language_model.` prefix, and
transformers' own, which a text-only save writes. `canonical` turns both into the hub's names
without the prefix; all other code knows only those.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from winnow.spec.model import ModelSpec

HUB_PREFIX = "language_model."

SKIPPED = ("vision_tower", "multi_modal_projector", "patch_merge_mlp", "mtp", "dspark")
"""First words of tensors that are not the text model's: images and drafts."""

_WRAPPERS = re.compile(r"^(?:(?:model|language_model)\.)*")
_TEXT_MODEL = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
_RENAMED = tuple(
    (re.compile(rf"^(model\.layers\.\d+)\.{old}"), rf"\1.{new}")
    for old, new in (
        (r"mlp\.gate\.e_score_correction_bias$", "block_sparse_moe.e_score_correction_bias"),
        (r"mlp\.gate\.", "block_sparse_moe.gate."),
        (r"mlp\.experts\.", "block_sparse_moe.experts."),
        (r"mlp\.shared_experts\.", "block_sparse_moe.shared_experts."),
        (r"self_attn\.indexer\.", "self_attn.index_"),
    )
)


def canonical(name: str) -> str:
    """The hub's name, without prefix, of a tensor under any of the known dialects."""
    name = _TEXT_MODEL.sub("model.", name, count=1).removeprefix(HUB_PREFIX)
    for pattern, replacement in _RENAMED:
        name, count = pattern.subn(replacement, name)
        if count:
            break
    return name


def skipped(name: str) -> str | None:
    """Which of SKIPPED a tensor belongs to, under any wrapper; None for the text model's own."""
    first = _WRAPPERS.sub("", name, count=1).partition(".")[0]
    return first if first in SKIPPED else None


@dataclass(frozen=True)
class PlainTensor:
    """A tensor that no checkpoint quantises, under its full name."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix that the hub stores as one tensor. `name` lacks the suffix that tells
    codes from scales, and of a routed expert holds `{}` for the expert's number."""

    name: str
    rows: int


@dataclass(frozen=True)
class Matrix:
    """A weight as it is held in memory: pieces stacked by rows, and experts by a leading axis.

    `num_experts` is 0 for a matrix that is no stack. `fused` is the tensor in which transformers'
    dialect keeps all pieces together: a name without suffix as in Piece, or for experts the full
    name of one plain [E, N, K] tensor. `is_expert` tells the routed experts, which checkpoints
    quantise apart from other linears.
    """

    pieces: tuple[Piece, ...]
    columns: int
    fused: str | None = None
    num_experts: int = 0

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)

    @property
    def is_expert(self) -> bool:
        return self.num_experts > 0


@dataclass(frozen=True)
class LayerNames:
    """Where one layer's tensors come from: matrices and plain tensors by the role they play."""

    matrices: dict[str, Matrix]
    plain: dict[str, PlainTensor]


def top_names(spec: ModelSpec) -> dict[str, PlainTensor]:
    """`embedding`, `final_norm` and `head`."""
    vocabulary = (spec.vocab_size, spec.hidden_size)
    return {
        "embedding": PlainTensor("model.embed_tokens.weight", vocabulary),
        "final_norm": PlainTensor("model.norm.weight", (spec.hidden_size,)),
        "head": PlainTensor("lm_head.weight", vocabulary),
    }


def cache_scale_names(layer: int) -> dict[str, PlainTensor]:
    """`key` and `value`: one layer's scales of an FP8 cache, which few checkpoints have."""
    root = f"model.layers.{layer}.self_attn"
    return {
        "key": PlainTensor(f"{root}.k_proj.k_scale", ()),
        "value": PlainTensor(f"{root}.v_proj.v_scale", ()),
    }


def layer_names(spec: ModelSpec, layer: int) -> LayerNames:
    """Roles `qkv`, `out`, and where the layer has them `index`, `gate_up`, `down`,
    `expert_gate_up`, `expert_down`, `shared_gate_up`, `shared_down`; plain roles are norms and
    the router."""
    root = f"model.layers.{layer}"
    matrices, plain = _attention(spec, f"{root}.self_attn", sparse=spec.layer_is_sparse[layer])
    plain["input_norm"] = PlainTensor(f"{root}.input_layernorm.weight", (spec.hidden_size,))
    plain["post_norm"] = PlainTensor(f"{root}.post_attention_layernorm.weight", (spec.hidden_size,))
    if spec.layer_is_moe[layer]:
        moe = f"{root}.block_sparse_moe"
        experts = spec.num_experts
        plain["router"] = PlainTensor(f"{moe}.gate.weight", (experts, spec.hidden_size))
        plain["router_bias"] = PlainTensor(f"{moe}.e_score_correction_bias", (experts,))
        matrices |= _experts(spec, f"{moe}.experts")
        matrices |= _mlp(spec, f"{moe}.shared_experts", spec.shared_width, "shared_")
    else:
        matrices |= _mlp(spec, f"{root}.mlp", spec.dense_width, "")
    return LayerNames(matrices, plain)


def _attention(
    spec: ModelSpec, root: str, *, sparse: bool
) -> tuple[dict[str, Matrix], dict[str, PlainTensor]]:
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "qkv": Matrix(
            (
                Piece(f"{root}.q_proj", width),
                Piece(f"{root}.k_proj", kv_width),
                Piece(f"{root}.v_proj", kv_width),
            ),
            spec.hidden_size,
        ),
        "out": Matrix((Piece(f"{root}.o_proj", spec.hidden_size),), width),
    }
    norms = {"q_norm": spec.head_dim, "k_norm": spec.head_dim}
    if sparse:
        query_rows = spec.num_index_heads * spec.index_dim
        matrices["index"] = Matrix(
            (
                Piece(f"{root}.index_q_proj", query_rows),
                Piece(f"{root}.index_k_proj", spec.index_dim),
            ),
            spec.hidden_size,
        )
        norms |= {"index_q_norm": spec.index_dim, "index_k_norm": spec.index_dim}
    plain = {role: PlainTensor(f"{root}.{role}.weight", (dim,)) for role, dim in norms.items()}
    return matrices, plain


def _mlp(spec: ModelSpec, root: str, width: int, role: str) -> dict[str, Matrix]:
    gate_up = (Piece(f"{root}.gate_proj", width), Piece(f"{root}.up_proj", width))
    return {
        f"{role}gate_up": Matrix(gate_up, spec.hidden_size, fused=f"{root}.gate_up_proj"),
        f"{role}down": Matrix((Piece(f"{root}.down_proj", spec.hidden_size),), width),
    }


def _experts(spec: ModelSpec, root: str) -> dict[str, Matrix]:
    width = spec.expert_width
    gate_up = (Piece(f"{root}.{{}}.w1", width), Piece(f"{root}.{{}}.w3", width))
    down = (Piece(f"{root}.{{}}.w2", spec.hidden_size),)
    return {
        "expert_gate_up": Matrix(
            gate_up, spec.hidden_size, f"{root}.gate_up_proj", spec.num_experts
        ),
        "expert_down": Matrix(down, width, f"{root}.down_proj", spec.num_experts),
    }

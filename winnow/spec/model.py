"""The shape of a model, read once from its config. All config quirks end here; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from winnow.errors import CheckpointError, UnsupportedError

FAMILY = "minimax_m3"
"""What every model_type that is served begins with."""
BLOCK_TOKENS = 128
"""Tokens of a block, which is also the page size; the only block size served."""

QUANTIZATIONS = ("none", "mxfp8", "modelopt-nvfp4", "mixed-nvfp4")
"""Kinds of checkpoint by how their weights are stored (docs/formats.md)."""


@dataclass(frozen=True)
class ModelSpec:
    """Geometry and constants of one model of the MiniMax-M3 family."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    layer_is_sparse: tuple[bool, ...]
    """Per layer: block-sparse attention (True) or full attention."""
    layer_is_moe: tuple[bool, ...]
    """Per layer: routed experts (True) or one dense MLP."""
    index_dim: int
    topk_blocks: int
    dense_width: int
    expert_width: int
    shared_width: int
    num_experts: int
    experts_per_token: int
    routed_scale: float
    swiglu_alpha: float
    swiglu_limit: float
    swiglu_beta: float
    tied_embeddings: bool
    dtype: str
    """The checkpoint's own dtype for unquantised tensors: float32 or bfloat16."""
    quantization: str
    bos_id: int | None
    eos_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """What had to be decided because the config disagrees with itself or leaves something out."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_is_sparse)

    @property
    def heads_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_index_heads(self) -> int:
        """Each KV head has its own selection, so there are as many index heads."""
        return self.num_kv_heads

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        return tuple(i for i, sparse in enumerate(self.layer_is_sparse) if sparse)

    def with_layers(self, num_layers: int) -> ModelSpec:
        """The same model cut to its last `num_layers` layers, which are the sparse MoE kind."""
        if not 1 <= num_layers <= self.num_layers:
            raise UnsupportedError(
                f"asked for {num_layers} layers, the model has {self.num_layers}: "
                f"choose 1 to {self.num_layers}"
            )
        return replace(
            self,
            layer_is_sparse=self.layer_is_sparse[-num_layers:],
            layer_is_moe=self.layer_is_moe[-num_layers:],
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelSpec:
        """Read a `config.json`, of the hub's dialect or of transformers' own.

        Raises CheckpointError for a config that lacks or contradicts what is needed, and
        UnsupportedError for one that asks for what this version does not compute.
        """
        text = config.get("text_config")
        text = text if isinstance(text, Mapping) else {}
        _check_family(config, text)
        return _read(_Config({**config, **text}))


def _check_family(config: Mapping[str, Any], text: Mapping[str, Any]) -> None:
    """Refuse a model whose parts are not all of the family: a wrapper's text part may be, while
    what surrounds it changes its inputs."""
    named = {
        key: name
        for key, name in (
            ("model_type", config.get("model_type")),
            ("text_config.model_type", text.get("model_type")),
        )
        if name is not None
    }
    served = f"only models of MiniMax-M3's family are served, whose model_type begins with {FAMILY}"
    for key, name in named.items():
        if not str(name).startswith(FAMILY):
            raise UnsupportedError(f"config.json: {key} is {name!r}: {served}")
    if not named:
        raise UnsupportedError(f"config.json lacks 'model_type': {served}")


class _Config:
    """A config with errors that name the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def optional(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.optional(key, default)
        if value is None:
            raise CheckpointError(f"config.json lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"config.json: {key!r} is {value!r}, not a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.optional(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {key!r} is {value!r}, not a number")
        return float(value)


def _read(config: _Config) -> ModelSpec:
    notes: list[str] = []
    num_layers = config.integer("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", hidden_size // max(num_heads, 1))
    sparse = _Config(config.optional("sparse_attention_config", {}))
    layer_is_sparse = _layers(
        config,
        num_layers,
        "layer_types",
        {"minimax_m3_sparse": True, "full_attention": False},
        sparse.optional("sparse_attention_freq"),
        default=False,
    )
    layer_is_moe = _layers(
        config,
        num_layers,
        "mlp_layer_types",
        {"sparse": True, "dense": False},
        config.optional("moe_layer_freq"),
        default=True,
    )
    index_heads = sparse.integer("sparse_num_index_heads", config.integer("index_n_heads", 4))
    theta, rotary_dim = _rope(config, head_dim, notes)
    eos = config.optional("eos_token_id", ())
    spec = ModelSpec(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=theta,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_positions=config.integer("max_position_embeddings", 524288),
        layer_is_sparse=layer_is_sparse,
        layer_is_moe=layer_is_moe,
        index_dim=sparse.integer("sparse_index_dim", config.integer("index_head_dim", 128)),
        topk_blocks=sparse.integer("sparse_topk_blocks", config.integer("index_topk_blocks", 16)),
        dense_width=config.integer("dense_intermediate_size", 12288),
        expert_width=config.integer("intermediate_size"),
        shared_width=config.integer("shared_intermediate_size", 3072),
        num_experts=config.integer("num_local_experts", config.integer("num_experts", 128)),
        experts_per_token=config.integer("num_experts_per_tok", 4),
        routed_scale=config.number("routed_scaling_factor", 2.0),
        swiglu_alpha=config.number("swiglu_alpha", 1.702),
        swiglu_limit=config.number("swiglu_limit", 7.0),
        swiglu_beta=config.number("swiglu_beta", 1.0),
        tied_embeddings=bool(config.optional("tie_word_embeddings", False)),
        dtype=str(config.optional("dtype", config.optional("torch_dtype", "bfloat16"))),
        quantization=_quantization(config.optional("quantization_config")),
        bos_id=config.optional("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, Sequence) else (eos,),
        notes=tuple(notes),
    )
    _refuse_unsupported(config, sparse, spec, index_heads)
    return spec


def _layers(
    config: _Config,
    num_layers: int,
    key: str,
    words: Mapping[str, bool],
    frequency: Sequence[int] | None,
    *,
    default: bool,
) -> tuple[bool, ...]:
    """One flag a layer, from transformers' list of words, else the hub's list of 0 and 1."""
    named = config.optional(key)
    if named is not None:
        unknown = sorted({str(w) for w in named} - set(words))
        if unknown:
            raise UnsupportedError(f"config.json: {key} holds {unknown}; known: {sorted(words)}")
        flags = tuple(words[w] for w in named)
    elif frequency is not None:
        flags = tuple(bool(f) for f in frequency)
    else:
        flags = (default,) * num_layers
    if len(flags) != num_layers:
        raise CheckpointError(
            f"config.json: {key} describes {len(flags)} layers, num_hidden_layers is {num_layers}"
        )
    return flags


def _rope(config: _Config, head_dim: int, notes: list[str]) -> tuple[float, int]:
    """Theta and the number of rotated channels.

    transformers takes the rotated share from `rope_parameters.partial_rotary_factor`, else the
    top-level `partial_rotary_factor`, else all of head_dim, and writes an unused `rotary_dim`
    into every config it saves. A config that transformers did not save means its `rotary_dim`.
    """
    rope = _Config(config.optional("rope_parameters", config.optional("rope_scaling", {})))
    kind = rope.optional("rope_type", rope.optional("type", "default"))
    if kind != "default":
        raise UnsupportedError(f"config.json: rope_type {kind!r} is not served; only 'default' is")
    theta = rope.number("rope_theta", config.number("rope_theta", 5e6))
    declared = config.integer("rotary_dim", 0) or None
    factor = rope.optional("partial_rotary_factor", config.optional("partial_rotary_factor"))
    if factor is not None:
        rotary_dim = int(head_dim * float(factor))
        source = f"partial_rotary_factor {factor}"
    elif "rope_parameters" not in config and declared is not None:
        rotary_dim, source = declared, "rotary_dim"
    else:
        rotary_dim, source = head_dim, "no partial_rotary_factor, as transformers reads it"
    if declared is not None and declared != rotary_dim:
        notes.append(
            f"config says rotary_dim {declared} but {source} gives {rotary_dim} of {head_dim} "
            f"channels: {rotary_dim} are rotated"
        )
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise CheckpointError(f"config.json: cannot rotate {rotary_dim} of {head_dim} channels")
    return theta, rotary_dim


def _quantization(quantization: Mapping[str, Any] | None) -> str:
    """Which of QUANTIZATIONS a `quantization_config` describes."""
    if not quantization:
        return "none"
    method = quantization.get("quant_method")
    algorithm = quantization.get("quant_algo")
    experts = quantization.get("moe_quant_algo")
    if method == "mxfp8":
        if experts is None:
            return "mxfp8"
        if experts == "NVFP4" and quantization.get("moe_quant_format") == "nvfp4-pack-quantized":
            return "mixed-nvfp4"
    if method == "modelopt" and algorithm == "NVFP4":
        return "modelopt-nvfp4"
    raise UnsupportedError(
        f"quantization_config with quant_method {method!r}, quant_algo {algorithm!r}, "
        f"moe_quant_algo {experts!r} is not served; served: mxfp8, modelopt with NVFP4, "
        "mxfp8 with NVFP4 experts in nvfp4-pack-quantized"
    )


def _refuse_unsupported(
    config: _Config, sparse: _Config, spec: ModelSpec, index_heads: int
) -> None:
    """One sentence for the first thing in the config that this version does not compute."""
    block = sparse.integer("sparse_block_size", config.integer("index_block_size", BLOCK_TOKENS))
    local = sparse.integer("sparse_local_block", config.integer("index_local_blocks", 1))
    initial = sparse.integer("sparse_init_block", 0)
    score = sparse.optional("sparse_score_type", "max")
    rules = (
        (spec.num_layers > 0, "num_hidden_layers is 0"),
        (spec.num_kv_heads > 0 and spec.num_heads % spec.num_kv_heads == 0,
         f"{spec.num_heads} heads do not divide among {spec.num_kv_heads} KV heads"),
        (spec.head_dim % 16 == 0, f"head_dim {spec.head_dim} is not a multiple of 16"),
        (spec.dtype in ("float32", "bfloat16"), f"dtype {spec.dtype} (float32 or bfloat16 only)"),
        (not any(spec.layer_is_sparse) or index_heads == spec.num_kv_heads,
         f"{index_heads} index heads for {spec.num_kv_heads} KV heads (they must be equal)"),
        (spec.index_dim % 16 == 0 and spec.rotary_dim <= spec.index_dim,
         f"index dim {spec.index_dim} with {spec.rotary_dim} rotated channels"),
        (block == BLOCK_TOKENS, f"blocks of {block} tokens (only {BLOCK_TOKENS})"),
        (local == 1, f"{local} local blocks (only 1)"),
        (initial == 0, f"{initial} initial blocks (only 0)"),
        (score == "max", f"block score {score!r} (only 'max')"),
        (spec.topk_blocks >= 1, "a selection of 0 blocks"),
        (not any(spec.layer_is_moe) or 1 <= spec.experts_per_token <= spec.num_experts,
         f"top-{spec.experts_per_token} of {spec.num_experts} experts"),
        (config.optional("use_gemma_norm", True) is True, "norms that are not Gemma's"),
        (config.optional("qk_norm_type", "per_head") == "per_head", "q/k norm not per head"),
        (config.optional("attention_bias", False) is False, "attention biases"),
        (config.optional("scoring_func", "sigmoid") == "sigmoid", "router not sigmoid"),
    )  # fmt: skip
    for holds, what in rules:
        if not holds:
            raise UnsupportedError(f"this model is not served: config.json asks for {what}")

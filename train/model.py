"""The demo model as it is trained: the served model's arithmetic on whole sequences.

Parameters bear the hub's names and are fp32; products are in `dtype`. Every expert computes every
token and all but four have weight 0: four times the arithmetic of routing, in large products that
need no sorting, which is quicker at this size. Knows nothing of data, losses or files.

B sequences of T tokens, M = B T tokens, H hidden, N heads, G KV heads (and index heads), D
head_dim, E experts. All but attention sees tokens in one row [M, ...], so that it is compiled once
for all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from train import quantise
from train.attention import Selector, dense, sparse
from train.quantise import straight_through
from winnow.spec.model import ModelSpec


@dataclass(frozen=True)
class State:
    """What is quantised and how attention chooses: `attention` is dense, sparse or random."""

    attention: str = "sparse"
    kv_format: str = "model"
    index_format: str = "model"
    quantised_weights: bool = False
    exact_scores: bool = False
    """Index scores in fp32, as servers have them, and not in the compute dtype."""


@dataclass
class LayerProbe:
    """Of one sparse layer: what a loss or an evaluation wants to see. Detached but `index_*`."""

    q: Tensor
    """[B, N, T, D]"""
    k: Tensor
    """[B, G, T, D]"""
    index_q: Tensor
    """[B, G, T, index_dim]"""
    index_k: Tensor
    """[B, 1, T, index_dim]"""
    selected: Tensor | None
    """bool [B, G, T, blocks]; None where attention was dense."""


@dataclass
class Outputs:
    """`hidden` [M, H] before the head; `loads` [E] tokens of each expert, a layer each;
    `probes`, where asked for, by layer."""

    hidden: Tensor
    loads: list[Tensor] = field(default_factory=list)
    probes: dict[int, LayerProbe] = field(default_factory=dict)


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1.0 + self.weight)).to(x.dtype)


class Linear(nn.Module):
    """A matrix [N, K], or [E, N, K]; `gain` scales an initial spread of 1 / sqrt(K)."""

    def __init__(self, *shape: int, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * gain * shape[-1] ** -0.5)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, *, is_sparse: bool) -> None:
        super().__init__()
        hidden, dim = spec.hidden_size, spec.head_dim
        self.spec = spec
        self.is_sparse = is_sparse
        self.q_proj = Linear(spec.num_heads * dim, hidden)
        self.k_proj = Linear(spec.num_kv_heads * dim, hidden)
        self.v_proj = Linear(spec.num_kv_heads * dim, hidden)
        self.o_proj = Linear(hidden, spec.num_heads * dim, gain=0.0)
        self.q_norm = Norm(dim, spec.norm_eps)
        self.k_norm = Norm(dim, spec.norm_eps)
        if is_sparse:
            self.index_q_proj = Linear(spec.num_index_heads * spec.index_dim, hidden)
            self.index_k_proj = Linear(spec.index_dim, hidden)
            self.index_q_norm = Norm(spec.index_dim, spec.norm_eps)
            self.index_k_norm = Norm(spec.index_dim, spec.norm_eps)

    def inputs(self, x: Tensor, rope: tuple[Tensor, Tensor], state: State) -> tuple[Tensor, ...]:
        """q [M, N, D], k and v [M, G, D] as the cache gives them back."""
        spec, quantised = self.spec, state.quantised_weights
        weights = [
            _matrix(p.weight, x.dtype, quantised) for p in (self.q_proj, self.k_proj, self.v_proj)
        ]
        qkv = F.linear(x, torch.cat(weights)).unflatten(-1, (-1, spec.head_dim))
        q, k, v = qkv.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        q, k = rotated(self.q_norm, q, rope), rotated(self.k_norm, k, rope)
        return q, quantise.cached(k, state.kv_format), quantise.cached(v, state.kv_format)

    def index_inputs(
        self, x: Tensor, rope: tuple[Tensor, Tensor], state: State
    ) -> tuple[Tensor, Tensor]:
        """index_q [M, G, index_dim] and index_k [M, 1, index_dim]. The trunk gets no gradient: it
        does not learn to be easy to index."""
        projections = (self.index_q_proj, self.index_k_proj)
        weights = [_matrix(p.weight, x.dtype, state.quantised_weights) for p in projections]
        index = F.linear(x.detach(), torch.cat(weights)).unflatten(-1, (-1, self.spec.index_dim))
        index_q, index_k = index.split((self.spec.num_index_heads, 1), dim=1)
        index_k = quantise.cached(rotated(self.index_k_norm, index_k, rope), state.index_format)
        return rotated(self.index_q_norm, index_q, rope), index_k


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, hidden)
        self.up_proj = Linear(width, hidden)
        self.down_proj = Linear(hidden, width, gain=0.0)

    def forward(self, x: Tensor, spec: ModelSpec, state: State) -> Tensor:
        quantised = state.quantised_weights
        gate, up = (
            F.linear(x, _matrix(p.weight, x.dtype, quantised))
            for p in (self.gate_proj, self.up_proj)
        )
        inner = activation(gate, up, spec).to(x.dtype)
        return F.linear(inner, _matrix(self.down_proj.weight, x.dtype, quantised))


class Moe(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts, width, hidden = spec.num_experts, spec.expert_width, spec.hidden_size
        self.spec = spec
        self.gate = Linear(experts, hidden)
        self.e_score_correction_bias = nn.Buffer(torch.zeros(experts))
        self.w1 = Linear(experts, width, hidden)
        self.w3 = Linear(experts, width, hidden)
        self.w2 = Linear(experts, hidden, width, gain=0.0)
        self.shared_experts = Mlp(hidden, spec.shared_width)

    def shares(self, x: Tensor) -> Tensor:
        """fp32 [M, E]: each expert's weight, 0 for those not chosen."""
        scores = torch.sigmoid(F.linear(x.float(), self.gate.weight))
        ranked = scores.detach() + self.e_score_correction_bias
        chosen = ranked.topk(self.spec.experts_per_token, dim=-1).indices
        kept = scores * torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        return kept / kept.sum(-1, keepdim=True) * self.spec.routed_scale

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        shares = self.shares(x)
        weights: tuple[Tensor, ...] = (self.w1.weight, self.w3.weight, self.w2.weight)
        if state.quantised_weights:
            *pair, alone = (weight.detach() for weight in weights)
            shared, own = quantise.expert_scale(*pair), quantise.expert_scale(alone)
            weights = tuple(
                straight_through(weight, quantise.nvfp4(weight, scale))
                for weight, scale in zip(weights, (shared, shared, own), strict=True)
            )
        w1, w3, w2 = weights
        gate, up = (F.linear(x, w.flatten(0, 1).to(x.dtype)) for w in (w1, w3))
        inner = activation(gate, up, self.spec).unflatten(-1, (shares.shape[-1], -1))
        inner = (inner * shares.unsqueeze(-1)).flatten(-2).to(x.dtype)
        out = F.linear(inner, w2.transpose(0, 1).flatten(1).to(x.dtype))
        load = (shares > 0).float().sum(0)
        return out + self.shared_experts(x, self.spec, state), load


class Layer(nn.Module):
    def __init__(self, spec: ModelSpec, number: int) -> None:
        super().__init__()
        self.spec = spec
        self.input_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.self_attn = Attention(spec, is_sparse=spec.layer_is_sparse[number])
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.norm_eps)
        self.is_moe = spec.layer_is_moe[number]
        self.mlp = Moe(spec) if self.is_moe else Mlp(spec.hidden_size, spec.dense_width)

    def before(self, x: Tensor, rope: tuple[Tensor, Tensor], state: State) -> tuple[Tensor, ...]:
        """q, k, v, and on sparse layers index_q and index_k."""
        x = self.input_layernorm(x)
        parts = self.self_attn.inputs(x, rope, state)
        if self.self_attn.is_sparse:
            parts += self.self_attn.index_inputs(x, rope, state)
        return parts

    def after(self, x: Tensor, attended: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        """The layer's output and the experts' loads from what attention [M, N, D] gave."""
        weight = _matrix(self.self_attn.o_proj.weight, x.dtype, state.quantised_weights)
        x = x + F.linear(attended.flatten(1), weight)
        inner = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Moe):
            out, load = self.mlp(inner, state)
            return x + out, load
        return x + self.mlp(inner, self.spec, state), None


class DemoModel(nn.Module):
    """`compiled` compiles attention and the layers around it; only for CUDA."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, compiled: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.embed_tokens = nn.Parameter(torch.randn(spec.vocab_size, spec.hidden_size) * 0.3)
        self.layers = nn.ModuleList(Layer(spec, i) for i in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec.norm_eps)
        self.lm_head = Linear(spec.vocab_size, spec.hidden_size, gain=0.2)
        self.selector = Selector(spec.topk_blocks, compiled=compiled)
        self.compile_layers(compiled)

    def compile_layers(self, compiled: bool) -> None:
        """Whether the layers around attention are compiled: not worth it for a few passes."""
        self._before = torch.compile(Layer.before, dynamic=False) if compiled else Layer.before
        self._after = torch.compile(Layer.after, dynamic=False) if compiled else Layer.after

    def forward(self, ids: Tensor, state: State, *, probe: bool = False) -> Outputs:
        """`ids` int64 [B, T], T a multiple of 128."""
        batch, tokens = ids.shape
        cos, sin = rope_tables(tokens, self.spec, ids.device)
        rope = cos.repeat(batch, 1), sin.repeat(batch, 1)
        x = F.embedding(ids.flatten(), self.embed_tokens.to(self.dtype))
        out = Outputs(x)
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            parts = self._before(layer, x, rope, state)
            q, k, v, *index = (p.unflatten(0, (batch, tokens)).transpose(1, 2) for p in parts)
            selected = None
            if not index or state.attention == "dense":
                attended = dense(q, k, v)
            else:
                index_q, index_k = index
                selected = self.selector(
                    index_q, index_k, state.attention, exact=state.exact_scores
                )
                attended = sparse(q, k, v, selected, compiled=self.selector.compiled)
            if index and probe:
                index_q, index_k = index
                out.probes[number] = LayerProbe(q.detach(), k.detach(), index_q, index_k, selected)
            x, load = self._after(layer, x, attended.transpose(1, 2).flatten(0, 1), state)
            if load is not None:
                out.loads.append(load)
        out.hidden = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.lm_head.weight.to(hidden.dtype))


def make(spec: ModelSpec, dtype: torch.dtype, seed: int, *, compiled: bool) -> DemoModel:
    """A new model, the same for the same seed."""
    torch.manual_seed(seed)
    return DemoModel(spec, dtype, compiled=compiled)


def rope_tables(length: int, spec: ModelSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [T, rotary_dim / 2]."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    angles = torch.arange(length, dtype=torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def rotated(norm: Norm, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Norm and rotation of heads [M, heads, dim], in fp32, then back to x's dtype."""
    cos, sin = (table.unsqueeze(1) for table in rope)
    half = cos.shape[-1]
    wide = norm(x.float())
    first, second, rest = wide.split((half, half, wide.shape[-1] - 2 * half), dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return turned.to(x.dtype)


def activation(gate: Tensor, up: Tensor, spec: ModelSpec) -> Tensor:
    """fp32, of the shape of both."""
    gate = gate.float().clamp(max=spec.swiglu_limit)
    up = up.float().clamp(min=-spec.swiglu_limit, max=spec.swiglu_limit)
    return gate * torch.sigmoid(gate * spec.swiglu_alpha) * (up + spec.swiglu_beta)


def _matrix(weight: Tensor, dtype: torch.dtype, quantised: bool) -> Tensor:
    """A linear's weight in the compute dtype, through MXFP8 if it is to be so."""
    return (straight_through(weight, quantise.mxfp8(weight)) if quantised else weight).to(dtype)

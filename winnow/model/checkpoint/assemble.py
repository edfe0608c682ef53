"""From matrices and plain tensors by role to the weights of a model. Knows neither files nor where
the values come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from winnow.model.weights import LayerWeights
from winnow.ops.weights import (
    AttentionWeights,
    MlpWeights,
    MoeWeights,
    Mxfp8Weight,
    Nvfp4Weight,
    PlainWeight,
    Weight,
)


def allocate(
    weight_format: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Weight:
    """An uninitialised weight of logical shape [..., N, K], held as `weight_format`: "plain" (in
    `dtype`), "mxfp8" or "nvfp4"."""
    *lead, rows, columns = shape

    def empty(last: int, kind: torch.dtype) -> Tensor:
        return torch.empty((*lead, rows, last), dtype=kind, device=device)

    match weight_format:
        case "plain":
            return PlainWeight(empty(columns, dtype))
        case "mxfp8":
            return Mxfp8Weight(
                empty(columns, torch.float8_e4m3fn), empty(columns // 32, torch.uint8)
            )
        case "nvfp4":
            return Nvfp4Weight(
                empty(columns // 2, torch.uint8),
                empty(columns // 16, torch.float8_e4m3fn),
                torch.empty((*lead, rows), dtype=torch.float32, device=device),
            )
    raise ValueError(f"no weight format {weight_format!r}")


def layer_weights(matrices: dict[str, Weight], plain: dict[str, Tensor]) -> LayerWeights:
    """One layer; the roles are those of `winnow.model.checkpoint.names.layer_names`."""
    mlp: MlpWeights | MoeWeights
    if "router" in plain:
        mlp = MoeWeights(
            router=plain["router"],
            router_bias=plain["router_bias"],
            gate_up=matrices["expert_gate_up"],
            down=matrices["expert_down"],
            shared=MlpWeights(matrices["shared_gate_up"], matrices["shared_down"]),
        )
    else:
        mlp = MlpWeights(matrices["gate_up"], matrices["down"])
    attention = AttentionWeights(
        qkv=matrices["qkv"],
        q_norm=plain["q_norm"],
        k_norm=plain["k_norm"],
        index=matrices.get("index"),
        index_q_norm=plain.get("index_q_norm"),
        index_k_norm=plain.get("index_k_norm"),
        out=matrices["out"],
    )
    return LayerWeights(plain["input_norm"], attention, plain["post_norm"], mlp)

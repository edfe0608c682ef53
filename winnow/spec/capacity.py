"""What a model takes and what fits: the sums behind `winnow plan`. No torch, no measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from winnow.errors import CheckpointError, UnsupportedError
from winnow.spec.formats import BF16, FP32, MXFP8, NVFP4, Format, cache_format
from winnow.spec.memory import MemoryPlan, bytes_per_token, plan_memory, weight_bytes
from winnow.spec.model import BLOCK_TOKENS, ModelSpec
from winnow.spec.page import RowLayout
from winnow.spec.presets import PRESETS, preset

WEIGHT_FORMATS: dict[str, tuple[Format | None, Format | None]] = {
    "none": (None, None),
    "mxfp8": (MXFP8, MXFP8),
    "modelopt-nvfp4": (NVFP4, None),
    "mixed-nvfp4": (NVFP4, MXFP8),
}
"""Formats of (routed experts, other matrices) by kind of checkpoint; None is the plain dtype."""


@dataclass(frozen=True)
class Capacity:
    """Bytes of one device: weights by part, one token and one page row by part, and what fits.

    `num_tokens` is None when no memory was given.
    """

    model: str
    weights: dict[str, int]
    weight_bytes: int
    kv_format: str
    index_format: str
    token_bytes: dict[str, int]
    row_parts: dict[str, int]
    row_bytes: int
    row_pieces: int
    num_pages: int | None
    num_tokens: int | None
    usable_bytes: int | None


def open_spec(model: str) -> ModelSpec:
    """The spec of a preset or of a checkpoint directory's config.json."""
    if model in PRESETS:
        return preset(model)
    path = Path(model) / "config.json"
    if not path.is_file():
        raise UnsupportedError(
            f"{model!r} is neither a preset ({', '.join(PRESETS)}) nor a directory with config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return ModelSpec.from_hf(config)


def capacity(
    model: str,
    *,
    kv_format: str = "model",
    index_format: str = "model",
    memory_bytes: int | None = None,
    memory_fraction: float = 0.9,
    reserve_bytes: int = 0,
    tp_size: int = 1,
    draft_layers: int = 0,
) -> Capacity:
    """Add up a model. With `memory_bytes`, also the pages and tokens that fit beside its weights.

    Raises CapacityError when the weights alone do not fit.
    """
    spec = open_spec(model)
    if memory_bytes is not None and tp_size > 1:
        raise UnsupportedError("weights are counted for one device: leave out --tp or --memory-gb")
    plain = {"float32": FP32, "bfloat16": BF16}[spec.dtype]
    experts, linear = WEIGHT_FORMATS[spec.quantization]
    weights = weight_bytes(spec, experts or plain, linear or plain, plain)
    layout = RowLayout.of(
        spec,
        cache_format(kv_format, plain),
        cache_format(index_format, plain),
        tp_size=tp_size,
        draft_layers=draft_layers,
    )
    token = bytes_per_token(layout)
    memory: MemoryPlan | None = None
    if memory_bytes is not None:
        total = sum(weights.values())
        memory = plan_memory(memory_bytes, total, layout.row_bytes, memory_fraction, reserve_bytes)
    return Capacity(
        model=model,
        weights=weights,
        weight_bytes=sum(weights.values()),
        kv_format=layout.kv_format.name,
        index_format=layout.index_format.name,
        token_bytes={"kv": token.kv, "index": token.index, "draft": token.draft},
        row_parts={
            "index": layout.index_bytes,
            "kv": layout.kv_bytes,
            "draft": layout.draft_bytes,
        },
        row_bytes=layout.row_bytes,
        row_pieces=len(list(layout.pieces())),
        num_pages=None if memory is None else memory.num_pages,
        num_tokens=None if memory is None else memory.num_tokens,
        usable_bytes=None if memory is None else memory.usable_bytes,
    )


def render(plan: Capacity) -> str:
    """The same for people."""
    return "\n".join(_lines(plan))


def _lines(plan: Capacity) -> Iterator[str]:
    yield f"{plan.model}: weights {plan.weight_bytes:,} bytes ({plan.weight_bytes / 1e9:.1f} GB)"
    for part, num_bytes in plan.weights.items():
        yield f"  {part:16} {num_bytes:>20,}"
    yield (
        f"KV cache in {plan.kv_format}, index cache in {plan.index_format}: "
        f"{sum(plan.token_bytes.values()):,} bytes per token, "
        f"{plan.row_bytes:,} per page row of {BLOCK_TOKENS} tokens in {plan.row_pieces} pieces"
    )
    for part, num_bytes in plan.token_bytes.items():
        yield f"  {part:16} {num_bytes:>20,} per token {plan.row_parts[part]:>16,} per row"
    if plan.num_tokens is not None and plan.usable_bytes is not None:
        yield (
            f"fits beside the weights in {plan.usable_bytes:,} usable bytes: "
            f"{plan.num_pages:,} pages, {plan.num_tokens:,} tokens"
        )

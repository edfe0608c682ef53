"""A small random checkpoint of the family, complete with config and tokenizer, under the hub's
names: for tests and for a first run without a download. Knows nothing of serving.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from winnow.errors import UnsupportedError
from winnow.model.checkpoint.names import HUB_PREFIX, layer_names, top_names
from winnow.model.checkpoint.reader import SINGLE_FILE
from winnow.model.checkpoint.tiny_config import (
    VISION_WIDTH,
    TinyGeometry,
    byte_tokenizer,
    tiny_config,
    tokenizer_config,
)
from winnow.model.checkpoint.writer import save
from winnow.spec.model import ModelSpec

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""The family's chat format, for checkpoints that are made here."""


def make_tiny(directory: Path | str, seed: int = 0, **geometry: int) -> ModelSpec:
    """Write a random bf16 checkpoint with a byte-level tokenizer into `directory`.

    Returns its spec. `geometry` overrides fields of TinyGeometry. Matrices have standard deviation
    1 / sqrt(K) and norm weights 0.1, so that activations stay near unit scale. Raises
    UnsupportedError for an unknown field, a geometry that is not served, or a directory that
    already holds a checkpoint.
    """
    directory = Path(directory)
    known = [field.name for field in fields(TinyGeometry)]
    unknown = sorted(set(geometry) - set(known))
    if unknown:
        raise UnsupportedError(f"no tiny geometry {', '.join(unknown)}: use {', '.join(known)}")
    if (directory / "config.json").exists():
        raise UnsupportedError(f"{directory} already holds a checkpoint: choose another directory")
    tokenizer = byte_tokenizer()
    config = tiny_config(TinyGeometry(**geometry), tokenizer)
    spec = ModelSpec.from_hf(config)
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(_text_tensors(spec, generator)) | dict(_vision_tensors(spec, generator))
    save(tensors, directory / SINGLE_FILE)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", tokenizer_config())
    shutil.copyfile(CHAT_TEMPLATE, directory / CHAT_TEMPLATE.name)
    _write(
        directory / "generation_config.json",
        {"bos_token_id": spec.bos_id, "eos_token_id": list(spec.eos_ids)},
    )
    _write(directory / "config.json", config)
    return spec


def _text_tensors(spec: ModelSpec, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    for role, tensor in top_names(spec).items():
        std = {"embedding": 1.0, "final_norm": 0.1}.get(role, spec.hidden_size**-0.5)
        yield HUB_PREFIX + tensor.name, _normal(tensor.shape, std, generator)
    for layer in range(spec.num_layers):
        names = layer_names(spec, layer)
        for role, tensor in names.plain.items():
            std = {"router": spec.hidden_size**-0.5, "router_bias": 0.01}.get(role, 0.1)
            yield HUB_PREFIX + tensor.name, _normal(tensor.shape, std, generator)
        for matrix in names.matrices.values():
            for number in range(max(matrix.num_experts, 1)):
                for piece in matrix.pieces:
                    shape = (piece.rows, matrix.columns)
                    values = _normal(shape, matrix.columns**-0.5, generator)
                    yield f"{HUB_PREFIX}{piece.name.format(number)}.weight", values


def _vision_tensors(spec: ModelSpec, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The smallest vision tower, so that the checkpoint is whole for those who read images."""
    width, merged = VISION_WIDTH, 4 * spec.hidden_size
    tower = "vision_tower.vision_model"
    yield (
        f"{tower}.embeddings.patch_embedding.weight",
        _normal((width, 3, 2, 2, 2), 24**-0.5, generator),
    )
    layer = f"{tower}.encoder.layers.0"
    norms = [f"{tower}.pre_layrnorm", f"{layer}.layer_norm1", f"{layer}.layer_norm2"]
    for name in norms:
        yield f"{name}.weight", torch.ones(width, dtype=torch.bfloat16)
        yield f"{name}.bias", torch.zeros(width, dtype=torch.bfloat16)
    square = [f"{layer}.self_attn.{p}_proj" for p in ("q", "k", "v", "out")]
    linears = dict.fromkeys([*square, f"{layer}.mlp.fc1", f"{layer}.mlp.fc2"], (width, width))
    linears |= {
        "multi_modal_projector.linear_1": (width, width),
        "multi_modal_projector.linear_2": (spec.hidden_size, width),
        "patch_merge_mlp.linear_1": (width, merged),
        "patch_merge_mlp.linear_2": (spec.hidden_size, width),
    }
    for name, shape in linears.items():
        yield f"{name}.weight", _normal(shape, math.prod(shape[1:]) ** -0.5, generator)
        yield f"{name}.bias", torch.zeros(shape[0], dtype=torch.bfloat16)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

"""What a checkpoint holds on disk, by named parts: the text model, images and drafts.

The text model is counted by `winnow.spec.memory`; this module adds what loading skips, from the
config's own keys. Reads no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from winnow.errors import CheckpointError
from winnow.spec.formats import Format
from winnow.spec.memory import matrix_bytes, weight_bytes
from winnow.spec.model import ModelSpec


def checkpoint_bytes(
    config: Mapping[str, Any],
    spec: ModelSpec,
    expert_format: Format,
    linear_format: Format,
    plain_format: Format,
) -> dict[str, int]:
    """Bytes of `winnow.spec.memory.PARTS` and of `vision_tower`, `projector` and `mtp` on disk.

    `config` is the whole config.json that `spec` was read from; parts that it does not name are 0.
    Global scales (two scalars a matrix) and file headers are left out: below a thousandth.
    """
    formats = (expert_format, linear_format, plain_format)
    vision = config.get("vision_config") or {}
    text = config.get("text_config") or config
    num_mtp = _size(text, "num_mtp_modules", 0)
    return {
        **weight_bytes(spec, *formats, row_scales=False),
        "vision_tower": plain_format.nbytes(_vision_values(vision)) if vision else 0,
        "projector": plain_format.nbytes(_projector_values(config, vision, spec)) if vision else 0,
        "mtp": num_mtp * _mtp_bytes(spec, *formats) if num_mtp else 0,
    }


def _vision_values(vision: Mapping[str, Any]) -> int:
    """A CLIP tower: patches, one norm before the layers; in each four projections, two matrices
    and two norms, all with biases (transformers 5.24, models/minimax_m3_vl)."""
    hidden, width = _size(vision, "hidden_size", 1280), _size(vision, "intermediate_size", 5120)
    patch = _size(vision, "num_channels", 3) * _size(vision, "temporal_patch_size", 2)
    patch *= _size(vision, "patch_size", 14) ** 2
    layer = 4 * (hidden + 1) * hidden + (2 * width + 1) * hidden + width + 4 * hidden
    return (patch + 2) * hidden + _size(vision, "num_hidden_layers", 32) * layer


def _projector_values(config: Mapping[str, Any], vision: Mapping[str, Any], spec: ModelSpec) -> int:
    """Two MLPs with biases: every patch to the text's width, then merged patches to one token."""
    hidden = spec.hidden_size
    width = _size(config, "projector_hidden_size", hidden)
    merged = _size(vision, "spatial_merge_size", 2) ** 2 * hidden
    first = (_size(vision, "hidden_size", 1280) + 1) * width + (width + 1) * hidden
    return first + (merged + 1) * width + (width + 1) * hidden


def _mtp_bytes(
    spec: ModelSpec, expert_format: Format, linear_format: Format, plain_format: Format
) -> int:
    """A module that predicts one token more: a layer like the last one, three norms, and a
    projection of hidden state and embedding together (2H to H), sharing embedding and head.

    The form is DeepSeek-V3's (arXiv 2412.19437, section 2.2); that M3's is the same is deduced
    from its checkpoint's published size, which the sum meets to 0.01%.
    """
    formats = (expert_format, linear_format, plain_format)
    layer = weight_bytes(spec.with_layers(1), *formats, row_scales=False)
    own = sum(layer.values()) - layer["embedding"] - layer["head"]
    hidden = spec.hidden_size
    joined = matrix_bytes(linear_format, hidden, 2 * hidden, row_scales=False)
    return own + joined + plain_format.nbytes(2 * hidden)


def _size(config: Mapping[str, Any], key: str, default: int) -> int:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"config.json: {key!r} is {value!r}, not a whole number")
    return value

"""generation_config.json: how a checkpoint's makers want it sampled, and what ends its answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config import CHECKPOINT_SAMPLING
from winnow.errors import CheckpointError
from winnow.model.checkpoint.reader import read_json

NAME = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """What of the file is used. Nothing, where there is none."""

    sampling: dict[str, Any]
    """Of CHECKPOINT_SAMPLING what it gives, as it stands there."""
    eos_ids: tuple[int, ...]


def read_generation_config(directory: Path) -> GenerationConfig:
    """CheckpointError for a file that is damaged or whose end tokens are no ids."""
    path = directory / NAME
    if not path.exists():
        return GenerationConfig({}, ())
    given = read_json(path)
    eos = given.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise CheckpointError(
            f"{path}: eos_token_id is {eos!r}: it must be an id, or a list of ids"
        )
    sampling = {name: given[name] for name in CHECKPOINT_SAMPLING if given.get(name) is not None}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    return GenerationConfig(sampling, ids)

"""Tensors into safetensors files of bounded size with an index. Knows nothing of models."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from winnow.errors import CheckpointError
from winnow.model.checkpoint.reader import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 2**30


class ShardWriter:
    """Collects tensors until they fill a file, then writes it. Needs memory for one file, or for
    one tensor where that is larger."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = directory
        self.shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self.total_bytes = 0
        """Of the tensors in files that are written."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a contiguous tensor, which the caller must not change any more."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.shard_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left; name the files by their number and list them in the index."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.directory / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        (self.directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number}"

    def _flush(self) -> None:
        save(self._pending, self._part(len(self._shards)))
        self._shards.append(list(self._pending))
        self.total_bytes += self._pending_bytes
        self._pending = {}
        self._pending_bytes = 0


def save(tensors: dict[str, Tensor], file: Path) -> None:
    """One safetensors file, readable by whom its directory is."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        # What the library says of a full disk is not an OSError.
        raise CheckpointError(f"{file} cannot be written: {error}") from error
    # safetensors writes for the owner alone, whatever the umask.
    file.chmod(file.parent.stat().st_mode & 0o666)

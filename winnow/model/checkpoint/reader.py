"""The safetensors files of a checkpoint: headers checked up front, tensors read one at a time.
Knows names, dtypes and shapes, and nothing of what they mean.

File format: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes
(safetensors' README). It is read here and not by the library for two reasons: errors name the
tensor, and reading never maps a file, whose pages would count as a second copy of the model.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from winnow.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I8": torch.int8,
    "U8": torch.uint8,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor; `dtype` is safetensors' word, `start` counts from the
    file's first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class CheckpointFiles:
    """All tensors of a directory by their stored names."""

    def __init__(self, directory: Path) -> None:
        """Find and check the files; CheckpointError for a missing, damaged or doubled one."""
        self.directory = directory
        self.tensors: dict[str, TensorInfo] = {}
        for file, listed in _files(directory).items():
            header = read_header(file)
            for name, info in header.items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"{file}: tensor {name} is also in {self.tensors[name].file.name}: "
                        "remove one of the two"
                    )
                self.tensors[name] = info
            for name in listed:
                if name not in header:
                    raise CheckpointError(
                        f"{file}: lacks tensor {name}, which {INDEX_FILE} says it holds"
                    )

    def read(self, name: str, index: int | None = None) -> Tensor:
        """One stored tensor, or one entry of its first axis, as a new CPU tensor."""
        info = self.tensors[name]
        shape, start, nbytes = info.shape, info.start, info.nbytes
        if index is not None:
            nbytes //= shape[0]
            start += index * nbytes
            shape = shape[1:]
        try:
            raw = np.fromfile(info.file, dtype=np.uint8, count=nbytes, offset=start)
        except OSError as error:
            raise CheckpointError(f"{info.file}: tensor {name} cannot be read: {error}") from error
        if raw.nbytes != nbytes:
            raise CheckpointError(
                f"{info.file}: tensor {name} has {nbytes} bytes, {raw.nbytes} could be read: "
                "the file has changed since it was opened"
            )
        return torch.from_numpy(raw).view(_DTYPES[info.dtype]).reshape(shape)


def _files(directory: Path) -> dict[Path, list[str]]:
    """Each weight file with the names that the index lists for it (none without an index)."""
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise CheckpointError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {single: []}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    files: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: tensor {name} is in {file!r}, which is no file name")
        files.setdefault(directory / file, []).append(name)
    for path, names in files.items():
        if not path.is_file():
            raise CheckpointError(
                f"{index}: names {path.name} for tensor {names[0]} and {len(names) - 1} more, "
                "but there is no such file: download it again"
            )
    if single.is_file() and single not in files:
        raise CheckpointError(
            f"{directory} holds {SINGLE_FILE} and an {INDEX_FILE} that does not name it: "
            "remove the one that is out of date"
        )
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError when the file is missing or is anything else."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; CheckpointError for a damaged or truncated one."""
    try:
        with file.open("rb") as stream:
            file_bytes = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            fits = 8 + length <= file_bytes and length <= _MAX_HEADER_BYTES
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not fits:
        raise CheckpointError(
            f"{file}: {file_bytes} bytes cannot hold a header of {length}: the file is "
            "truncated or no safetensors file"
        )
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: _info(file, name, entry, start, file_bytes - start) for name, entry in header.items()
    }


def _info(file: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> TensorInfo:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: tensor {name}: damaged header entry {entry!r}") from error
    if not all(type(number) is int for number in (start, end, *shape)):
        raise CheckpointError(f"{file}: tensor {name}: damaged header entry {entry!r}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name}: unknown dtype {dtype!r}")
    if end > data_bytes:
        raise CheckpointError(
            f"{file}: tensor {name} ends at byte {end} of the data, the file has {data_bytes}: "
            "it is truncated, download it again"
        )
    if min(start, *shape, 0) < 0 or end - start != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise CheckpointError(
            f"{file}: tensor {name}: bytes {start} to {end} do not hold {dtype} {list(shape)}"
        )
    return TensorInfo(file, dtype, shape, data_start + start, end - start)

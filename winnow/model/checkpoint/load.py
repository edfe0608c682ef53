"""A checkpoint's tensors into the weights of a model. Knows memory formats, not file formats.

Every stacked tensor is allocated once and filled from the files one stored tensor at a time, so
that loading needs the model's own size and one stored tensor more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from winnow.errors import CheckpointError
from winnow.model.checkpoint.assemble import allocate, layer_weights
from winnow.model.checkpoint.forms import PACKED_NVFP4, Form
from winnow.model.checkpoint.reader import CheckpointFiles
from winnow.model.checkpoint.resolve import (
    StoredMatrix,
    StoredModel,
    StoredPiece,
    resolve,
)
from winnow.model.weights import ModelWeights, Prepare, as_stored, prepared
from winnow.ops.paged import CacheScales
from winnow.ops.weights import Mxfp8Weight, Nvfp4Weight, PlainWeight, Weight
from winnow.spec.model import ModelSpec

_E4M3_NAN = 0x7F
_E8M0_NAN = 0xFF


def load_checkpoint(
    directory: Path | str,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: bool = True,
    device: torch.device | str = "cpu",
    report: Callable[[int, int], None] | None = None,
    prepare: Prepare = as_stored,
) -> ModelWeights:
    """The weights in `directory`, each matrix in the format in which it is stored.

    Unquantised weights come in `dtype` (float32 or bfloat16), norms and router in fp32. A
    progress bar shows bytes read, on a terminal only; `report` gets them too, and their total,
    after every tensor. Each layer goes through `prepare` as soon as it is read. Raises
    CheckpointError, before anything is read where headers show the fault, and names the file and
    the tensor.
    """
    files = CheckpointFiles(Path(directory))
    stored = resolve(files, spec)
    total = sum(info.nbytes for info in files.tensors.values())
    total -= sum(files.tensors[name].nbytes for name in stored.extra)
    # None lets tqdm look whether stderr is a terminal.
    hidden = None if progress else True
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=hidden) as bar:
        done = 0

        def read(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            bar.update(num_bytes)
            if report is not None:
                report(done, total)

        loader = _Loader(files, dtype, torch.device(device), read)
        return loader.model(stored, spec, prepare)


class _Loader:
    """Copies stored tensors into allocated ones."""

    def __init__(
        self,
        files: CheckpointFiles,
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[int], None],
    ) -> None:
        self.files = files
        self.dtype = dtype
        self.device = device
        self.read = read

    def model(self, stored: StoredModel, spec: ModelSpec, prepare: Prepare) -> ModelWeights:
        cache_scales = tuple(
            CacheScales(**{role: self._cache_scale(name) for role, name in layer.items()})
            for layer in stored.cache_scales
        )
        embedding = self._plain(stored.plain["embedding"], self.dtype)
        head = embedding
        if "head" in stored.plain:
            head = self._plain(stored.plain["head"], self.dtype)
        if spec.tied_embeddings and head is not embedding:
            self._refuse(
                stored.plain["head"],
                head != embedding,
                "values unlike the embedding's, to which config.json ties it",
            )
            head = embedding
        layers = tuple(
            prepared(
                layer_weights(
                    {role: self._matrix(matrix) for role, matrix in layer.matrices.items()},
                    {role: self._exact(name) for role, name in layer.plain.items()},
                ),
                prepare,
            )
            for layer in stored.layers
        )
        final_norm = self._exact(stored.plain["final_norm"])
        return ModelWeights(embedding, layers, final_norm, PlainWeight(head), cache_scales or None)

    def _matrix(self, stored: StoredMatrix) -> Weight:
        """Allocate a weight and fill it expert by expert, piece by piece."""
        matrix = stored.matrix
        lead = (matrix.num_experts,) if matrix.is_expert else ()
        shape = (*lead, matrix.rows, matrix.columns)
        weight = allocate(stored.form.format, shape, self.dtype, self.device)
        for number, pieces in enumerate(stored.experts):
            row = 0
            for piece in pieces:
                rows = slice(row, row + piece.rows)
                self._fill(weight, (number, rows) if lead else (rows,), piece, stored.form)
                row += piece.rows
        return weight

    def _fill(
        self, weight: Weight, place: tuple[int | slice, ...], piece: StoredPiece, form: Form
    ) -> None:
        names = piece.names
        match weight:
            case PlainWeight(data):
                data[place].copy_(self._read(names[0], piece.index))
            case Mxfp8Weight(codes, scales):
                codes[place].copy_(self._read(names[0]))
                exponents = self._read(names[1]).view(torch.uint8)
                self._refuse(names[1], exponents == _E8M0_NAN, "NaN scales")
                scales[place].copy_(exponents)
            case Nvfp4Weight(codes, scales, global_scales):
                codes[place].copy_(self._read(names[0]))
                group_scales = self._read(names[1])
                magnitudes = group_scales.view(torch.uint8) & 0x7F
                self._refuse(names[1], magnitudes == _E4M3_NAN, "NaN scales")
                scales[place].copy_(group_scales)
                global_scales[place] = self._global_scale(names[2], form)

    def _global_scale(self, name: str, form: Form) -> float:
        """The dequantisation scale; the packed form stores its reciprocal, the encode scale."""
        stored = self._read(name).reshape(())
        scale = stored.reciprocal() if form is PACKED_NVFP4 else stored
        if not (stored.isfinite() and scale.isfinite() and scale >= 0):
            raise CheckpointError(
                f"{self.files.tensors[name].file}: tensor {name} is {stored.item()}, "
                "which is no global scale"
            )
        return float(scale)

    def _cache_scale(self, name: str) -> float:
        scale = float(self._read(name))
        if not 0 < scale < math.inf:
            raise CheckpointError(
                f"{self.files.tensors[name].file}: tensor {name} is {scale}: the scale of a cache "
                "must be positive and finite"
            )
        return scale

    def _exact(self, name: str) -> Tensor:
        """A norm, router or bias, in fp32."""
        tensor = self._plain(name, torch.float32)
        self._refuse(name, ~tensor.isfinite(), "values that are not finite")
        return tensor

    def _plain(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(self.files.tensors[name].shape, dtype=dtype, device=self.device)
        return tensor.copy_(self._read(name))

    def _read(self, name: str, index: int | None = None) -> Tensor:
        tensor = self.files.read(name, index)
        self.read(tensor.nbytes)
        return tensor

    def _refuse(self, name: str, wrong: Tensor, what: str) -> None:
        count = int(wrong.sum())
        if count:
            raise CheckpointError(
                f"{self.files.tensors[name].file}: tensor {name} has {count} {what}"
            )

"""Stored matrices into their new form on disk, one at a time. Knows the forms' tensors; the number
formats are `winnow.ops.codec`'s, and where the files go is its caller's.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from winnow.errors import CheckpointError
from winnow.model.checkpoint.forms import PACKED_NVFP4, PLAIN, Form
from winnow.model.checkpoint.names import HUB_PREFIX, canonical
from winnow.model.checkpoint.reader import CheckpointFiles
from winnow.model.checkpoint.resolve import StoredMatrix, StoredModel, StoredPiece
from winnow.model.checkpoint.writer import ShardWriter
from winnow.ops.codec import nvfp4_global_scale, quantise_mxfp8, quantise_nvfp4

logger = logging.getLogger(__name__)


class Rewriter:
    """Reads a checkpoint and hands every tensor, in its new form, to a writer."""

    def __init__(self, files: CheckpointFiles, writer: ShardWriter, bar: tqdm[None]) -> None:
        self.files = files
        self.writer = writer
        self.bar = bar
        self.num_uncalibrated = 0
        self.left_plain: list[str] = []

    def model(
        self, stored: StoredModel, expert_form: Form | None, linear_form: Form | None
    ) -> None:
        for name in stored.extra:
            self.writer.add(name, self._read(name))
        for tensors in (stored.plain, *stored.cache_scales):
            for name in tensors.values():
                self._copy(name)
        for layer in stored.layers:
            for name in layer.plain.values():
                self._copy(name)
            for matrix in layer.matrices.values():
                self._matrix(matrix, expert_form if matrix.matrix.is_expert else linear_form)
        self.writer.finish()

    def report(self, destination: Path) -> None:
        """Log what a reader of the new checkpoint must know."""
        if self.num_uncalibrated:
            logger.info(
                "%s: %d %s are 1.0, since activations were not calibrated",
                destination,
                self.num_uncalibrated,
                PACKED_NVFP4.unused,
            )
        if self.left_plain:
            logger.info(
                "%s: %d matrices stay plain, since their columns do not fill groups (first: %s)",
                destination,
                len(self.left_plain),
                self.left_plain[0],
            )

    def _matrix(self, stored: StoredMatrix, form: Form | None) -> None:
        matrix = stored.matrix
        for number, pieces in enumerate(stored.experts):
            if stored.form is not PLAIN:
                for piece in pieces:
                    for name in (*piece.names, *filter(None, (piece.unused,))):
                        self._copy(name)
                continue
            tensors = [self._plain_piece(piece, form) for piece in pieces]
            if len(pieces) != len(matrix.pieces):
                rows = [piece.rows for piece in matrix.pieces]
                tensors = [part.clone() for part in torch.split(tensors[0], rows)]
            names = [piece.name.format(number) for piece in matrix.pieces]
            self._write(dict(zip(names, tensors, strict=True)), form)

    def _plain_piece(self, piece: StoredPiece, form: Form | None) -> Tensor:
        """A stored tensor, which must be finite if it is to be quantised."""
        name = piece.names[0]
        tensor = self._read(name, piece.index)
        count = int((~tensor.isfinite()).sum()) if form else 0
        if count:
            raise CheckpointError(
                f"{self.files.tensors[name].file}: tensor {name} has {count} values that are not "
                "finite: it cannot be quantised"
            )
        return tensor

    def _write(self, pieces: dict[str, Tensor], form: Form | None) -> None:
        """One matrix, of an expert or a linear, in its hub pieces by name."""
        if form and any(piece.shape[-1] % form.group for piece in pieces.values()):
            self.left_plain.extend(pieces)
            form = None
        # Pieces that one kernel multiplies at once share a global scale, as other servers demand.
        encode_scale = _encode_scale(list(pieces.values())) if form is PACKED_NVFP4 else None
        for name, piece in pieces.items():
            if form is None:
                parts = {".weight": piece}
            elif encode_scale is None:
                codes, scales = quantise_mxfp8(piece.float(), strict=True)
                parts = {".weight": codes, ".weight_scale_inv": scales}
            else:
                global_scale = encode_scale.reciprocal()
                codes, scales = quantise_nvfp4(piece.float(), global_scale, strict=True)
                parts = {
                    ".weight_packed": codes,
                    ".weight_scale": scales,
                    ".weight_global_scale": encode_scale.reshape(1).clone(),
                    ".input_global_scale": torch.ones(1),
                }
                self.num_uncalibrated += 1
            for suffix, tensor in parts.items():
                self.writer.add(HUB_PREFIX + name + suffix, tensor)

    def _copy(self, stored: str) -> None:
        """A tensor of the text model as it is, under the hub's name."""
        self.writer.add(HUB_PREFIX + canonical(stored), self._read(stored))

    def _read(self, name: str, index: int | None = None) -> Tensor:
        tensor = self.files.read(name, index)
        self.bar.update(tensor.nbytes)
        return tensor


def _encode_scale(pieces: list[Tensor]) -> Tensor:
    """fp32 []: the reciprocal of the pieces' common global scale, which the packed form stores."""
    return nvfp4_global_scale(torch.cat([piece.float() for piece in pieces])).reciprocal()

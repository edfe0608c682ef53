"""Which stored tensors make up each weight of a model: all checks that need no data. Reads headers
only, so that a checkpoint that cannot be served is refused before any of it is loaded.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from winnow.errors import CheckpointError, UnsupportedError
from winnow.model.checkpoint.forms import (
    MODELOPT_NVFP4,
    PACKED_NVFP4,
    PLAIN,
    PLAIN_DTYPES,
    Form,
    check_form,
    check_tensor,
    find_form,
)
from winnow.model.checkpoint.generation import read_generation_config
from winnow.model.checkpoint.names import (
    SKIPPED,
    Matrix,
    Piece,
    PlainTensor,
    cache_scale_names,
    canonical,
    layer_names,
    skipped,
    top_names,
)
from winnow.model.checkpoint.reader import CheckpointFiles, read_json
from winnow.spec.model import ModelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredPiece:
    """Rows of a matrix as they are stored: `names` of the form's parts, codes first. `index` picks
    one expert of a stored stack; `unused` is the form's tensor that loading does not need."""

    names: tuple[str, ...]
    rows: int
    index: int | None = None
    unused: str | None = None


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix and where it lies: for each expert (or once), its pieces from the top row down."""

    matrix: Matrix
    form: Form
    experts: tuple[tuple[StoredPiece, ...], ...]


@dataclass(frozen=True)
class StoredLayer:
    """One layer by roles, as in `winnow.model.checkpoint.names.LayerNames`."""

    matrices: dict[str, StoredMatrix]
    plain: dict[str, str]


@dataclass(frozen=True)
class StoredModel:
    """A whole checkpoint by roles. `plain["head"]` is absent where the head is the embedding;
    `cache_scales` has the roles of `winnow.model.checkpoint.names.cache_scale_names` for each
    layer, or no entry where the checkpoint has none; `extra` are the tensors that are not the text
    model's, under their stored names."""

    layers: tuple[StoredLayer, ...]
    plain: dict[str, str]
    cache_scales: tuple[dict[str, str], ...]
    extra: tuple[str, ...]


def read_spec(directory: Path | str) -> ModelSpec:
    """The shape of the model in `directory`, from its config.json; what ends an answer also from
    its generation_config.json.

    Raises CheckpointError for a missing, damaged or incomplete config, UnsupportedError for a
    model that this version does not compute.
    """
    path = Path(directory) / "config.json"
    if not path.exists():
        raise CheckpointError(
            f"{path.parent} has no config.json: give the directory of a checkpoint, which holds it "
            "beside its safetensors files"
        )
    config = read_json(path)
    more = read_generation_config(path.parent).eos_ids
    try:
        spec = ModelSpec.from_hf(config)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}: {error}") from error
    return replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *more))))


def resolve(files: CheckpointFiles, spec: ModelSpec) -> StoredModel:
    """Find every tensor of the model `spec`; log what is skipped or not used.

    Raises CheckpointError for a tensor that is missing, of the wrong shape or dtype, there twice,
    or not understood; UnsupportedError for pieces of one matrix in different formats.
    """
    resolver = _Resolver(files, spec)
    layers = tuple(resolver.layer(i) for i in range(spec.num_layers))
    plain = {role: resolver.plain(tensor) for role, tensor in resolver.top().items()}
    cache_scales = resolver.cache_scales()
    resolver.finish()
    return StoredModel(layers, plain, cache_scales, tuple(resolver.extra))


class _Resolver:
    """Turns names into stored names, and remembers which were used."""

    def __init__(self, files: CheckpointFiles, spec: ModelSpec) -> None:
        self.files = files
        self.spec = spec
        self.extra: list[str] = []
        self.names: dict[str, str] = {}
        """Canonical to stored, of the text model's tensors."""
        self.used: set[str] = set()
        self.num_unused = 0
        for stored, info in files.tensors.items():
            if skipped(stored):
                self.extra.append(stored)
                continue
            name = canonical(stored)
            if name in self.names:
                raise CheckpointError(
                    f"{info.file}: tensor {stored} is the same as {self.names[name]}: "
                    "remove one of the two"
                )
            self.names[name] = stored

    def top(self) -> dict[str, PlainTensor]:
        tensors = top_names(self.spec)
        if self.spec.tied_embeddings and tensors["head"].name not in self.names:
            del tensors["head"]
        return tensors

    def layer(self, layer: int) -> StoredLayer:
        names = layer_names(self.spec, layer)
        return StoredLayer(
            {role: self.matrix(matrix) for role, matrix in names.matrices.items()},
            {role: self.plain(tensor) for role, tensor in names.plain.items()},
        )

    def plain(self, tensor: PlainTensor) -> str:
        if tensor.name not in self.names:
            raise self._missing(tensor.name)
        stored = self.names[tensor.name]
        check_tensor(stored, self.files.tensors[stored], PLAIN_DTYPES, tensor.shape)
        self.used.add(stored)
        return stored

    def cache_scales(self) -> tuple[dict[str, str], ...]:
        """Stored names of all or of none: one that is missing must not become 1.0 among others."""
        wanted = [cache_scale_names(layer) for layer in range(self.spec.num_layers)]
        names = [tensor.name for layer in wanted for tensor in layer.values()]
        missing = [name for name in names if name not in self.names]
        if len(missing) == len(names):
            return ()
        if missing:
            raise CheckpointError(
                f"{self.files.directory} lacks tensor {missing[0]}: {len(names) - len(missing)} of "
                f"{len(names)} scales of an FP8 cache are there; K and V of every layer need one, "
                "or none has one"
            )
        return tuple(
            {role: self.plain(tensor) for role, tensor in layer.items()} for layer in wanted
        )

    def matrix(self, matrix: Matrix) -> StoredMatrix:
        if matrix.is_expert:
            if matrix.fused in self.names:
                return self._stack(matrix, matrix.fused)
            numbers = range(matrix.num_experts)
            pieces = [
                [Piece(piece.name.format(number), piece.rows) for piece in matrix.pieces]
                for number in numbers
            ]
        elif matrix.fused and find_form(self.names, matrix.fused):
            pieces = [[Piece(matrix.fused, matrix.rows)]]
        else:
            pieces = [list(matrix.pieces)]
        first = self._form(pieces[0][0])
        experts = tuple(
            tuple(self._piece(piece, matrix.columns, first, pieces[0][0]) for piece in expert)
            for expert in pieces
        )
        return StoredMatrix(matrix, first, experts)

    def _stack(self, matrix: Matrix, name: str) -> StoredMatrix:
        shape = (matrix.num_experts, matrix.rows, matrix.columns)
        stored = self.plain(PlainTensor(name, shape))
        experts = tuple(
            (StoredPiece((stored,), matrix.rows, index=number),)
            for number in range(matrix.num_experts)
        )
        return StoredMatrix(matrix, PLAIN, experts)

    def _form(self, piece: Piece) -> Form:
        form = find_form(self.names, piece.name)
        if form is None:
            raise self._missing(f"{piece.name}.weight")
        return form

    def _piece(self, piece: Piece, columns: int, first: Form, first_piece: Piece) -> StoredPiece:
        form = self._form(piece)
        stored = check_form(
            self.files, self.names, piece.name, form, (piece.rows, columns), self.spec.quantization
        )
        if form is not first:
            raise UnsupportedError(
                f"{self.files.tensors[stored[0]].file}: tensor {stored[0]} is stored as "
                f"{form.name} and {first_piece.name} as {first.name}: the two are held as one "
                "matrix and must be stored alike"
            )
        self.used.update(stored)
        unused = self.names.get(piece.name + form.unused) if form.unused else None
        if unused:
            self.used.add(unused)
            self.num_unused += 1
        return StoredPiece(stored, piece.rows, unused=unused)

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.files.directory} lacks tensor {name}: "
            f"{len(self.files.tensors)} tensors are there, none under this name"
        )

    def finish(self) -> None:
        """Refuse what is not understood; say what is not used."""
        unknown = [stored for stored in self.names.values() if stored not in self.used]
        if unknown:
            raise CheckpointError(
                f"{self.files.tensors[unknown[0]].file}: tensor {unknown[0]} is not understood"
                + (f", nor are {len(unknown) - 1} more" if len(unknown) > 1 else "")
                + f": config.json describes {self.spec.num_layers} layers without it"
            )
        counts = Counter(skipped(name) for name in self.extra)
        for part in SKIPPED:
            if counts[part]:
                logger.info(
                    "%s: skipped %d tensors of %s", self.files.directory, counts[part], part
                )
        if self.num_unused:
            logger.info(
                "%s: activations keep the compute dtype, so %d scales for them (%s, %s) rest",
                self.files.directory,
                self.num_unused,
                MODELOPT_NVFP4.unused,
                PACKED_NVFP4.unused,
            )

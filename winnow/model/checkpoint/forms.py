"""How one matrix is stored on disk: which tensors under its name, of which dtypes and shapes.
Reads no data and knows nothing of models.

The forms are those of docs/formats.md. What tells them apart is the suffixes present.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from winnow.errors import CheckpointError
from winnow.model.checkpoint.reader import CheckpointFiles, TensorInfo
from winnow.spec.formats import MXFP8 as MXFP8_FORMAT
from winnow.spec.formats import NVFP4 as NVFP4_FORMAT

PLAIN_DTYPES = ("BF16", "F32")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor of a form: its suffix, the dtypes allowed, and its shape for a [N, K] matrix."""

    suffix: str
    dtypes: tuple[str, ...]
    shape: Callable[[int, int], Shape]


@dataclass(frozen=True)
class Form:
    """`format` is how the matrix is then held in memory, of which `group` values share a scale;
    `parts` are the tensors needed, codes first; `unused` is one that may be there and is not
    needed, since activations stay as they are."""

    name: str
    format: str
    group: int
    parts: tuple[Stored, ...]
    unused: str | None = None


def _scalar(rows: int, columns: int) -> Shape:
    return ()


PLAIN = Form("plain", "plain", 1, (Stored(".weight", PLAIN_DTYPES, lambda n, k: (n, k)),))
MXFP8 = Form(
    "mxfp8",
    "mxfp8",
    MXFP8_FORMAT.group,
    (
        Stored(".weight", ("F8_E4M3",), lambda n, k: (n, k)),
        Stored(".weight_scale_inv", ("U8", "F8_E8M0"), lambda n, k: (n, k // MXFP8_FORMAT.group)),
    ),
)
MODELOPT_NVFP4 = Form(
    "modelopt-nvfp4",
    "nvfp4",
    NVFP4_FORMAT.group,
    (
        Stored(".weight", ("U8",), lambda n, k: (n, k // 2)),
        Stored(".weight_scale", ("F8_E4M3",), lambda n, k: (n, k // NVFP4_FORMAT.group)),
        Stored(".weight_scale_2", ("F32",), _scalar),
    ),
    unused=".input_scale",
)
PACKED_NVFP4 = Form(
    "nvfp4-pack-quantized",
    "nvfp4",
    NVFP4_FORMAT.group,
    (
        Stored(".weight_packed", ("U8",), lambda n, k: (n, k // 2)),
        Stored(".weight_scale", ("F8_E4M3",), lambda n, k: (n, k // NVFP4_FORMAT.group)),
        Stored(".weight_global_scale", ("F32",), _scalar),
    ),
    unused=".input_global_scale",
)

_ALLOWED = {
    "none": (PLAIN,),
    "mxfp8": (PLAIN, MXFP8),
    "modelopt-nvfp4": (PLAIN, MODELOPT_NVFP4),
    "mixed-nvfp4": (PLAIN, MXFP8, PACKED_NVFP4),
}
"""Forms that a checkpoint of each of `winnow.spec.model.QUANTIZATIONS` may hold. Plain is always
one: no scheme quantises every linear."""


def find_form(names: Mapping[str, str], base: str) -> Form | None:
    """The form in which the matrix `base` is stored, by the suffixes present; None if it is not."""
    if base + ".weight_packed" in names:
        return PACKED_NVFP4
    if base + ".weight" not in names:
        return None
    if base + ".weight_scale_inv" in names:
        return MXFP8
    if base + ".weight_scale" in names:
        return MODELOPT_NVFP4
    return PLAIN


def check_form(
    files: CheckpointFiles,
    names: Mapping[str, str],
    base: str,
    form: Form,
    shape: tuple[int, int],
    quantization: str,
) -> tuple[str, ...]:
    """Stored names of the form's parts, once their presence, dtypes and shapes are as they must
    be. `names` maps canonical names to stored ones. Raises CheckpointError."""
    found: list[str] = []
    for part in form.parts:
        name = base + part.suffix
        if name not in names:
            raise CheckpointError(
                f"{files.directory} lacks tensor {name}: {base} is stored as {form.name}, which "
                f"needs {', '.join(p.suffix for p in form.parts)}"
            )
        stored = names[name]
        check_tensor(stored, files.tensors[stored], part.dtypes, part.shape(*shape))
        found.append(stored)
    if shape[1] % form.group:
        raise CheckpointError(
            f"{files.tensors[found[0]].file}: tensor {found[0]} is stored as {form.name}, but its "
            f"{shape[1]} columns do not fill groups of {form.group}"
        )
    if form not in _ALLOWED[quantization]:
        raise CheckpointError(
            f"{files.tensors[found[0]].file}: tensor {found[0]} is stored as {form.name}, but "
            f"config.json says the checkpoint's quantization is {quantization}, which holds "
            f"{' or '.join(f.name for f in _ALLOWED[quantization])}"
        )
    return tuple(found)


def check_tensor(name: str, info: TensorInfo, dtypes: tuple[str, ...], shape: Shape) -> None:
    """CheckpointError unless dtype and shape are right; a scalar may also be stored as [1]."""
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{info.file}: tensor {name}: dtype {info.dtype}, expected {' or '.join(dtypes)}"
        )
    if info.shape != shape and not (shape == () and info.shape == (1,)):
        raise CheckpointError(
            f"{info.file}: tensor {name}: shape {list(info.shape)}, expected {list(shape)}"
        )

"""A plain checkpoint into one with NVFP4 experts and MXFP8 linears: which directory becomes which.
Touches no tensor itself.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from winnow.errors import UnsupportedError
from winnow.model.checkpoint.forms import MXFP8, PACKED_NVFP4, Form
from winnow.model.checkpoint.reader import CheckpointFiles, read_json
from winnow.model.checkpoint.resolve import read_spec, resolve
from winnow.model.checkpoint.rewrite import Rewriter
from winnow.model.checkpoint.writer import SHARD_BYTES, ShardWriter

_EXPERT_FORMS = {"nvfp4": PACKED_NVFP4, "keep": None}
_LINEAR_FORMS = {"mxfp8": MXFP8, "keep": None}

_COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""Files beside the weights that a converted checkpoint takes over unchanged."""


@dataclass(frozen=True)
class Converted:
    """Bytes of all tensors, those of images and drafts included, of a source and of what became
    of it."""

    source_bytes: int
    written_bytes: int


def convert(
    source: Path | str,
    destination: Path | str,
    experts: str = "nvfp4",
    linear: str = "mxfp8",
    progress: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write `source` again under the hub's names, with experts ("nvfp4" or "keep") and all other
    linears ("mxfp8" or "keep") quantised; embedding, head, norms, router and the tensors of images
    and drafts stay as they are.

    Gives the bytes before and after. A linear whose columns do not fill MXFP8's groups of 32 stays
    plain. `destination` appears only when it is complete. Raises UnsupportedError for an unknown
    word, for a source that is quantised already (unless both are kept) and for a destination that
    is not empty; CheckpointError for a source that cannot be read, or holds NaN or infinity where
    it is to be quantised.
    """
    source, destination = Path(source), Path(destination)
    expert_form = _form("experts", experts, _EXPERT_FORMS)
    linear_form = _form("linear", linear, _LINEAR_FORMS)
    spec = read_spec(source)
    if spec.quantization != "none" and (expert_form or linear_form):
        raise UnsupportedError(
            f"{source} is quantised already ({spec.quantization}): quantising its values again "
            "would add error; convert the unquantised checkpoint, or keep both experts and linears"
        )
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UnsupportedError(f"{destination} exists and is not empty: choose another directory")
    files = CheckpointFiles(source)
    stored = resolve(files, spec)
    with _appears_when_complete(destination) as directory:
        total = sum(info.nbytes for info in files.tensors.values())
        hidden = None if progress else True
        with tqdm(total=total, unit="B", unit_scale=True, desc="converting", disable=hidden) as bar:
            writer = ShardWriter(directory, shard_bytes)
            rewriter = Rewriter(files, writer, bar)
            rewriter.model(stored, expert_form, linear_form)
        _write_config(source, directory, expert_form, linear_form)
        for file in _COMPANIONS:
            if (source / file).is_file():
                shutil.copyfile(source / file, directory / file)
    rewriter.report(destination)
    return Converted(total, writer.total_bytes)


def _form(option: str, word: str, forms: dict[str, Form | None]) -> Form | None:
    if word not in forms:
        raise UnsupportedError(f"{option} {word!r} is not known: use {' or '.join(forms)}")
    return forms[word]


@contextmanager
def _appears_when_complete(destination: Path) -> Iterator[Path]:
    """A new directory beside `destination` that takes its name at the end, or is removed."""
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        # Replaces an empty directory, and only an empty one.
        partial.replace(destination)
    except BaseException:
        shutil.rmtree(partial)
        raise


def _write_config(
    source: Path, directory: Path, expert_form: Form | None, linear_form: Form | None
) -> None:
    """config.json as it was, with what was quantised; formats of caches are left to the server."""
    config = read_json(source / "config.json")
    if expert_form or linear_form:
        quantization: dict[str, Any] = {"quant_method": "mxfp8", "weight_block_size": [1, 32]}
        if expert_form:
            quantization |= {
                "moe_quant_algo": "NVFP4",
                "moe_quant_format": PACKED_NVFP4.name,
                "moe_quant_group_size": PACKED_NVFP4.group,
            }
        config["quantization_config"] = quantization
        if isinstance(config.get("text_config"), dict):
            config["text_config"].pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

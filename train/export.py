"""A trained model into a checkpoint in the M3.1 mixed format, with all that a server needs.

`python -m train.export` reads build/train/run/state.pt and writes build/train/demo.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train import plan as plans
from train import tokenizer
from train.chats import TEMPLATE
from train.corpus import BUILD
from train.geometry import Geometry, config
from train.mixture import Source
from winnow.model.checkpoint import convert
from winnow.model.checkpoint.reader import SINGLE_FILE
from winnow.model.checkpoint.writer import save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", choices=("demo", "tiny"), default="demo")
    parser.add_argument("--directory", type=Path, default=BUILD / "run")
    parser.add_argument("--destination", type=Path, default=BUILD / "demo")
    args = parser.parse_args()
    state = torch.load(args.directory / "state.pt", map_location="cpu", weights_only=True)
    geometry = {"demo": plans.DEMO, "tiny": plans.TINY}[args.plan].geometry
    export(state["model"], geometry, args.destination)
    size = sum(file.stat().st_size for file in args.destination.iterdir())
    print(f"{args.destination}: {size} bytes")


def export(model: dict[str, Tensor], geometry: Geometry, destination: Path) -> None:
    """Write `destination`, which must not exist. Matrices go from fp32 to their stored form at
    once, as training saw them."""
    with tempfile.TemporaryDirectory() as scratch:
        write_plain(model, geometry, Path(scratch))
        convert(scratch, destination, progress=False)


def write_plain(model: dict[str, Tensor], geometry: Geometry, directory: Path) -> None:
    """The unquantised checkpoint: matrices, norms and routers in fp32, embedding and head in
    bf16, with config, tokenizer and chat template."""
    save(hub_tensors(model), directory / SINGLE_FILE)
    source = Source()
    _json(directory / "config.json", config(geometry, source.start_id, source.end_id))
    vocabulary = json.loads(tokenizer.PATH.read_text(encoding="utf-8"))
    # As tokenizers writes it, a third of the file is spaces.
    compact = json.dumps(vocabulary, ensure_ascii=False, separators=(",", ":"))
    (directory / "tokenizer.json").write_text(compact, encoding="utf-8")
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")
    _json(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.START,
        "eos_token": tokenizer.END, "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    _json(directory / "generation_config.json", {
        "bos_token_id": source.start_id, "eos_token_id": source.end_id,
        # A small model's likeliest token is right more often than one that is drawn.
        "do_sample": True, "temperature": 0.3,
    })  # fmt: skip


def hub_tensors(model: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the hub's names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.items():
        value = tensor.float().cpu().contiguous()
        match name.split("."):
            case ["embed_tokens"]:
                tensors["model.embed_tokens.weight"] = value.bfloat16()
            case ["lm_head", "weight"]:
                tensors["lm_head.weight"] = value.bfloat16()
            case ["norm", "weight"]:
                tensors["model.norm.weight"] = value
            case ["layers", number, "mlp", ("w1" | "w2" | "w3") as piece, "weight"]:
                root = f"model.layers.{number}.block_sparse_moe.experts"
                for expert, matrix in enumerate(value):
                    tensors[f"{root}.{expert}.{piece}.weight"] = matrix.clone()
            case ["layers", number, "mlp", *rest] if rest[0] in _MOE:
                tensors[f"model.layers.{number}.block_sparse_moe.{'.'.join(rest)}"] = value
            case _:
                tensors[f"model.{name}"] = value
    return tensors


_MOE = ("gate", "e_score_correction_bias", "shared_experts")


def _json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()

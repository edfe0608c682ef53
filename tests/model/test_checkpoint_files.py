"""Damaged files: a wrong one is a CheckpointError that names it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checkpoints import build, write

from winnow.errors import CheckpointError, WinnowError
from winnow.model.checkpoint import load_checkpoint, read_spec
from winnow.model.checkpoint.reader import CheckpointFiles


def load(directory: Path) -> None:
    load_checkpoint(directory, read_spec(directory), torch.bfloat16, progress=False)


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def cut_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:50])


def empty(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def no_json(directory: Path) -> None:
    file = directory / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8] = ord("[")
    file.write_bytes(content)


def no_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def config_missing(directory: Path) -> None:
    (directory / "config.json").unlink()


def config_no_json(directory: Path) -> None:
    (directory / "config.json").write_text('{"vocab_size": ')


def config_no_text(directory: Path) -> None:
    (directory / "config.json").write_bytes(b"\xff\xfe\x00")


def config_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


def config_incomplete(directory: Path) -> None:
    (directory / "config.json").write_text(
        '{"model_type": "minimax_m3_vl_text", "num_hidden_layers": 3}'
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            truncate,
            r"model\.safetensors: tensor \S+ ends at byte \d+ of the data, the file has \d+",
        ),
        (
            cut_header,
            r"model\.safetensors: 50 bytes cannot hold a header of \d+: the file is trunc",
        ),
        (empty, r"model\.safetensors: 0 bytes cannot hold a header"),
        (no_json, r"model\.safetensors: the header is not JSON"),
        (no_weights, r"holds neither model\.safetensors nor model\.safetensors\.index\.json"),
        (config_missing, r"has no config\.json: give the directory of a checkpoint"),
        (config_no_json, r"config\.json is not JSON"),
        (config_no_text, r"config\.json is not JSON"),
        (config_list, r"config\.json holds a JSON list"),
        (config_incomplete, r"config\.json lacks 'num_attention_heads'"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    build(tmp_path, "hub")
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message) as raised:
        load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def change_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.update({"lm_head.weight": "gone.safetensors"}),
            r"index\.json: names gone\.safetensors for tensor lm_head\.weight",
        ),
        (
            lambda m: m.update({"phantom": "model-00001-of-00002.safetensors"}),
            r"model-00001-of-00002\.safetensors: lacks tensor phantom",
        ),
        (lambda m: m.update({"lm_head.weight": "../x"}), r"lm_head\.weight is in '\.\./x'"),
        (lambda m: m.update({"lm_head.weight": 3}), r"lm_head\.weight is in 3"),
        (lambda m: m.clear(), r"index\.json: has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, str]], object], message: str
) -> None:
    build(tmp_path, "hub", shards=2)
    change_index(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "hub", shards=2)
    write(tmp_path, {"lm_head.weight": torch.ones(48, 64), "model.norm.weight": torch.ones(64)})
    (tmp_path / "model.safetensors").rename(tmp_path / "more.safetensors")
    change_index(tmp_path, lambda m: m.update({"lm_head.weight": "more.safetensors"}))
    with pytest.raises(CheckpointError, match=r"more\.safetensors: tensor \S+ is also in model-0"):
        load(tmp_path)


def test_a_single_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "hub", shards=2)
    build(tmp_path, "hub")
    with pytest.raises(CheckpointError, match="remove the one that is out of date"):
        load(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"dtype": "BF16", "shape": [48, 64]},
        {"dtype": "BF16", "shape": "x", "data_offsets": [0, 1]},
        {"dtype": "BF16", "shape": [48, 64], "data_offsets": [0]},
        {"dtype": "BF16", "shape": [48.0, 64], "data_offsets": [0, 6144]},
        {"dtype": ["BF16"], "shape": [48, 64], "data_offsets": [0, 6144]},
        {"dtype": "BF16", "shape": [float("inf")], "data_offsets": [0, 6144]},
        {"dtype": "BF16", "shape": [48, 64], "data_offsets": [0, 10]},
        {"dtype": "BF16", "shape": [-48, -64], "data_offsets": [0, 6144]},
        {"dtype": "BF16", "shape": [48, 64], "data_offsets": [6144, 0]},
        {"dtype": "MADE_UP", "shape": [48, 64], "data_offsets": [0, 6144]},
        {"dtype": "BF16", "shape": [48, 64], "data_offsets": [0, 2**70]},
    ],
)
def test_a_damaged_header_entry_names_file_and_tensor(tmp_path: Path, entry: object) -> None:
    build(tmp_path, "hub")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["lm_head.weight"] = entry
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor lm_head\.weight"):
        load(tmp_path)


def test_a_file_cut_short_after_it_was_opened_is_named(tmp_path: Path) -> None:
    build(tmp_path, "hub")
    files = CheckpointFiles(tmp_path)
    last = max(files.tensors, key=lambda name: files.tensors[name].start)
    truncate(tmp_path)
    with pytest.raises(CheckpointError, match=rf"tensor {last} has .* the file has changed"):
        files.read(last)
    no_weights(tmp_path)
    with pytest.raises(CheckpointError, match=rf"tensor {last} cannot be read"):
        files.read(last)


def test_any_flipped_header_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    build(tmp_path, "mixed-nvfp4")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    dice = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        damaged[dice.randrange(8 + length)] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        try:
            load(tmp_path)
        except WinnowError:
            refused += 1
    assert refused > 100

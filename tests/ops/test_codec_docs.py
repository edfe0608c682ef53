"""docs/formats.md says what the code does: its programs run and its row sizes are the layout's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from winnow.spec.formats import BF16, FP8, NVFP4, Format
from winnow.spec.page import RowLayout
from winnow.spec.presets import preset

PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_the_programs_on_the_formats_page_run(program: str) -> None:
    exec(compile(program, "docs/formats.md", "exec"), {})


def test_the_formats_page_has_programs() -> None:
    assert len(PROGRAMS) == 2


@pytest.mark.parametrize(
    ("kv", "index"), [(NVFP4, NVFP4), (FP8, NVFP4), (FP8, FP8), (BF16, BF16)], ids=lambda f: f.name
)
def test_the_row_sizes_on_the_formats_page_are_the_layouts(kv: Format, index: Format) -> None:
    spec = preset("minimax-m3.1-flash")
    whole = RowLayout.of(spec, kv, index)
    quarter = RowLayout.of(spec, kv, index, tp_size=4)
    numbers = (
        whole.index_bytes,
        whole.head_bytes,
        whole.row_bytes,
        quarter.row_bytes,
        whole.row_bytes // 128,
    )
    cells = " | ".join(f"{number:,}" for number in numbers)
    assert f"| `{kv.name}` | `{index.name}` | {cells} |" in PAGE
    less = whole.row_bytes - RowLayout.of(preset("minimax-m3"), kv, index).row_bytes
    assert f"{less:,}" in PAGE


@pytest.mark.parametrize("fmt", [NVFP4, FP8, BF16], ids=lambda f: f.name)
def test_the_piece_sizes_on_the_formats_page_are_the_layouts(fmt: Format) -> None:
    layout = RowLayout.of(preset("minimax-m3"), fmt, fmt)
    row = next(
        line
        for line in PAGE.splitlines()
        if line.startswith(f"| `{fmt.name}` | {layout.index_piece_bytes:,}")
    )
    assert row.endswith(f" | {layout.kv_piece_bytes:,} |")

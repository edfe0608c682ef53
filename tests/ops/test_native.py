"""The CPU kernels build for processors with vectors of every width."""

import platform
import subprocess
from pathlib import Path

import pytest

from winnow.ops import native

LEVELS = {
    "x86_64": ("x86-64", "x86-64-v3", "x86-64-v4"),
    "aarch64": ("armv8-a", "armv8.2-a+sve"),
}.get(platform.machine(), ())


@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_build_for_processors_other_than_this_one(level: str, tmp_path: Path) -> None:
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    flags = [flag for flag in native.FLAGS if not flag.startswith("-march")]
    done = subprocess.run(
        [command, *flags, f"-march={level}", "-c", str(native.SOURCE), "-o", tmp_path / "cpu.o"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")

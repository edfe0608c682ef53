"""The CPU kernels build for processors with vectors of every width."""

import platform
import subprocess
from pathlib import Path

import pytest

from winnow.errors import UnsupportedError
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


def test_a_folder_that_cannot_be_written_or_holds_no_library_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnsupportedError, match=r"file/winnow \(Not a dir.*\): set XDG_CACHE_HOME"):
        native._build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = native._build()
    assert target.parent == tmp_path / "winnow"
    target.write_bytes(b"damaged")
    with pytest.raises(UnsupportedError, match=r"cpu-\w+\.so: .*: set XDG_CACHE_HOME"):
        native.library.__wrapped__()


def test_a_user_without_a_home_is_told_what_to_set_and_needs_none_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    with pytest.raises(UnsupportedError, match="this user has no home: set XDG_CACHE_HOME"):
        native._build()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._build().is_file()

"""Libraries of CUDA C++: built anew when what they are made of changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.errors import UnsupportedError
from winnow.ops import cuda_build

nvcc = pytest.mark.skipif(cuda_build.compiler() is None, reason="needs nvcc")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source that includes a header beside it and a shared one; libraries go elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("WINNOW_RACECHECK", raising=False)
    monkeypatch.setattr(cuda_build, "SHARED", tmp_path / "csrc")
    (tmp_path / "op/csrc").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc/shared.cuh").write_text("constexpr int kShared = 1;\n")
    (tmp_path / "op/csrc/own.cuh").write_text("constexpr int kOwn = 2;\n")
    path = tmp_path / "op/csrc/sum.cu"
    path.write_text(
        '#include "../../csrc/shared.cuh"\n#include "own.cuh"\n'
        'extern "C" int sum() { return kShared + kOwn; }\n'
    )
    return path


@nvcc
def test_a_library_is_built_once_and_anew_when_a_header_beside_it_or_a_shared_one_changes(
    source: Path,
) -> None:
    first = cuda_build.build(source)
    built = first.stat().st_mtime_ns
    assert cuda_build.build(source) == first
    assert first.stat().st_mtime_ns == built
    assert cuda_build.library(source, {"sum": ()}).sum() == 3
    (source.parent / "own.cuh").write_text("constexpr int kOwn = 5;\n")
    assert cuda_build.library(source, {"sum": ()}).sum() == 6
    (cuda_build.SHARED / "shared.cuh").write_text("constexpr int kShared = 7;\n")
    assert cuda_build.library(source, {"sum": ()}).sum() == 12


@nvcc
def test_the_build_for_racecheck_is_another_in_which_every_lane_arrives(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.parent / "own.cuh").write_text(
        "#ifdef WINNOW_EVERY_LANE_ARRIVES\nconstexpr int kOwn = 32;\n"
        "#else\nconstexpr int kOwn = 1;\n#endif\n"
    )
    assert cuda_build.library(source, {"sum": ()}).sum() == 2
    monkeypatch.setenv("WINNOW_RACECHECK", "1")
    assert cuda_build.library(source, {"sum": ()}).sum() == 33


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("NVCC", "/bin/true")
    with pytest.raises(UnsupportedError, match=r"file/winnow \(Not a dir.*\): set XDG_CACHE_HOME"):
        cuda_build.library(source, {})

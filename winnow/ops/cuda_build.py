"""CUDA C++ kernels: built by nvcc on first use, kept by content, called through ctypes.

Owns the compiler call and the types of the functions. Knows nothing of ops. A source exports C
functions that launch on the stream they are given and return a cudaError_t.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from winnow.errors import UnsupportedError
from winnow.ops import built

FLAGS = (
    # The -arch shorthand would also build plain sm_90, which lacks the instructions of sm_90a.
    *("-gencode=arch=compute_90a,code=sm_90a", "-O3", "-std=c++17"),
    *("-shared", "-Xcompiler", "-fPIC", "-cudart", "static"),
)
SHARED = Path(__file__).parent / "csrc"
"""What sources of several ops include."""
FOR_RACECHECK = ("-DWINNOW_EVERY_LANE_ARRIVES", "-lineinfo")
"""Added where $WINNOW_RACECHECK is set: compute-sanitizer's racecheck follows a barrier's arrivals
by thread, so with these each lane arrives for itself where else one does for its warp."""


def compiler() -> str | None:
    """nvcc: $NVCC, else on the path, else of the usual installation; None if there is none."""
    wanted = (os.environ.get("NVCC"), "nvcc", "/usr/local/cuda/bin/nvcc")
    return next((path for name in wanted if name and (path := shutil.which(name))), None)


def library(source: Path, signatures: Mapping[str, tuple[type, ...]]) -> ctypes.CDLL:
    """The loaded library of `source` (.cu), its functions typed by `signatures` and giving an int.

    Callers keep it: every call reads the source again. UnsupportedError if it cannot be built,
    with the compiler's words, or if there is nowhere to keep it.
    """
    path = build(source)
    with built.keeping("hopper", path.parent):
        loaded = ctypes.CDLL(str(path))
    for name, types in signatures.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return loaded


def build(source: Path) -> Path:
    """The library file for this source, the headers (.cuh) beside it and in SHARED, these flags and
    this compiler; needs no GPU."""
    command = compiler()
    if command is None:
        raise UnsupportedError(
            "the hopper backend needs nvcc once, to build its kernels: install the CUDA toolkit "
            "(12.4 or newer), or set NVCC to the compiler's path"
        )
    headers = sorted((*source.parent.glob("*.cuh"), *SHARED.glob("*.cuh")))
    texts = (path.read_text() for path in (source, *headers))
    flags = FLAGS + (FOR_RACECHECK if os.environ.get("WINNOW_RACECHECK") else ())
    parts = (*texts, _version(command), " ".join(flags))
    key = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    home = built.folder("hopper")
    target = home / f"{source.parent.parent.name}-{source.stem}-{key}.so"
    with built.keeping("hopper", home):
        if not target.is_file():
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home) as work:
                # Another process may have built the same library meanwhile: the rename is atomic.
                _compile([command, *flags], source, Path(work)).rename(target)
    return target


def _compile(command: Sequence[str], source: Path, work: Path) -> Path:
    library_file = work / "kernels.so"
    done = subprocess.run(
        [*command, str(source), "-o", str(library_file)], capture_output=True, text=True
    )
    if done.returncode:
        raise UnsupportedError(
            f"{source.name} does not build with {command[0]}: {done.stderr.strip()}"
        )
    return library_file


@cache
def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True).stdout

"""The CPU backend's C++ library: built on first use, kept by content, called through ctypes.

Owns the compiler call and the types of the functions. Knows nothing of ops. The library shares
torch's own OpenMP threads: a second pool would fight the first for the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from winnow.errors import UnsupportedError
from winnow.ops import built

SOURCE = Path(__file__).parent / "csrc" / "cpu.cpp"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-ffp-contract=off"),
    *("-fPIC", "-fopenmp", "-Wall", "-Wno-psabi"),
)

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "winnow_linear": (_P, _N, _P, _P, _N, _N, _P, _I),
    "winnow_linear_quantised": (_P, _N, _I, _P, _P, _P, _P, _P, _P, _N, _N, _P, _I),
    "winnow_block_scores": (_P, _N, _N, _P, _N, _N, _P, _P, _N, _I),
    "winnow_top_blocks": (_P, _N, _N, _P, _N, _P, _I),
    "winnow_attend": (_P, _N, _N, _N, _N, _P, _P, _P, _P, _P, _P, _I),
    "winnow_expand_nvfp4": (_P, _P, _N, _N, _P, _F, _P, _I),
    "winnow_expand_fp8": (_P, _N, _N, _P, _F, _P, _I),
    "winnow_scatter": (_P, _N, _N, _N, _P, _P, _P, _N, _N),
    "winnow_activation": (_P, _N, _N, _F, _F, _F, _P, _I),
    "winnow_norm_rotate": (_P, _N, _N, _N, _N, _P, _F, _P, _P, _N, _P, _N, _I),
}


def threads() -> int:
    """Threads that torch uses, and so the kernels."""
    return torch.get_num_threads()


def integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """An int64 array for a call: cheaper than a tensor where the values are Python's."""
    return (ctypes.c_int64 * len(values))(*values)


def compiler() -> str | None:
    """The C++ compiler: $CXX, else g++, else clang++; None if there is none."""
    wanted = os.environ.get("CXX")
    return next((p for c in (wanted, "g++", "clang++") if c and (p := shutil.which(c))), None)


@cache
def library() -> ctypes.CDLL:
    """The loaded library; UnsupportedError if it cannot be built, with the compiler's words, or if
    there is nowhere to keep it."""
    path = _build()
    with built.keeping("cpu", path.parent):
        loaded = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = types, None
    return loaded


def _build() -> Path:
    """The library for this source and its headers, compiler, processor and OpenMP runtime."""
    command = compiler()
    if command is None:
        raise UnsupportedError(
            "the cpu backend needs a C++ compiler once, to build its kernels: install g++, or use "
            "backend (--backend) reference, which is slow"
        )
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    openmp = _torch_openmp()
    texts = (path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
    parts = (*texts, version, " ".join(FLAGS), str(openmp), _processor())
    key = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    home = built.folder("cpu")
    target = home / f"cpu-{key}.so"
    with built.keeping("cpu", home):
        if not target.is_file():
            home.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=home) as work:
                # Another process may have built the same library meanwhile: the rename is atomic.
                _compile(command, openmp, Path(work)).rename(target)
    return target


def _compile(command: str, openmp: Path | None, work: Path) -> Path:
    objects, library_file = work / "cpu.o", work / "cpu.so"
    link = [str(openmp)] if openmp else ["-fopenmp"]
    for step in (
        [command, *FLAGS, "-c", str(SOURCE), "-o", str(objects)],
        [command, "-shared", str(objects), "-o", str(library_file), *link],
    ):
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            raise UnsupportedError(
                f"the cpu backend's kernels do not build with {command}: {done.stderr.strip()}"
            )
    return library_file


def _torch_openmp() -> Path | None:
    """The OpenMP runtime that torch has loaded, or None where the system does not say."""
    torch.get_num_threads()
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return None
    loaded = {Path(line.split()[-1]) for line in maps.read_text().splitlines() if "/" in line}
    return next((p for p in sorted(loaded) if p.name.startswith(("libgomp", "libiomp"))), None)


def _processor() -> str:
    """What -march=native may depend on: a cache directory can be shared between machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return ""
    lines = cpuinfo.read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

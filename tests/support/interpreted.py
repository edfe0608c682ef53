"""Runs a test module's body in a process of its own, where Triton interprets kernels on the CPU.

TRITON_INTERPRET is read when a kernel is defined, so the process that runs the other tests must
not have it set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def interpreted(function: str, timeout_s: float = 120.0) -> None:
    """Call `function` ("support.module:name") in a new process under the interpreter; fail the
    test with what it wrote if it raises."""
    done = subprocess.run(
        [sys.executable, "-m", "support.interpreted", function],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        },
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}{done.stderr}", pytrace=False)


def _accept_sizes_of_numpy_2_4() -> None:
    """Triton 3.6 turns a loop bound into an int by way of an array of one value and one axis,
    which numpy 2.4 no longer allows."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):  # type: ignore[no-untyped-def]
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _main() -> None:
    from importlib import import_module

    import numpy as np

    # Kernels divide by zero and make NaN where the definition does.
    np.seterr(all="ignore")
    _accept_sizes_of_numpy_2_4()
    module, name = sys.argv[1].split(":")
    getattr(import_module(module), name)()


if __name__ == "__main__":
    _main()

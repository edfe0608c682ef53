"""What a measurement ran on: processor, memory, versions, commit. Measures nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "numpy", "triton")


def machine(threads: int | None = None) -> dict[str, Any]:
    """Processor, its cores, memory and GPUs of this machine, and the threads that were used, if
    that is known."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }
    if threads is not None:
        found["threads"] = threads
    gpus = _gpus()
    if gpus:
        found["gpus"] = gpus
    return found


def software() -> dict[str, str]:
    """Versions of Python, of the system and of the packages that matter, those installed."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the source tree, with -dirty if files differ from it; 'unknown' outside git."""
    tree = Path(__file__).parents[2]
    run = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
    )
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def _gpus() -> list[str]:
    """Names of NVIDIA GPUs, as the driver's own tool gives them; none without it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    asked = [tool, "--query-gpu=name", "--format=csv,noheader"]
    run = subprocess.run(asked, capture_output=True, text=True)
    return run.stdout.split("\n")[:-1] if run.returncode == 0 else []


def _processor() -> str:
    """The model by family numbers too: virtual machines hide the marketing name."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"

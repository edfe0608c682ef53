"""What other tools have measured and written to files, read as runs. Starts no tool.

Every reader gives `winnow.bench.runs.Run`s and raises RequestError for a file that is not what
it says, or that keeps only summaries: without each request's timing nothing can be checked.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from winnow.bench.exports import aiperf, guidellm, vllm
from winnow.bench.runs import Run

READERS: dict[str, Callable[[Path], list[Run]]] = {
    "aiperf": aiperf.read,
    "guidellm": guidellm.read,
    "vllm": vllm.read,
}

"""The checkpoint that ships with the package, under the word `demo`. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"


def checkpoint_path(model: str) -> Path:
    """Where a checkpoint lies: `demo` is the package's own, any other word is a path.

    A directory of yours with that name is `./demo`.
    """
    return Path(__file__).parents[1] / "data" / DEMO if model == DEMO else Path(model)

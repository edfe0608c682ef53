"""Where kernels that were built are kept, and what is said where that cannot be. Knows no compiler.

A library's name holds a hash of all that it is made of, so the folder may be shared and emptied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from winnow.errors import UnsupportedError


def folder(backend: str) -> Path:
    """`winnow` in $XDG_CACHE_HOME or else in ~/.cache, which need not exist; UnsupportedError where
    neither is known. `backend` is named in the error."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "winnow"
    except RuntimeError as error:
        # A container's user may have neither a name nor $HOME.
        raise UnsupportedError(
            f"the {backend} backend has no folder for its kernels, as this user has no home: set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error


@contextmanager
def keeping(backend: str, home: Path) -> Iterator[None]:
    """UnsupportedError instead of an OSError of what is read or written in `home` meanwhile."""
    try:
        yield
    except OSError as error:
        raise UnsupportedError(
            f"the {backend} backend cannot keep its kernels in {home} "
            f"({error.strerror or error}): set XDG_CACHE_HOME to a folder that can be written and "
            "whose files may be executed"
        ) from error

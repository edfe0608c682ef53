"""Reading JSON that someone else wrote: every fault is one sentence with the file's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from winnow.errors import RequestError


def load_json(path: Path) -> Any:
    """The content of a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RequestError(f"{path} is not JSON: {error}") from error


def load_lines(path: Path) -> list[Any]:
    """The content of a file of JSON lines."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            raise RequestError(f"{path}:{number} is not a line of JSON: {error}") from error
    return found


@contextmanager
def export_of(tool: str, path: Path) -> Iterator[None]:
    """A field that is missing or of another kind means that `path` is no export of `tool`."""
    try:
        yield
    except KeyError as error:
        raise RequestError(f"{path} is no export of {tool}: it has no field {error}") from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise RequestError(f"{path} is no export of {tool} that we know: {error}") from error

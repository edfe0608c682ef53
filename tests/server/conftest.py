"""One real server for the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.served import Served


@pytest.fixture(scope="session")
def served_tiny(tiny: Path) -> Iterator[Served]:
    """`winnow serve` on the tiny checkpoint, called `tiny`; leave it idle."""
    options = ("--served-model-name", "tiny", "--num-pages", "64", "--max-running", "8")
    with Served(str(tiny), *options, threads=1) as server:
        yield server

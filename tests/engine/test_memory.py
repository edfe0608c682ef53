"""How many pages an engine takes of the memory that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.config import EngineConfig
from winnow.engine import memory
from winnow.engine.build import build_engine
from winnow.errors import CapacityError, UnsupportedError

FREE = 40_000_000


@pytest.fixture(autouse=True)
def _free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: FREE)


def pages(tiny: Path, **options: object) -> tuple[int, int]:
    """Pages of an engine, and bytes of one."""
    engine = build_engine(str(tiny), EngineConfig.from_options(options), progress=False)
    storage = engine.runner.storage
    return storage.num_pages, storage.layout.row_bytes


@pytest.mark.parametrize(("fraction", "share"), [(None, 0.25), (0.5, 0.5), (1.0, 1.0)])
def test_a_share_of_the_free_memory_becomes_pages_to_the_byte(
    tiny: Path, fraction: float | None, share: float
) -> None:
    count, row_bytes = pages(tiny, memory_fraction=fraction)
    assert count == int(FREE * share) // row_bytes


def test_no_more_pages_are_taken_than_all_requests_could_hold(tiny: Path) -> None:
    assert pages(tiny, max_running=2, max_model_len=128, memory_fraction=1.0)[0] == 3


def test_what_was_asked_for_is_taken_or_refused_with_what_would_fit(tiny: Path) -> None:
    assert pages(tiny, num_pages=7)[0] == 7
    row_bytes = pages(tiny, num_pages=7)[1]
    with pytest.raises(CapacityError, match=f"lower --num-pages to {FREE // row_bytes}"):
        pages(tiny, num_pages=FREE // row_bytes + 1)
    with pytest.raises(CapacityError, match="lower cache_bytes"):
        pages(tiny, cache_bytes=FREE + 1)


@pytest.mark.parametrize("fraction", [0.0, 1.01, True, "half"])
def test_a_share_that_is_none_is_refused(fraction: object) -> None:
    with pytest.raises(UnsupportedError, match="memory_fraction"):
        EngineConfig.from_options({"memory_fraction": fraction})

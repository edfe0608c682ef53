"""How many pages an engine takes of the memory that there is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from winnow.config import EngineConfig, SamplingParams
from winnow.engine import memory, worker
from winnow.engine.build import build_engine
from winnow.engine.messages import Build
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
    with pytest.raises(
        CapacityError, match=rf"lower num_pages \(--num-pages\) to {FREE // row_bytes}"
    ):
        pages(tiny, num_pages=FREE // row_bytes + 1)
    with pytest.raises(CapacityError, match="lower cache_bytes"):
        pages(tiny, cache_bytes=FREE + 1)


def test_a_request_may_have_what_the_cache_holds_where_that_is_less_and_it_is_said(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "winnow")
    command = Build(str(tiny), EngineConfig(num_pages=10), {}, logging.INFO)
    engine = build_engine(str(tiny), command.config, progress=False)
    assert worker._info(engine, command).max_model_len == 9 * 128
    said = "takes 65536 tokens, the cache holds 1152: a request may have 1152, with "
    said += "num_pages (--num-pages) 513 all of them"
    assert said in caplog.text
    engine.add("longest", [1] * 1000, SamplingParams(max_tokens=152))
    with pytest.raises(CapacityError, match="request needs 10 pages, the cache has 9"):
        engine.add("longer", [1] * 1000, SamplingParams(max_tokens=154))


def test_a_length_that_was_asked_for_and_does_not_fit_is_refused(tiny: Path) -> None:
    pages(tiny, num_pages=17, max_model_len=2048)
    says = (
        r"is 2048, the cache of 16 pages holds 1920 tokens: lower it to 1920, .*\(--num-pages\) 17"
    )
    with pytest.raises(CapacityError, match=says):
        pages(tiny, num_pages=16, max_model_len=2048)


@pytest.mark.parametrize("fraction", [0.0, 1.01, True, "half"])
def test_a_share_that_is_none_is_refused(fraction: object) -> None:
    with pytest.raises(UnsupportedError, match="memory_fraction"):
        EngineConfig.from_options({"memory_fraction": fraction})

"""The page: what stands beside figures, what is refused, and that it loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.records import SYNTHETIC, load_point, record

from winnow.bench.prices import Price
from winnow.bench.record import Record
from winnow.bench.report import page
from winnow.bench.report.compare import compare
from winnow.bench.report.tables import figure, generic
from winnow.errors import RequestError

CHROMIUM = Path("/usr/bin/chromium")


def words(html: str) -> str:
    """What a reader sees, without tags, styles and pictures' own markup."""
    without = re.sub(r"<style.*?</style>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", without).split())


def step(part: str, *samples: float, **changes: Any) -> Record:
    workload = {"model": "tiny", "context": 4096, "rows": 1, "part": part}
    fields = {"level": "step", "workload": workload, "run": "s1", **changes}
    return record("decode step", samples, **fields)


def capacity(experts: str, fits: float) -> Record:
    nothing = dict.fromkeys(("acceptance", "cache_state", "concurrency", "latency_objective"))
    formats = {"formats": {"experts": experts}}
    fields = {"level": "capacity", "unit": "sequences"}
    return record("sequences that fit", (fits,), {**nothing, **formats}, **fields)


def everything() -> list[Record]:
    return [
        capacity("mxfp8", 28.0),
        capacity("nvfp4", 76.0),
        record("select_blocks", (5.0, 5.1), {"concurrency": 1}, level="kernel", unit="us"),
        record("one layer", (50.0,), level="layer", unit="us"),
        step("whole", 10.0, 11.0),
        step("experts", 6.0, 7.0),
        step("rest", 4.0, 4.0),
        *load_point(1, 100.0, 500.0),
        *load_point(8, 60.0, 3000.0),
        *load_point(4, 55.0, 2000.0),
    ]


def test_every_level_has_its_section_and_says_what_it_does_not_mean() -> None:
    seen = words(page(everything()))
    for level in ("Capacity", "Kernel", "Layer", "Step", "Serving"):
        assert f"{level} level" in seen
    assert "More room is not more speed" in seen
    assert "Step level" not in words(page([capacity("nvfp4", 76.0)]))


def test_conditions_stand_beside_each_figure() -> None:
    seen = words(page(everything()))
    assert seen.count("commit 0123456789ab") >= 5
    assert "kv nvfp4 · index nvfp4 · tp4" in seen.replace("index nvfp4 · kv", "kv")
    assert "first token within ms: 500" in seen
    assert "empty, prefix caching on" in seen


def test_synthetic_acceptance_is_marked_on_its_figures_and_on_no_others() -> None:
    plain, made = load_point(1, 100.0, 500.0), load_point(2, 90.0, 900.0, conditions=SYNTHETIC)
    assert "synthetic acceptance" not in page(plain)
    html = page([*plain, *made])
    assert "accepted drafts by a set rate" in html
    rows = re.findall(r"<tr>.*?</tr>", html)
    marked = [row for row in rows if "synthetic acceptance" in row]
    assert len(marked) == 1
    assert "2 at once" in marked[0]
    headings = re.findall(r"<h3.*?</h3>", html)
    assert ["synthetic" in heading for heading in headings] == [False, True]
    assert html.count("synthetic acceptance</text>") == 1


def test_the_parts_of_a_step_are_drawn_with_shares_and_the_whole() -> None:
    html = page([step("whole", 10.0), step("experts", 6.0), step("rest", 4.0)])
    assert "decode step, 1 row, 8 x 4096 tokens: 10 ms" in html
    assert ">experts</text>" in html


def test_a_whole_step_without_parts_is_a_row_and_no_picture() -> None:
    alone = step("whole", 8.5, run="graph", workload={"part": "whole", "rows": 1, "context": 9})
    html = page([step("whole", 10.0), step("experts", 6.0), step("rest", 4.0), alone])
    assert html.count("<svg") == 1
    assert "8.5 ms" in words(html)


def test_a_frontier_says_which_points_are_on_it_and_what_a_price_buys() -> None:
    html = page(everything(), [Price("H200", "EUR", 3.6)])
    rows = [words(row) for row in re.findall(r"<tr>.*?</tr>", html) if "at once" in row]
    assert rows == [
        "4 at once, tp4 55 2,000 2,000,000 no",
        "8 at once, tp4 60 3,000 3,000,000 yes",
        "1 at once, tp4 100 500 500,000 yes",
    ]
    assert "tokens per EUR" in html


def test_one_frontier_of_two_condition_sets_is_refused() -> None:
    records = [*load_point(1, 100.0, 500.0), *load_point(2, 90.0, 900.0, conditions=SYNTHETIC)]
    assert page(records).count("<svg") == 2
    with pytest.raises(RequestError, match=r"acceptance\.kind is 'natural' and 'synthetic'"):
        page(records, one_frontier=True)


def test_warm_up_requests_are_in_no_table() -> None:
    warm = record(samples=(9999.0,), workload={"name": "chat", "phase": "warm-up"}, run="r")
    assert "9,999" not in page([warm, *load_point(1, 100.0, 500.0)])


def test_text_from_records_cannot_become_markup() -> None:
    evil = "<script>alert(1)</script>"
    records = [record(evil, workload={"name": evil}), *load_point(1, 1.0, 1.0, commit=evil)]
    html = page([*records, capacity(evil, 1.0), capacity("nvfp4", 2.0)])
    assert "<script" not in html
    assert "&lt;script&gt;" in html


class References(HTMLParser):
    """Addresses in attributes that make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action") and value:
                self.found.append(value)


def test_the_page_refers_to_nothing_outside_itself() -> None:
    html = page(everything())
    references = References()
    references.feed(html)
    outside = [r for r in references.found if not r.startswith(("#", "data:,"))]
    assert not outside
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no chromium")
def test_the_page_opens_in_a_browser_without_a_request_or_an_overflow(tmp_path: Path) -> None:
    api = pytest.importorskip("playwright.sync_api")
    path = tmp_path / "report.html"
    path.write_text(page(everything()), encoding="utf-8")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for width in (390, 1280):
            view = browser.new_page(viewport={"width": width, "height": 844})
            asked: list[str] = []
            said: list[str] = []
            view.on("request", lambda request, asked=asked: asked.append(request.url))
            view.on("console", lambda message, said=said: said.append(message.text))
            view.goto(path.as_uri())
            assert asked == [path.as_uri()]
            assert not said
            assert view.evaluate("document.documentElement.scrollWidth") <= width
            size = view.evaluate(
                "Math.min(...[...document.querySelectorAll('svg text')].map(t => "
                "t.getBoundingClientRect().height))"
            )
            assert size >= 8
        browser.close()


def test_a_comparison_names_differences_before_figures_and_gives_no_ratio_of_two() -> None:
    fp8 = {"formats": {"kv": "fp8", "index": "nvfp4"}}
    left = [record(run="a"), record("goodput", (3.0,), unit="1/s")]
    right = [record(samples=(105.0,), conditions=fp8, run="b", commit="fedcba987654")]
    found = compare(left, right)
    assert found.changed == ["commit", "formats.kv"]
    assert [(p.what, p.left, p.right, p.ratio) for p in found.pairs] == [
        ("time to first token", "210 ms", "105 ms", "")
    ]
    assert found.unmatched == 1
    seen = words(page([*left, *right], comparison=found, sides=("a.jsonl", "b.jsonl")))
    assert seen.index("kv nvfp4 fp8") < seen.index("time to first token")
    assert "No ratio is given: with 2 differences" in seen
    assert "1 records have no partner" in seen


def test_a_comparison_in_one_condition_gives_the_ratio_and_says_of_what() -> None:
    found = compare([record()], [record(samples=(105.0,), conditions=SYNTHETIC)])
    assert found.changed == ["acceptance"]
    assert found.pairs[0].ratio == "0.500"
    assert found.pairs[0].synthetic
    seen = words(page([record()], comparison=found, sides=("a", "b")))
    assert "They differ in acceptance. That alone is behind every difference" in seen


def test_sets_with_nothing_in_common_are_not_compared() -> None:
    with pytest.raises(RequestError, match="no record of one side has a partner"):
        compare([record()], [record("goodput")])


def test_columns_are_what_tells_rows_apart_and_equal_columns_are_one() -> None:
    rows = [
        record("kernel", (1.0,), {"concurrency": n}, workload={"requests": n, "width": 7})
        for n in (1, 8)
    ]
    (table,) = generic(rows)
    assert table.columns == ["median", "requests, concurrency", "p10 to p90", "samples"]
    assert table.shared["workload.width"] == "7"
    assert table.title == "kernel"


@pytest.mark.parametrize(
    ("value", "seen"),
    [(0, "0"), (1234567.0, "1,234,567"), (104.25, "104.2"), (3.16, "3.16"), (0.00001, "1.00e-05")],
)
def test_figures_keep_what_they_know_and_no_more(value: float, seen: str) -> None:
    assert figure(value) == seen

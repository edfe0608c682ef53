"""The order of a report: levels one by one, each with what may be concluded from it.

Owns the words between figures. Combines nothing across levels or condition sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files

from winnow.bench.conditions import LEVELS, is_synthetic
from winnow.bench.prices import Price
from winnow.bench.record import Record
from winnow.bench.report import html, tables
from winnow.bench.report.compare import Comparison
from winnow.bench.report.levels import section

_MEANING: Mapping[str, str] = {
    "capacity": "How much state fits. More room is not more speed: it becomes throughput only if "
    "traffic fills it and nothing else binds first.",
    "kernel": "One operation alone. A gain here reaches a step only by the share that the "
    "operation has of it, and a served request by less.",
    "layer": "One layer of the model, its operations together. Nothing outside it is included.",
    "step": "One turn of the engine without HTTP, queues or clients. Parts are of one step and "
    "add up to it; a step of one batch and context says nothing of another.",
    "serving": "What clients saw, under the load and the objectives given. Each point is one "
    "load: speed for a user and throughput of the whole are never had both at their best.",
}
_SYNTHETIC = (
    "Figures marked “synthetic acceptance” accepted drafts by a set rate instead of by what the "
    "model said. They compare systems; they are not the speed that a user of the model would see."
)


def page(
    records: Sequence[Record],
    prices: Sequence[Price] = (),
    comparison: Comparison | None = None,
    sides: tuple[str, str] = ("", ""),
    one_frontier: bool = False,
) -> str:
    """The report as one HTML document that loads nothing.

    `sides` are the names of what `comparison` compares. `one_frontier` puts all serving records
    into one, and is a RequestError if their conditions differ.
    """
    levels = [level for level in LEVELS if any(r.level == level for r in records)]
    titles = {level: f"{level.capitalize()} level" for level in levels}
    parts = [html.heading(1, "Winnow report")]
    parts.append(html.paragraph(_summary(records), "soft"))
    if any(is_synthetic(record.conditions) for record in records):
        parts.append(html.paragraph(_SYNTHETIC, "warning"))
    links = "".join(f'<a href="#{level}">{title}</a>' for level, title in titles.items())
    parts.append(f"<nav>{links}</nav>")
    if comparison is not None:
        parts += _compared(comparison, sides)
    for level in levels:
        own = [record for record in records if record.level == level]
        parts.append(html.heading(2, titles[level], level))
        parts.append(html.paragraph(_MEANING[level]))
        parts += section(level, own, prices, one_frontier)
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    return html.document("Winnow report", style, "".join(parts))


def _summary(records: Sequence[Record]) -> str:
    commits = list(dict.fromkeys(record.commit for record in records))
    return f"{len(records)} records of commit {', '.join(commits)}."


def _compared(comparison: Comparison, sides: tuple[str, str]) -> Iterable[str]:
    yield html.heading(2, f"{sides[0]} and {sides[1]}", "comparison")
    changed = comparison.changed
    if changed:
        alone = "That alone is" if len(changed) == 1 else "All of it together is"
        yield html.paragraph(
            f"They differ in {', '.join(map(tables.short, changed))}. {alone} behind every "
            "difference between the figures below."
        )
        rows = [list(row) for row in comparison.differences]
        yield html.table(tables.Table("", {}, ["condition", *sides], rows, [False] * len(rows)))
    else:
        yield html.paragraph("They were measured under the same conditions.")
    if len(changed) > 1:
        yield html.paragraph(
            f"No ratio is given: with {len(changed)} differences nobody could say what it is of."
        )
    columns = ["what", "level", "of", *sides]
    rows = [[p.what, p.level, p.detail, p.left, p.right] for p in comparison.pairs]
    if len(changed) <= 1:
        columns.append("ratio")
        rows = [[*row, p.ratio] for row, p in zip(rows, comparison.pairs, strict=True)]
    marked = [pair.synthetic for pair in comparison.pairs]
    yield html.table(tables.Table("", {}, columns, rows, marked))
    if comparison.unmatched:
        yield html.paragraph(
            f"{comparison.unmatched} records have no partner on the other side and are not shown "
            "here.",
            "soft",
        )

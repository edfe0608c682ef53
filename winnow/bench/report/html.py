"""Pieces of HTML. Every text that comes from a record is escaped here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from winnow.bench.report.tables import Table, headline, short

MARK = '<span class="mark">synthetic acceptance</span>'
_NUMBERS = "0123456789."


def table(content: Table) -> str:
    """A table that scrolls sideways by itself where it is too wide."""
    head = "".join(f"<th>{escape(title)}</th>" for title in content.columns)
    body = "".join(
        f"<tr>{_cells(row, marked)}</tr>"
        for row, marked in zip(content.rows, content.marked, strict=True)
    )
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def conditions(shared: Mapping[str, str], title: str) -> str:
    """What holds for a figure: the most important in a line, everything where it is opened."""
    pairs = "".join(
        f"<dt>{escape(short(name))}</dt><dd>{escape(value)}</dd>" for name, value in shared.items()
    )
    return (
        f'<p class="conditions">{escape(headline(shared))}</p>'
        f"<details><summary>{escape(title)}</summary><dl>{pairs}</dl></details>"
    )


def figure(svg: str, title: str, caption: str) -> str:
    """A picture; `svg` is ours and goes in as it is."""
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)
    return f"<figure>{labelled}<figcaption>{escape(caption)}</figcaption></figure>"


def document(title: str, style: str, body: str) -> str:
    """The page. Its policy forbids the browser to load anything."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>{body}</body></html>\n"
    )


def paragraph(words: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<p{attribute}>{escape(words)}</p>"


def heading(rank: int, words: str, anchor: str = "", marked: bool = False) -> str:
    identity = f' id="{escape(anchor)}"' if anchor else ""
    return f"<h{rank}{identity}>{escape(words)}{' ' + MARK if marked else ''}</h{rank}>"


def _cells(row: Sequence[str], marked: bool) -> str:
    cells = []
    for place, value in enumerate(row):
        kind = ' class="number"' if value[:1] in _NUMBERS and value else ""
        mark = f" {MARK}" if marked and place == 0 else ""
        cells.append(f"<td{kind}>{escape(value)}{mark}</td>")
    return "".join(cells)

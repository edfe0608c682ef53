"""Pictures as SVG text, in the colours of the page they are put into. Decides nothing of content.

Sized for a phone: a picture is some 360 CSS pixels wide, so its text stays readable there.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from winnow.bench.frontier import Point, pareto

_INK = "#123456"
"""Stands for the page's own text colour, which the SVG takes over."""
_PALETTE = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
    "#8c7bd6", "#b5a300", "#5a8f8f", "#a65628", "#3b4cc0", "#f2a7c3",
)  # fmt: skip
_OTHERS = "#999999"
_WIDTH_IN = 3.8
_LABEL_CHARS = 56
_LEGEND_CHARS = 24
_SMALL_SHARE = 0.025
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "winnow",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": "#888888",
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def frontier(points: Sequence[Point], note: str) -> str:
    """Speed for a user against throughput of a device; `note` is written into the picture."""
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(3.1)
        best = pareto(points)
        axes.grid(True)
        axes.step(
            [p.speed for p in best],
            [p.throughput for p in best],
            where="pre",
            color=_PALETTE[0],
            linewidth=1.5,
        )
        for chosen, face in ((points, "none"), (best, _PALETTE[0])):
            axes.plot(
                [p.speed for p in chosen],
                [p.throughput for p in chosen],
                "o",
                markersize=7,
                markerfacecolor=face,
                markeredgecolor=_PALETTE[0],
            )
        for point in points:
            axes.annotate(
                point.load,
                (point.speed, point.throughput),
                textcoords="offset points",
                xytext=(0, 8),
                ha="center",
                fontsize=8,
            )
        axes.set_xlim(0, 1.2 * max(point.speed for point in points))
        axes.set_ylim(0, 1.25 * max(point.throughput for point in points))
        axes.set_xlabel("tokens per second per user")
        axes.set_ylabel("all tokens per second per device")
        _write_note(axes, note)
        return _svg(figure)


def stacks(steps: Mapping[str, Mapping[str, float]], wholes: Mapping[str, float], unit: str) -> str:
    """One horizontal bar for each step, of its parts as shares of the whole, so that steps of very
    different length stay readable side by side; parts too small to see are one."""
    names = list(dict.fromkeys(part for parts in steps.values() for part in parts))
    shares = {s: {p: v / wholes[s] for p, v in parts.items()} for s, parts in steps.items()}
    large = [n for n in names if any(own.get(n, 0.0) > _SMALL_SHARE for own in shares.values())]
    rows = [(name, [own.get(name, 0.0) for own in shares.values()]) for name in large]
    others = [1 - sum(widths) for widths in zip(*(row for _, row in rows), strict=True)]
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.9 + 0.55 * len(steps) + 0.2 * -(-len(rows) // 2))
        left = [0.0] * len(steps)
        for place, (name, widths) in enumerate([*rows, ("all others", others)]):
            colour = _PALETTE[place % len(_PALETTE)] if place < len(rows) else _OTHERS
            label = textwrap.fill(name, _LEGEND_CHARS)
            axes.barh(list(steps), widths, 0.5, left, color=colour, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for place, step in enumerate(steps):
            words = f"{step}: {wholes[step]:.4g} {unit}"
            axes.text(0, place - 0.3, words, va="bottom", fontsize=8)
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.set_xlim(0, 1)
        axes.xaxis.set_major_formatter("{x:.0%}")
        axes.spines["left"].set_visible(False)
        figure.legend(loc="outside lower left", ncols=2, fontsize=8.5)
        return _svg(figure)


def bars(values: Sequence[tuple[str, float]], unit: str) -> str:
    """One horizontal bar for each (label, value)."""
    labels = [textwrap.fill(label, _LABEL_CHARS) for label, _ in values]
    numbers = [value for _, value in values]
    lines = max(label.count("\n") for label in labels)
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(0.7 + (0.5 + 0.16 * lines) * len(values))
        axes.barh(range(len(values)), numbers, 0.4, color=_PALETTE[0])
        top = max(numbers) or 1.0
        for place, (label, value) in enumerate(zip(labels, numbers, strict=True)):
            axes.text(0, place - 0.26, label, va="bottom", fontsize=8)
            axes.text(value + top * 0.01, place, _number(value), va="center", fontsize=8.5)
        axes.invert_yaxis()
        axes.set_yticks([])
        axes.set_xlim(0, top * 1.3)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.spines["left"].set_visible(False)
        return _svg(figure)


def _figure(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _write_note(axes: Axes, note: str) -> None:
    axes.text(
        0.99, 0.99, note, transform=axes.transAxes, ha="right", va="top", fontsize=8.5,
        color="#d55e00", fontweight="bold",
    )  # fmt: skip


def _svg(figure: Figure) -> str:
    """The SVG element alone: no prolog, no metadata, no ids that a second picture would repeat."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-zA-Z0-9]+(_[a-z]+)*_\d+"', "", text)
    return text.replace(_INK, "currentColor")

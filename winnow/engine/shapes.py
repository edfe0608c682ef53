"""Which shapes of step are captured: sizes of batches and widths of block tables. Arithmetic only.

A step is padded up to a shape, so few shapes serve all steps. Padding rows are routed to experts
like others, so small batches, where that would read weights for nothing, have their own sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 8
"""Rows of a request in a captured step; more are a chunk of a prompt."""
_MIN_WIDTH = 16
_MAX_REQUESTS = 512


@dataclass(frozen=True)
class StepShape:
    """`requests` with `rows` each, over block tables `width` blocks wide."""

    requests: int
    rows: int
    width: int

    @property
    def num_rows(self) -> int:
        return self.requests * self.rows


def batch_sizes(most: int) -> tuple[int, ...]:
    """Numbers of requests that steps of up to `most` requests are padded to, ascending."""
    most = min(most, _MAX_REQUESTS)
    sizes = [*range(1, 9), 12, 16, 24, 32, 48, 64, *range(96, _MAX_REQUESTS + 1, 32)]
    return (*(size for size in sizes if size < most), most)


def table_widths(max_blocks: int) -> tuple[int, ...]:
    """Widths of block tables for sequences of up to `max_blocks` blocks: powers of two, since
    kernels' grids and scratch follow the width and short sequences shall not pay for long ones."""
    widths = []
    width = _MIN_WIDTH
    while width < max_blocks:
        widths.append(width)
        width *= 2
    return (*widths, max_blocks)


def fitting(sizes: tuple[int, ...], wanted: int) -> int | None:
    """The smallest of ascending `sizes` that holds `wanted`; None if none does."""
    return next((size for size in sizes if size >= wanted), None)

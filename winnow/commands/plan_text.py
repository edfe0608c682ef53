"""Plans as tables for people. Computes nothing but sums, shares and units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from winnow.spec.capacity import BATCHES, Plan, differences
from winnow.spec.model import BLOCK_TOKENS
from winnow.spec.roofline import Floor

Row = Sequence[str]


def render(plan: Plan) -> str:
    """One plan: what was assumed, then bytes, what fits, and time floors."""
    return "\n".join(_lines(plan))


def render_comparison(plans: Sequence[Plan]) -> str:
    """Plans side by side: first what differs in their settings, then their numbers."""
    return "\n".join(_comparison(list(plans)))


def _lines(plan: Plan) -> Iterator[str]:
    settings = plan.settings
    where = f" on {settings['gpus']} x {settings['gpu']}" if settings["gpu"] else ""
    copies = f", {settings['replicas']} replicas" if settings["replicas"] > 1 else ""
    yield f"{settings['model']}{where}, {settings['parallel']}{copies}"
    yield "\nAssumed"
    yield from (f"  - {sentence}" for sentence in plan.assumptions)
    yield "\nWeights"
    yield from _table(_weights(plan))
    yield f"\nCache: KV in {settings['kv']}, index keys in {settings['index']}"
    yield from _table(_cache(plan))
    yield (
        f"  {plan.row_bytes:,} bytes per page row of {BLOCK_TOKENS} tokens "
        f"in {plan.row_pieces} pieces"
    )
    if plan.fit is not None:
        yield "\nFits"
        yield from (f"  {line}" for line in _fit(plan))
    if plan.roofline is not None:
        yield from _decode(plan, plan.roofline.decode)
        yield from _prefill(plan, plan.roofline.prefill)


def _weights(plan: Plan) -> Iterator[Row]:
    yield "", "checkpoint, bytes", "each rank, bytes"
    for part, stored in plan.checkpoint.items():
        if stored or plan.weights.get(part):
            yield part, f"{stored:,}", f"{plan.weights.get(part, 0):,}"
    yield "total", f"{plan.checkpoint_bytes:,}", f"{plan.weight_bytes:,}"
    yield "", f"{plan.checkpoint_bytes / 1e9:.1f} GB", f"{plan.weight_bytes / 1e9:.1f} GB"


def _cache(plan: Plan) -> Iterator[Row]:
    yield "", "per token, bytes", "per row, bytes"
    for part, num_bytes in plan.token_bytes.items():
        yield part, f"{num_bytes:,}", f"{plan.row_parts[part]:,}"
    yield "total", f"{sum(plan.token_bytes.values()):,}", f"{plan.row_bytes:,}"


def _fit(plan: Plan) -> Iterator[str]:
    fit, settings = plan.fit, plan.settings
    assert fit is not None
    yield (
        f"beside the weights in {fit.usable_bytes:,} usable bytes of each GPU: "
        f"{fit.num_pages:,} pages of {fit.charged_row_bytes:,} bytes"
    )
    yield f"{fit.num_tokens:,} tokens in each group of ranks that share sequences"
    yield (
        f"{fit.sequences:,} sequences of {settings['context']:,} tokens in all, "
        f"{fit.sequences_per_group:,} in each group"
    )
    if not fit.sequences:
        yield f"the longest sequence that fits has {fit.num_tokens:,} tokens"


def _decode(plan: Plan, floors: Sequence[Floor]) -> Iterator[str]:
    batches = sorted({floor.batch for floor in floors})
    cells = {(floor.context, floor.batch): floor for floor in floors}
    yield "\nDecode step: floor in ms, and the part that takes most of it (* does not fit)"
    rows: list[Row] = [("context", *(f"batch {batch:,}" for batch in batches))]
    for context in sorted({floor.context for floor in floors}):
        row = [cells[context, batch] for batch in batches]
        rows.append((f"{context:,}", *(_cell(floor) for floor in row)))
    yield from _table(rows)
    asked = plan.settings["context"]
    fitting = [floor for floor in floors if floor.context == asked and floor.fits]
    # The fastest step for one user, and the one that serves as many as fit.
    for batch in sorted({floor.batch for floor in (*fitting[:1], *fitting[-1:])}):
        yield f"\nDecode step at {asked:,} tokens, batch {batch:,}"
        yield from _table(_parts(cells[asked, batch], 1))


def _prefill(plan: Plan, floors: Sequence[Floor]) -> Iterator[str]:
    yield "\nPrefill of one prompt in each group: floors, and the part that takes most"
    rows: list[Row] = [("context", "ms", "us per token", "part")]
    for floor in floors:
        rows.append(
            (
                f"{floor.context:,}",
                f"{floor.floor_us / 1e3:,.1f}",
                f"{floor.floor_us / floor.context:.2f}",
                f"{floor.binds} ({floor.parts[floor.binds].limit})",
            )
        )
    yield from _table(rows)
    asked = next(floor for floor in floors if floor.context == plan.settings["context"])
    yield f"\nPrefill of {asked.context:,} tokens, by token"
    yield from _table(_parts(asked, asked.context))


def _cell(floor: Floor) -> str:
    mark = "*" if floor.fits is False else ""
    return f"{floor.floor_us / 1e3:.2f}{mark} {floor.binds}"


def _parts(floor: Floor, tokens: int) -> Iterator[Row]:
    """Parts of a floor, divided by `tokens`."""
    yield "", "MB moved", "GFLOP", "MB sent", "floor, us", "share", "limit"
    for name, part in floor.parts.items():
        if not part.floor_us:
            continue
        yield (
            name,
            f"{part.num_bytes / tokens / 1e6:,.2f}",
            f"{part.num_flops / tokens / 1e9:,.2f}",
            f"{part.link_bytes / tokens / 1e6:,.2f}",
            f"{part.floor_us / tokens:,.2f}",
            f"{part.floor_us / floor.floor_us:.0%}",
            part.limit,
        )
    yield "total", "", "", "", f"{floor.floor_us / tokens:,.2f}", "", ""


def _comparison(plans: list[Plan]) -> Iterator[str]:
    # Numbered, since a preset may stand beside itself in other formats.
    names = tuple(f"{i}: {plan.settings['model']}" for i, plan in enumerate(plans, start=1))
    differing = differences(plans)
    yield "Differs"
    yield from _table(((name, *map(_word, values)) for name, values in differing.items()), names)
    same = (name for name in plans[0].settings if name not in differing)
    yield "\nSame"
    yield from _table((name, _word(plans[0].settings[name])) for name in same)
    shared = [s for s in plans[0].assumptions if all(s in plan.assumptions for plan in plans)]
    yield "\nAssumed for all"
    yield from (f"  - {sentence}" for sentence in shared)
    for name, plan in zip(names, plans, strict=True):
        yield f"\nAssumed for {name}"
        yield from (f"  - {sentence}" for sentence in plan.assumptions if sentence not in shared)
    numbers = [dict(_numbers(plan)) for plan in plans]
    labels = dict.fromkeys(label for column in numbers for label in column)
    yield "\nNumbers"
    yield from _table(
        ((label, *(column.get(label, "-") for column in numbers)) for label in labels), names
    )


def _numbers(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "checkpoint, GB", f"{plan.checkpoint_bytes / 1e9:.1f}"
    for part, num_bytes in plan.weights.items():
        yield f"{part} on a rank, GB", f"{num_bytes / 1e9:.2f}"
    yield "weights on a rank, GB", f"{plan.weight_bytes / 1e9:.1f}"
    for part, num_bytes in plan.token_bytes.items():
        yield f"{part} per token, bytes", f"{num_bytes:,}"
    yield "page row, bytes", f"{plan.row_bytes:,}"
    if plan.fit is not None:
        yield "pages", f"{plan.fit.num_pages:,}"
        yield "tokens in a group", f"{plan.fit.num_tokens:,}"
        yield "sequences in all", f"{plan.fit.sequences:,}"
    if plan.roofline is None:
        return
    context = plan.settings["context"]
    decode = [floor for floor in plan.roofline.decode if floor.context == context]
    for floor in decode:
        if floor.batch in BATCHES:
            yield f"decode step at batch {floor.batch}, ms", _cell(floor)
    full = [floor for floor in decode if floor.fits]
    if full:
        yield "decode step at all that fit, ms", f"{_cell(full[-1])} at batch {full[-1].batch}"
    for floor in plan.roofline.prefill:
        if floor.context == context:
            yield "prefill, us per token", f"{floor.floor_us / context:.2f} {floor.binds}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(rows: Iterable[Row], head: Row = ()) -> Iterator[str]:
    """Columns as wide as their widest cell: the first to the left, numbers to the right."""
    cells = [*([("", *head)] if head else []), *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        line = f"  {first:{widths[0]}}"
        for cell, width in zip(others, widths[1:], strict=True):
            line += f"  {cell:>{width}}"
        yield line.rstrip()

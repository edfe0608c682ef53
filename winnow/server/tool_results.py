"""Results of calls, in the order of the calls: the chat format has no ids, only places.

Knows nothing of what calls and results say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from winnow.server.protocol import FieldError, shown

if TYPE_CHECKING:
    from winnow.server.chat_request import Message

_LISTED = 8
"""Of the calls' ids, in an error."""


def in_call_order(messages: Sequence[Message]) -> list[int]:
    """Places of all messages, each run of results sorted by the calls of the last assistant's.

    Results without ids stay as they came. FieldError for an id that no call has, and for results
    that would stand at another call's place: one is missing before them, or given twice.
    """
    order: list[int] = []
    ids: list[str | None] = []
    answered = 0
    for i, message in enumerate(messages):
        if message.role == "assistant":
            ids, answered = [call.id for call in message.tool_calls or []], 0
        if message.role != "tool":
            order.append(i)
        elif i == 0 or messages[i - 1].role != "tool":
            run = _run(messages, i)
            if any(messages[place].tool_call_id is not None for place in run):
                run = _sorted(messages, run, ids, answered)
            order += run
            answered += len(run)
    return order


def _run(messages: Sequence[Message], start: int) -> list[int]:
    """Places of the results from `start` to the next message of another kind."""
    end = start
    while end < len(messages) and messages[end].role == "tool":
        end += 1
    return list(range(start, end))


def _sorted(
    messages: Sequence[Message], run: list[int], ids: list[str | None], answered: int
) -> list[int]:
    for i in run:
        if messages[i].tool_call_id not in ids or messages[i].tool_call_id is None:
            raise _unknown(messages[i], i, ids)
    run = sorted(run, key=lambda i: ids.index(messages[i].tool_call_id))
    for place, i in enumerate(run, answered):
        given = messages[i].tool_call_id
        if place < len(ids) and given == ids[place]:
            continue
        # Sorted, so what is not the next call's is an earlier one's or leaves one out.
        is_second = given in ids[:place]
        what = (
            "has a result already: remove one"
            if is_second
            else f"comes after {shown(ids[place])}, which has no result: give one for each call"
        )
        raise FieldError(
            f"messages[{i}].tool_call_id",
            f"messages[{i}].tool_call_id is {shown(given)}, and that call {what}",
        )
    return run


def _unknown(message: Message, i: int, ids: list[str | None]) -> FieldError:
    param = f"messages[{i}].tool_call_id"
    known = [shown(call) for call in ids if call is not None]
    if message.tool_call_id is None:
        return FieldError(param, f"{param} is missing, the results beside it have one: give it")
    if not known:
        why = "have no id: give each its own" if ids else "are not there: send their message too"
        return FieldError(param, f"{param} is {shown(message.tool_call_id)}, but the calls {why}")
    listed = ", ".join(known[:_LISTED])
    if len(known) > _LISTED:
        listed += f" and {len(known) - _LISTED} more"
    return FieldError(
        param,
        f"{param} is {shown(message.tool_call_id)}, the calls before it are {listed}: give one of "
        "these",
    )

"""Law 11: the order in which the worker acts within a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oracle.laws.trial import Trial, law
from sim.history import Act, Scheduled, Selection


@law(
    11,
    "Within a step a block is zeroed before anything else is written to it, a copy takes its source before that is written "
    "over, and whatever the forward pass reads is there before it.",
    (Scheduled,),
)
def check_order(trial: Trial, record: Scheduled) -> None:
    """Law 11. Only acts that meet in a block have an order; a block that nobody computes with in this step may be filled
    after the forward pass. Of acts that come again and again, the last of those that go first counts."""
    if record.acts is None or len(record.acts) < 2:
        return
    last = {act: index for index, act in enumerate(record.acts)}
    for first, second, blocks in _orders(trial, record):
        if not blocks or first not in last or second not in last:
            continue
        if last[first] > record.acts.index(second):
            block = min(blocks)
            what = trial.replay.describe(block)
            message = f"{second} before {first}, but both concern blocks {sorted(blocks)}; block {block} {what}"
            trial.report("fill", 11, f"{second}_before_{first}", message, expected=[first, second], observed=record.acts)


def _orders(trial: Trial, record: Scheduled) -> Iterator[tuple[Act, Act, set[int]]]:
    """(what must come first, what after it, the blocks that both concern)."""
    zeroed = set(record.zeroed)
    sources, targets = ({pair[end] for pair in record.copies} for end in (0, 1))
    received = record.received or {}
    filled = _blocks(received.values())
    computed = {block for request in record.scheduled for block in _held(trial, request)}
    yield "zero", "copy", zeroed & targets
    yield "zero", "fill", zeroed & filled
    yield "zero", "forward", zeroed & computed
    yield "copy", "fill", (sources | targets) & filled
    yield "copy", "forward", (sources | targets) & computed
    yield "fill", "forward", _blocks(received[request] for request in record.scheduled if request in received)


def _held(trial: Trial, request: str) -> Iterator[int]:
    for table in trial.replay.tables.get(request, ()):
        yield from table


def _blocks(selections: Iterable[Selection]) -> set[int]:
    return {block for selection in selections for group in selection.groups for block in group}

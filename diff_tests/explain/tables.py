"""Block tables position by position: what each block holds, where it came from, and what was to happen to it and did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diff_tests.explain.blocks import Place
from diff_tests.explain.story import Step, Story
from oracle.selection import NULL
from sim.history import Scheduled

_NOTHING_WRONG = ("", "right", "to be filled")


class Marks(NamedTuple):
    """What was to happen to one entry in the step of the admission, and what did. None: not known."""

    expected: bool | None = None
    selected: bool | None = None
    received: bool | None = None
    written: bool | None = None


class Row(NamedTuple):
    """One entry of a block table. position None: a block that is not in the table. block None: no entry on this side.
    predicted: the model's block where it is another one, -1 for none. verdict: in words, empty where nothing was to
    happen and nothing did."""

    position: int | None
    block: int | None
    start: int
    end: int
    holds: str
    origin: str
    marks: Marks
    verdict: str
    is_wrong: bool
    predicted: int | None = None


class TableView(NamedTuple):
    """One request's table in one group after scheduling in `step`. has_marks: the step granted external tokens, or the
    connector did something for the request. is_diverged: the model has another table."""

    request: str
    group: int
    group_kind: str
    block_size: int
    step: int
    rows: list[Row]
    has_marks: bool
    is_diverged: bool


def table_view(story: Story, step: Step, request: str, group: int, predicted: Sequence[int] | None = None) -> TableView:
    """One request's table in one group after a step. predicted: the model's table there."""
    view, table = story.groups[group], step.tables[request][group]
    other = table if predicted is None else predicted
    selection = _Selection.of(story, step, request, group)
    rows = [_row(story, step, request, group, position, block, selection) for position, block in enumerate(table)]
    if other != table:
        rows = _with_predicted(rows, other)
    rows += _strangers(story, step, request, group, table, selection)
    return TableView(request, group, view.kind, view.block_size, step.number, rows, selection is not None, other != table)


def _row(
    story: Story, step: Step, request: str, group: int, position: int, block: int, selection: _Selection | None
) -> Row:
    view = story.groups[group]
    start, end = position * view.block_size, (position + 1) * view.block_size
    end = max(min(end, step.computed.get(request, 0)), start)
    if view.kind == "circular":
        start, end = 0, step.computed.get(request, 0)
    found = story.origin(Place(request, group, position), step.number)
    origin = found.words if found is not None else ""
    holds = _holds_words(view.kind, start, end) if block != NULL else ""
    if selection is None:
        return Row(position, block, start, end, holds, origin, Marks(), "", False)
    marks = selection.marks(block)
    verdict = selection.verdict(block, marks)
    return Row(position, block, start, end, holds, origin, marks, verdict, verdict not in _NOTHING_WRONG)


def _strangers(
    story: Story, step: Step, request: str, group: int, table: Sequence[int], selection: _Selection | None
) -> list[Row]:
    """Blocks that were chosen or written for the request's group, but are not in its table there."""
    if selection is None:
        return []
    strangers = dict.fromkeys(block for block in selection.touched() if block not in table)
    by_marks: dict[Marks, list[int]] = {}
    for block in strangers:
        by_marks.setdefault(selection.marks(block), []).append(block)
    rows = []
    for marks, blocks in by_marks.items():
        whose = dict.fromkeys(_whose(story, block, step.number) for block in blocks)
        origin = next(iter(whose)) + (" and others" if len(whose) > 1 else "")
        rows += [Row(None, block, 0, 0, "", origin, marks, "not in this table", True) for block in blocks]
    return rows


def _whose(story: Story, block: int, step: int) -> str:
    if not 0 < block < story.num_blocks:
        return "null" if block == NULL else "outside the pool"
    holders = story.holders(block, step)
    if not holders:
        owner = story.owner(block, step)
        return f"free, {owner}'s before" if owner is not None else "free, never used"
    return ", ".join(dict.fromkeys(f"{holder.request}'s, group {holder.group}" for holder in holders))


class _Selection:
    """What a step was to do, and did, to one request's blocks in one group."""

    def __init__(
        self,
        expected: Sequence[int] | None,
        selected: Sequence[int] | None,
        received: Sequence[int] | None,
        written: dict[int, set[str]] | None,
    ) -> None:
        self.expected, self.selected, self.received, self.written = expected, selected, received, written

    @staticmethod
    def of(story: Story, step: Step, request: str, group: int) -> _Selection | None:
        """None where the step granted the request nothing and the connector left it alone."""
        record = step.record
        if record is None:
            return None
        num_external = record.external.get(request, 0)
        chosen = (record.selected or {}).get(request)
        if not num_external and chosen is None:
            return None
        expected: Sequence[int] | None = None
        if story.contract is not None:
            num_local = record.hits.get(request, 0)
            expected = story.contract.loads(step.tables[request], num_local, num_external)[group]
        return _Selection(
            expected,
            None if record.selected is None else _of_group(chosen.groups if chosen else [], group),
            None if record.received is None else _received(record, request, group),
            None if record.written is None else _written(record, group),
        )

    def marks(self, block: int) -> Marks:
        """What was to happen to a block, and did."""
        states = self.written.get(block, set()) if self.written is not None else set()
        is_received = self.received is None or block in self.received  # else another request's fill
        is_written = "outside" in states or (is_received and bool(states & {"filled", "wrong_value"}))
        return Marks(
            None if self.expected is None else block in self.expected,
            None if self.selected is None else block in self.selected,
            None if self.received is None else block in self.received,
            None if self.written is None or block == NULL else is_written,
        )

    def verdict(self, block: int, marks: Marks) -> str:
        """The marks in words."""
        expected, selected, received, written = marks
        states = self.written.get(block, set()) if self.written is not None else set()
        if expected:
            if "wrong_value" in states:
                return "wrong value"
            if "unwritten" in states or written is False:
                return "stayed empty"
            if selected is False:
                return "not selected"
            if received is False:
                return "not received"
            return "right" if selected or received or written else "to be filled"
        if expected is None:
            return ""
        if block == NULL:
            return "null selected" if selected or received else ""
        if written:
            return "overwritten"
        if selected or received:
            return "selected wrongly"
        return ""

    def touched(self) -> list[int]:
        """Blocks that were chosen, sent or written unasked."""
        unasked = [block for block, states in (self.written or {}).items() if "outside" in states]
        return [*(self.selected or ()), *(self.received or ()), *unasked]


def _of_group(groups: Sequence[Sequence[int]], group: int) -> Sequence[int]:
    return groups[group] if group < len(groups) else []


def _received(record: Scheduled, request: str, group: int) -> Sequence[int]:
    arrived = (record.received or {}).get(request)
    return _of_group(arrived.groups, group) if arrived is not None else []


def _written(record: Scheduled, group: int) -> dict[int, set[str]]:
    """What became of the blocks in the layers of one group."""
    states: dict[int, set[str]] = {}
    for entry in record.written or ():
        if entry.group == group and entry.state != "padding":
            for block in entry.blocks:
                states.setdefault(block, set()).add(entry.state)
    return states


def _with_predicted(rows: Sequence[Row], other: Sequence[int]) -> list[Row]:
    """The rows, each with the model's block where it is another one."""
    merged = [
        row
        if position < len(other) and other[position] == row.block
        else row._replace(
            predicted=other[position] if position < len(other) else -1, verdict="not as predicted", is_wrong=True
        )
        for position, row in enumerate(rows)
    ]
    missing = [
        Row(position, None, 0, 0, "", "", Marks(), "not there", True, other[position])
        for position in range(len(rows), len(other))
    ]
    return merged + missing


def _holds_words(kind: str, start: int, end: int) -> str:
    if kind == "circular":
        return "ring"
    if end <= start:
        return "none yet"
    return f"state after {end}" if kind == "mamba" else f"[{start}, {end})"

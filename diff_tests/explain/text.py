"""An explanation as text: one screen, 80 columns wide, and as clear without colour as with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diff_tests.explain.actual import Checked, Id
from diff_tests.explain.explanation import NOTHING, Explanation, Moment
from diff_tests.explain.lookups import Lookup
from diff_tests.explain.tables import Marks, Row, TableView
from diff_tests.explain.words import count, span

MOST_MOMENTS = 5
"""Steps in the timeline around the one that is explained."""
MOST_ROWS = 12
"""Rows of one table that nothing is wrong with."""

_LETTERS = "ESRW"
_LEGEND = "E expected, S selected, R received, W written; - not, ? not known"


class Run(NamedTuple):
    """Entries that follow each other and are alike: of the first to the last position."""

    rows: list[Row]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def positions(self) -> str:
        if self.first.position is None:
            return "-"
        return span(self.first.position, self.rows[-1].position or 0)

    @property
    def blocks(self) -> str:
        return _ids([row.block for row in self.rows])

    @property
    def predicted(self) -> str:
        return _ids([row.block if row.predicted is None else row.predicted for row in self.rows])

    @property
    def holds(self) -> str:
        last = self.rows[-1]
        if len(self.rows) == 1 or not self.first.holds.startswith("["):
            return last.holds
        return f"[{self.first.start}, {last.end})"


def runs_of(rows: Sequence[Row]) -> list[Run]:
    """Entries with the same origin, marks and verdict go together."""
    runs: list[Run] = []
    for row in rows:
        if runs and _is_alike(runs[-1].rows[-1], row):
            runs[-1].rows.append(row)
        else:
            runs.append(Run([row]))
    return runs


def _is_alike(one: Row, other: Row) -> bool:
    same = (one.origin, one.marks, one.verdict) == (other.origin, other.marks, other.verdict)
    if one.position is None or other.position is None:
        return same and one.position == other.position
    return same and _kind_of_content(one) == _kind_of_content(other)


def _kind_of_content(row: Row) -> str:
    return row.holds if row.holds in ("", "none yet", "ring") else "tokens"


def print_explanation(console: Console, explanation: Explanation) -> None:
    """All of it, the most important first."""
    _say(console, explanation.headline, "bold red" if explanation.finding is not None else "bold")
    if explanation.known_issue is not None:
        _say(console, f"Known issue {explanation.known_issue[0]}: {explanation.known_issue[1]}")
    shown = [table for table in explanation.tables if not _is_beside_the_point(explanation, table)]
    for table in shown:
        _print_table(console, table, is_focus=table.step == explanation.step)
    if len(shown) < len(explanation.tables):
        others = [table for table in explanation.tables if table not in shown]
        console.print()
        _say(console, "Nothing wrong in " + "; ".join(f"{t.request}, group {t.group} ({t.group_kind})" for t in others))
    if any(table.has_marks for table in shown):
        _say(console, _LEGEND, "dim")
    console.print()
    _print_timeline(console, explanation.timeline)
    for lookup in explanation.lookups:
        _print_lookup(console, lookup)
    console.print()
    for title, sentence, place in explanation.decided_by:
        _say(console, f"{title[:1].upper()}{title[1:]}: {sentence}" + (f" [{place}]" if place else ""))
    for note in explanation.notes:
        _say(console, f"Note: {note}")
    if explanation.others:
        _say(console, f"And {count(len(explanation.others), 'more finding')}; `kvoracle run` lists them.")
    _say(console, explanation.title, "dim")


def _is_beside_the_point(explanation: Explanation, table: TableView) -> bool:
    """Another group than the finding's, with nothing wrong in it."""
    finding = explanation.finding
    if finding is None or finding.group in (None, table.group):
        return False
    return not any(row.is_wrong for row in table.rows)


def print_checked(console: Console, checked: Checked) -> None:
    """A pasted list, ID by ID."""
    _say(console, f"{checked.pasted.request}, group {checked.pasted.group}: {checked.headline}", "bold")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for name in ("index", "pasted", "right"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("", ratio=1)
    for run in _runs_of_ids(checked.ids):
        first, last = run[0], run[-1]
        expected = [one.expected for one in run]
        table.add_row(
            span(first.at, last.at),
            _ids([one.block for one in run]),
            "-" if first.expected is None else _ids(expected),
            Text(first.words, style="green" if first.kind == "right" else "bold red"),
        )
    console.print(table)


def _runs_of_ids(ids: Sequence[Id]) -> list[list[Id]]:
    """IDs that follow each other and are right go together."""
    runs: list[list[Id]] = []
    for one in ids:
        if runs and one.kind == runs[-1][-1].kind == "right":
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _say(console: Console, line: str, style: str = "") -> None:
    """A paragraph as it is: no markup; wrapped at words."""
    console.print(Text(line, style=style))


# ---------------------------------------------------------------------------------------------------------------- tables


def _print_table(console: Console, view: TableView, is_focus: bool) -> None:
    when = f"after step {view.step}" if is_focus else f"as of step {view.step}"
    size = count(view.block_size, "token")
    console.print()
    _say(console, f"{view.request}, group {view.group} ({view.group_kind}, {size} a block), {when}")
    if not view.rows:
        _say(console, "  no blocks")
        return
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    table.add_column("position", no_wrap=True)
    table.add_column("block", max_width=18)
    if view.is_diverged:
        table.add_column("model", max_width=18)
    table.add_column("tokens", no_wrap=True)
    table.add_column("from", ratio=1)
    if view.has_marks:
        table.add_column(" ".join(_LETTERS), no_wrap=True)
    if view.has_marks or view.is_diverged:
        table.add_column("", no_wrap=True)
    for run in _shown(runs_of(view.rows)):
        table.add_row(*(_cells(view, run) if isinstance(run, Run) else [run]))
    console.print(table)


def _shown(runs: Sequence[Run]) -> list[Run | str]:
    """All runs that something is wrong with, and the first of the others."""
    shown: list[Run | str] = []
    num_plain = num_hidden = 0
    for run in runs:
        if not run.first.is_wrong:
            num_plain += 1
            if num_plain > MOST_ROWS:
                num_hidden += 1
                continue
        shown.append(run)
    return [*shown, f"+{num_hidden}"] if num_hidden else shown


def _cells(view: TableView, run: Run) -> list[Text | str]:
    first = run.first
    cells: list[Text | str] = [Text(run.positions), Text(run.blocks)]
    if view.is_diverged:
        cells.append(Text(run.predicted))
    cells += [Text(run.holds), Text(first.origin)]
    if view.has_marks:
        cells.append(_marks(first.marks))
    if view.has_marks or view.is_diverged:
        words = first.verdict.upper() if first.is_wrong else first.verdict
        cells.append(Text(words, style="bold red" if first.is_wrong else "green"))
    return cells


def _marks(marks: Marks) -> Text:
    """`E - - -`: a letter for each that is so; in colour those that contradict what is expected."""
    text = Text()
    for letter, value in zip(_LETTERS, marks, strict=True):
        is_wrong = None not in (value, marks.expected) and value != marks.expected
        text.append("?" if value is None else letter if value else "-", style="bold red" if is_wrong else "")
        text.append(" ")
    return text


def _ids(blocks: Sequence[int | None]) -> str:
    """`1..101`, `4, 9`, `null` for block 0, `none` for no entry."""
    runs: list[list[int]] = []
    for block in blocks:
        number = -1 if block is None else block
        if runs and number > 0 and number == runs[-1][1] + 1:
            runs[-1][1] = number
        elif not runs or number > 0 or number != runs[-1][1]:
            runs.append([number, number])
    texts = [{0: "null", -1: "none"}.get(first) or span(first, last) for first, last in runs]
    return ", ".join(texts[:4]) + (", .." if len(texts) > 4 else "")


# -------------------------------------------------------------------------------------------------- timeline and lookups


def _print_timeline(console: Console, timeline: Sequence[Moment]) -> None:
    shown = _around([moment for moment in timeline if moment.words != NOTHING or moment.is_focus])
    last = 0
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for moment in shown:
        if moment.step > last + 1 and last:
            table.add_row("", "..", "")
        style = "bold" if moment.is_focus else ""
        table.add_row(">" if moment.is_focus else "", f"step {moment.step}", Text(moment.words, style=style))
        last = moment.step
    console.print(table)


def _around(timeline: Sequence[Moment]) -> list[Moment]:
    """Admissions before the focus count more than what lies between; at most MOST_MOMENTS."""
    focus = next((index for index, moment in enumerate(timeline) if moment.is_focus), len(timeline) - 1)
    ranked = sorted(range(len(timeline)), key=lambda index: _distance(timeline[index], index - focus))
    return [timeline[index] for index in sorted(ranked[:MOST_MOMENTS])]


def _distance(moment: Moment, offset: int) -> float:
    is_telling = any(word in moment.words for word in ("admitted", "resumed", "preempted", "loading"))
    if offset == 0:
        return 0
    return abs(offset) * (0.4 if is_telling and offset < 0 else 1)


def _print_lookup(console: Console, lookup: Lookup) -> None:
    console.print()
    who = f"Lookup of {lookup.request} in step {lookup.step}"
    if lookup.groups and all(part.fate.kind == "never_stored" and not part.alone for part in lookup.groups):
        _say(console, f"{who}: {lookup.hit} of {lookup.num_tokens} tokens are hit; {lookup.groups[0].fate.words}")
        return
    _say(console, f"{who}: {lookup.words}")
    alike: dict[tuple[int, str], list[int]] = {}
    for part in lookup.groups:
        alike.setdefault((part.alone, part.words), []).append(part.group)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for (alone, words), groups in alike.items():
        limits = any(part.limits for part in lookup.groups if part.group in groups) and len(lookup.groups) > 1
        mark = "*" if limits else " "
        who = f"group{'s' if len(groups) > 1 else ''} {', '.join(map(str, groups))}"
        own = f"{alone} alone; " if len(lookup.groups) > 1 else ""
        table.add_row(Text(f" {mark}{who}:"), Text(own + words))
    console.print(table)

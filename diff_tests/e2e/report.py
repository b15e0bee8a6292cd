"""What `e2e` prints: a table for each model, findings with their sentences, and last the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from diff_tests.e2e.runs import ModelRun, Row
from diff_tests.explain.words import ranges
from diff_tests.live.check import print_finding
from diff_tests.report import MOST_SHOWN, finding_document
from diff_tests.vllm_target.target import TargetInfo

_COLUMNS = ("act", "request", "step", "external", "group", "positions", "selected", "received", "written", "verdict")
_PLACE = ["", "", "", ""]
_MOST_RUNS = 4


def verdict(runs: Sequence[ModelRun]) -> str:
    """`pass` where every model was as the laws want, known issues aside."""
    return "pass" if runs and all(run.verdict in ("same", "known") for run in runs) else "fail"


def document(runs: Sequence[ModelRun], info: TargetInfo, connector: str) -> dict[str, Any]:
    """The JSON document of `e2e --json`."""
    return {
        "verdict": verdict(runs),
        "target": {"vllm": info.version, "connector": connector},
        "models": [_model_document(run) for run in runs],
    }


def _model_document(run: ModelRun) -> dict[str, Any]:
    checked = run.checked
    return {
        "model": run.model.name,
        "about": run.model.about,
        "transport": run.transport,
        "groups": run.layout,
        "verdict": run.verdict,
        "error": run.error or None,
        "steps": checked.num_steps if checked else 0,
        "followed": checked.num_followed if checked else 0,
        "not_followed_because": checked.gap if checked else None,
        "preemptions": run.num_preemptions,
        "seconds": round(run.seconds, 2),
        "start_seconds": round(run.start_seconds, 2),
        "findings": [finding_document(judged) for judged in checked.findings] if checked else [],
        "notes": checked.notes if checked else [],
        "requests": msgspec.to_builtins(run.rows),
    }


def print_run(console: Console, run: ModelRun) -> None:
    """One model: its table, its findings, and its verdict in a line."""
    _say(console, f"{run.model.name}: {run.model.about}")
    for line in _lines(run.rows) if run.rows else ():
        _say(console, line)
    if run.checked is not None:
        for number, judged in enumerate(run.checked.findings[:MOST_SHOWN], start=1):
            print_finding(console, run.checked, number, judged)
        if len(run.checked.findings) > MOST_SHOWN:
            _say(console, f"... and {len(run.checked.findings) - MOST_SHOWN} more; --json has them all")
    if run.error:
        _say(console, run.error)
    _say(console, _last_line(run))


def _last_line(run: ModelRun) -> str:
    words = [f"{run.verdict}: {run.model.name}, {run.transport}"]
    if run.layout:
        words.append(f"groups {', '.join(run.layout)}")
    if run.checked is not None:
        words.append(f"{len(run.checked.findings)} findings in {run.checked.num_steps} steps")
        gap = f": {run.checked.gap}" if run.checked.gap else ""
        words.append(f"{run.checked.num_followed} followed by the model{gap}")
        words.append(f"{run.num_preemptions} preemptions")
    words.append(f"{run.seconds:.1f} s, {run.start_seconds:.1f} s of them to start")
    return "; ".join(words)


def print_verdict(console: Console, runs: Sequence[ModelRun], info: TargetInfo, connector: str) -> None:
    """The last line."""
    num_bad = sum(run.verdict not in ("same", "known") for run in runs)
    seconds = sum(run.seconds for run in runs)
    _say(
        console,
        f"{verdict(runs)}: {len(runs)} models, {num_bad} not as they should be, {seconds:.0f} s, "
        f"vLLM {info.version}, {connector}",
    )


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table: columns as wide as what is in them, so that it reads the same in a file as on a terminal."""
    table = [list(_COLUMNS)]
    before: Row | None = None
    for row in rows:
        is_next_group = before is not None and (before.request, before.step) == (row.request, row.step)
        table.append([*(_PLACE if is_next_group else _place(row)), f"{row.group} {row.kind}", *_cells(row)])
        before = row
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS))]
    for line in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
    yield "(=: the same blocks as in the column before; ?: nobody saw)"


def _place(row: Row) -> list[str]:
    start, end = row.tokens
    return [row.act, row.request, str(row.step), f"[{start}, {end})" if end > start else "none"]


def _cells(row: Row) -> list[str]:
    return [
        runs_of(row.positions),
        _blocks(row.selected, None),
        _blocks(row.received, row.selected),
        _blocks(row.written, row.received),
        row.verdict,
    ]


def _blocks(blocks: list[int] | None, before: list[int] | None) -> str:
    if blocks is None:
        return "?"
    if blocks and blocks == before:
        return "="
    return runs_of(blocks)


def runs_of(numbers: Sequence[int]) -> str:
    """`1..102` or `53, 52, 1`: numbers in their order, runs that rise by one drawn together; long lists are cut."""
    words = ranges(numbers)
    if len(words) > _MOST_RUNS:
        words = [*words[:_MOST_RUNS], f"... ({len(numbers)})"]
    return ", ".join(words) or "-"


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)

"""Checks a trace once, or again and again while it grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from diff_tests.live.check import Checked, check_trace, print_finding
from diff_tests.live.trace import Trace, TraceError, TraceFiles

_LEAST_PAUSE_S = 0.5


def watch(paths: Sequence[Path], follow: bool, idle_s: float | None, console: Console | None) -> tuple[Trace, Checked, int]:
    """(trace, what it showed, findings that the console has seen already). A trace that grows is checked anew from its
    beginning, so the pauses are as long as the checks. Raises TraceError, OSError."""
    files = TraceFiles(paths)
    files.poll()
    trace = files.trace()
    checked = check_trace(trace) if trace is not None else None
    num_shown = _show(console, checked, 0) if follow else 0
    if follow:
        trace, checked, num_shown = _follow(files, trace, checked, num_shown, idle_s, console)
    if trace is None or checked is None:
        raise TraceError(paths[0], None, "no trace of a scheduler here; give the folder or the files that the probe wrote")
    return trace, checked, num_shown


def _follow(
    files: TraceFiles,
    trace: Trace | None,
    checked: Checked | None,
    num_shown: int,
    idle_s: float | None,
    console: Console | None,
) -> tuple[Trace | None, Checked | None, int]:
    """Until Ctrl-C, or until nothing new has come for `idle_s` seconds."""
    last_news = time.monotonic()
    pause = _LEAST_PAUSE_S
    try:
        while idle_s is None or time.monotonic() - last_news < idle_s:
            time.sleep(pause)
            if not files.poll():
                continue
            begun = last_news = time.monotonic()
            trace = files.trace()
            if trace is not None:
                checked = check_trace(trace)
                num_shown = _show(console, checked, num_shown)
            pause = max(time.monotonic() - begun, _LEAST_PAUSE_S)
    except KeyboardInterrupt:
        pass
    return trace, checked, num_shown


def _show(console: Console | None, checked: Checked | None, num_shown: int) -> int:
    """Shows findings as they come, in the order in which they happened. Returns how many have been shown."""
    if console is None or checked is None:
        return num_shown
    for number, judged in enumerate(checked.findings[num_shown:], start=num_shown + 1):
        print_finding(console, checked, number, judged)
    return max(num_shown, len(checked.findings))

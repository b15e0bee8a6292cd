"""What a study showed: JSON document, tables, rows in a file, a plot. Everything says what it was made with."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from diff_tests import __version__
from diff_tests.workload.replay import Event, RequestLife
from diff_tests.workload.study import Study


@dataclass(frozen=True)
class Origin:
    """What an output was made with: kvoracle's version and commit (None outside a checkout), the vLLM release whose
    rules predicted, and the command."""

    kvoracle: str
    commit: str | None
    release: str
    command: str

    def __str__(self) -> str:
        commit = f" ({self.commit})" if self.commit else ""
        return f"kvoracle {self.kvoracle}{commit}, rules of vLLM {self.release}: {self.command}"


def origin(release: str, arguments: Sequence[str]) -> Origin:
    """The origin of an output of this run."""
    command = shlex.join(["kvoracle", *arguments])
    return Origin(__version__, _commit(), release, command)


def _commit() -> str | None:
    """The commit of our own checkout, with a plus if something in it is changed."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():
        return None
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=here, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None


def summary(study: Study) -> dict[str, Any]:
    """The sums of a finished study. Token counts by vLLM's definitions; rates are fractions."""
    totals = asdict(study.totals)
    occupied, peak = totals.pop("sum_occupied"), totals.pop("peak_occupied")
    engine = study.scenario.engine
    document = {
        "blocks": engine.blocks,
        "max_model_len": engine.max_model_len,
        **totals,
        "hit_rate": study.totals.hit_rate,
        "block_hit_rate": study.totals.block_rate,
        "endless_cache_rate": study.totals.endless_rate,
        "evictions": study.num_evicted,
        "rechained_blocks": study.chains.num_rechained,
    }
    if study.arrivals.clock != "order" and study.totals.steps:
        usable = engine.blocks - 1
        document["mean_occupancy"] = occupied / study.totals.steps / usable
        document["peak_occupancy"] = peak / usable
    return document


def print_summaries(console: Console, summaries: Sequence[dict[str, Any]], made: Origin) -> None:
    """A table with a column for each pool size, then what it was made with."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("pool")
    for one in summaries:
        table.add_column(f"{one['blocks']:,} blocks", justify="right")
    for key, name in _ROWS.items():
        values = [one.get(key) for one in summaries]
        if any(value is not None for value in values):
            table.add_row(name, *(_shown(key, value) for value in values))
    console.print(table)
    if any(one["rechained_blocks"] for one in summaries):
        console.print("The trace's hashes are not chained: equal hashes after different prefixes count as different.")
    console.print(str(made), soft_wrap=True, markup=False, highlight=False)


_ROWS = {
    "max_model_len": "longest request, tokens",
    "requests": "requests",
    "too_long": "left out, longer than that",
    "queries": "queried tokens",
    "hits": "hit tokens",
    "hit_rate": "hit rate, vLLM's",
    "block_hit_rate": "hit blocks of all blocks",
    "endless_cache_rate": "the same, endless cache, trace's blocks",
    "external": "external tokens",
    "preemptions": "preemptions",
    "preempted_queries": "queried tokens after preemption",
    "preempted_hits": "hit tokens after preemption",
    "evictions": "evictions",
    "mean_occupancy": "blocks held, mean",
    "peak_occupancy": "blocks held, most",
    "steps": "steps",
    "compared_steps": "steps equal to vLLM's",
}


def _shown(key: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2%}" if key.endswith(("_rate", "_occupancy")) else f"{value:,}"


# ----------------------------------------------------------------------------------------------------------------- rows

STEP_FIELDS = (
    "blocks", "step", "time_ms", "scheduled_tokens", "running", "waiting", "admitted", "preempted", "finished", "free",
)  # fmt: skip
REQUEST_FIELDS = (
    "blocks", "line", "timestamp", "num_prompt", "num_output", "first_step", "last_step", "num_local", "num_external",
    "num_preemptions",
)  # fmt: skip


class Rows(AbstractContextManager["Rows"]):
    """A row a request and a row a step, as they happen: JSON lines in one file, or two CSV files with the origin in a
    comment. Raises OSError where the files cannot be written."""

    def __init__(self, path: Path, made: Origin) -> None:
        self._files: list[TextIO] = []
        self._is_csv = path.suffix == ".csv"
        if not self._is_csv:
            self._lines = self._open(path)
            self._line({"row": "about", **asdict(made)})
            return
        self._requests = self._table(path.with_suffix(".requests.csv"), REQUEST_FIELDS, made)
        self._steps = self._table(path.with_suffix(".steps.csv"), STEP_FIELDS, made)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for file in self._files:
            file.close()

    def add(self, num_blocks: int, event: Event, is_step: bool) -> None:
        """What one step showed. is_step: False in order mode, where there are no steps."""
        if is_step:
            self._write_step(num_blocks, event)
        for life in event.ended:
            self._write_request(num_blocks, life)

    def _write_step(self, num_blocks: int, event: Event) -> None:
        facts = event.facts
        values = (
            num_blocks,
            event.number,
            event.time_ms,
            sum(num_tokens for _, num_tokens in facts.scheduled),
            len(facts.scheduled),
            event.num_waiting,
            len(facts.lookups),
            len(facts.preempted),
            len(facts.finished),
            facts.num_free,
        )
        if self._is_csv:
            self._steps.writerow(values)
        else:
            self._line({"row": "step", **dict(zip(STEP_FIELDS, values, strict=True))})

    def _write_request(self, num_blocks: int, life: RequestLife) -> None:
        if self._is_csv:
            self._requests.writerow((num_blocks, *(getattr(life, name) for name in REQUEST_FIELDS[1:])))
        else:
            self._line({"row": "request", "blocks": num_blocks, **asdict(life)})

    def _open(self, path: Path) -> TextIO:
        file = path.open("w", encoding="utf-8", newline="")
        self._files.append(file)
        return file

    def _table(self, path: Path, fields: Sequence[str], made: Origin) -> Any:
        file = self._open(path)
        file.write(f"# {made}\n")
        writer = csv.writer(file)
        writer.writerow(fields)
        return writer

    def _line(self, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps(values) + "\n")


# ----------------------------------------------------------------------------------------------------------------- plot


def plot(path: Path, summaries: Sequence[dict[str, Any]], made: Origin, title: str) -> None:
    """Hit rate over the size of the cache, PNG or SVG by the file's name. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    ordered = sorted(summaries, key=lambda one: one["blocks"])
    sizes = [one["blocks"] for one in ordered]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(sizes, [100 * one["hit_rate"] for one in ordered], marker="o", label="tokens, vLLM's definition")
    axes.plot(sizes, [100 * one["block_hit_rate"] for one in ordered], marker="s", label="blocks")
    axes.axhline(100 * ordered[-1]["endless_cache_rate"], linestyle="--", color="gray", label="blocks, endless cache")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="blocks in the pool", ylabel="hit rate, %", title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.supxlabel(str(made), fontsize=6, wrap=True)
    figure.savefig(path, metadata={"Description": str(made)})

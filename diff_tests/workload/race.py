"""Replaying a trace in the order of its requests, held against kvcache-simulator (PyPI), which counts hits with a compiled
core but knows no allocator. Both run as commands; what they cost is their processor time, as a pair in each round."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

RIVAL = "kvcache-simulator"
BLOCK = 512
_RIVAL_MODEL, _RIVAL_BUDGET = "deepseek-v3", "100"  # any will do: its core sees a number of blocks
_NUM_BLOCKS = 2984  # what that budget comes to


class RaceError(ValueError):
    """The race cannot be run; one sentence that names the remedy."""


class Race(NamedTuple):
    """Processor seconds, medians over the rounds. *Start*: the same command on the first line of the trace only.
    ratio: theirs over ours without starts, median of the rounds."""

    ours: float
    theirs: float
    our_start: float
    their_start: float
    ratio: float


def race(trace: Path, num_rounds: int) -> Race:
    """Both over all of a trace (plain JSON lines, one hash for each 512 tokens). Raises RaceError."""
    rival = shutil.which(RIVAL)
    if rival is None:
        raise RaceError(f"{RIVAL} is not on PATH; install it beside, with `uv tool install {RIVAL}`")
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        start = Path(folder, "start.jsonl")
        try:
            with trace.open() as lines:
                start.write_text("".join(islice(lines, 1)))
        except (OSError, UnicodeDecodeError) as error:
            raise RaceError(f"{trace} cannot be read: {error}") from None
        for _ in range(num_rounds):
            rounds.append(
                (
                    _cost(_our_command(trace)),
                    _cost(_their_command(rival, trace)),
                    _cost(_our_command(start)),
                    _cost(_their_command(rival, start)),
                )
            )
    ratio = median((theirs - their_start) / (ours - our_start) for ours, theirs, our_start, their_start in rounds)
    ours, theirs, our_start, their_start = (median(column) for column in zip(*rounds, strict=True))
    return Race(ours, theirs, our_start, their_start, ratio)


def _our_command(trace: Path) -> list[str]:
    program = [sys.executable, "-c", "from diff_tests.cli import main; main()"]
    return [*program, "workload", str(trace), "--arrivals", "order", "--block", str(BLOCK), "--blocks", str(_NUM_BLOCKS)]


def _their_command(rival: str, trace: Path) -> list[str]:
    model = ["--model", _RIVAL_MODEL, "--budgets-gib", _RIVAL_BUDGET]
    return [rival, "run", "--trace", str(trace), "--block-size", str(BLOCK), *model, "--policies", "lru", "--no-progress"]


def _cost(command: list[str]) -> float:
    """Processor seconds of a command. Modules are compiled once, as an installed program's are."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if run.returncode != 0:
        raise RaceError(f"{Path(command[0]).name} failed: {run.stderr.strip()[-300:]}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

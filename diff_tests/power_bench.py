"""How soon a campaign finds what is known to be wrong: the five faults of 0.29.0's connector."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import NamedTuple

from diff_tests.run import judge_run
from diff_tests.shard import CaseReport, Cases
from diff_tests.vllm_target import wire
from diff_tests.vllm_target.target import Alone, Target
from oracle.findings import Fault, Finding

BUGGY_RELEASE = "0.29.0"
BUGS: dict[str, Callable[[Fault], bool]] = {
    "prefix overwritten": lambda fault: (fault.kind, fault.cause) == ("selection", "starts_early"),
    "null block filled": lambda fault: fault.cause == "null_selected",
    "groups through one's layers": lambda fault: fault.cause == "wrong_layers",
    "ring filled with the mean": lambda fault: fault.group_kind == "circular" and fault.cause == "wrong_value",
    "DCP ignored": lambda fault: fault.cause == "wrong_block_size",
}
"""The faults of that release's connector by name, and how each shows."""

NUM_SEEDS = 20
MOST_CASES = 4000
_CASES_PER_QUESTION = 8


class Sight(NamedTuple):
    """A new finding of a campaign, in how many cases, and after how many seconds of processor time, both sides."""

    finding: Finding
    num_cases: int
    seconds: float


def sights(target: Target, cases: Cases) -> Iterator[Sight]:
    """Runs cases in order, on one core, and yields what is found as it is found. The target has been started."""
    child_began, began = target.cpu_seconds(), time.process_time()
    for start in count(0, _CASES_PER_QUESTION):
        if start >= MOST_CASES:
            return
        found = list(_found(target, cases, start))
        seconds = target.cpu_seconds() - child_began + time.process_time() - began
        for finding, index in found:
            yield Sight(finding, index + 1, seconds)


def _found(target: Target, cases: Cases, start: int) -> Iterator[tuple[Finding, int]]:
    for message in target.run_cases(cases, start, start + _CASES_PER_QUESTION):
        if isinstance(message, Alone):
            for finding in judge_run(message.scenario, message.history, target.info.rules).new_findings:
                yield finding, message.index
        elif isinstance(message, wire.CasesNews) and isinstance(message.news, CaseReport):
            for saved in message.news.findings:
                if saved.issue is None:
                    yield saved.finding, message.news.index


def seek_bugs(target: Target, cases: Cases) -> dict[str, Sight]:
    """When each of the bugs is seen first; those that never are, are missing."""
    seen: dict[str, Sight] = {}
    for sight in sights(target, cases):
        for name, shows in BUGS.items():
            if name not in seen and shows(sight.finding.fault):
                seen[name] = sight
        if len(seen) == len(BUGS):
            break
    return seen


class BugFigure(NamedTuple):
    """Medians over the seeds; `missed` counts those that did not see it at all."""

    name: str
    num_cases: float
    seconds: float
    missed: int


def measure_bug_sights(num_seeds: int = NUM_SEEDS) -> list[BugFigure]:
    """How soon campaigns of that many seeds see each bug. Raises TargetStartError where the release cannot be had."""
    with Target(BUGGY_RELEASE) as target:
        list(target.run_cases(Cases(0), 0, _CASES_PER_QUESTION))  # the first cases of a process build what others share
        runs = [seek_bugs(target, Cases(seed)) for seed in range(1, num_seeds + 1)]
    figures = []
    for name in BUGS:
        seen = [run.get(name) for run in runs]
        num_cases = median(sight.num_cases if sight else MOST_CASES for sight in seen)
        seconds = median(sight.seconds if sight else math.inf for sight in seen)
        figures.append(BugFigure(name, num_cases, seconds, sum(sight is None for sight in seen)))
    return figures

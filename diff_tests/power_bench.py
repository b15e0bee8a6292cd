"""How soon a campaign finds what is known to be wrong: the five faults of 0.29.0's connector; and, with guidance and
without, the known issues that the model foresees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import NamedTuple

from diff_tests.coverage import Coverage
from diff_tests.guidance import CASES_PER_ROUND, Guidance
from diff_tests.run import judge_run, predict
from diff_tests.shard import CaseReport, Cases, Shard
from diff_tests.vllm_target import wire
from diff_tests.vllm_target.target import Alone, Target
from oracle.findings import Fault, Finding
from sim.releases import Rules

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


# ------------------------------------------------------------------------------------------------------------- guidance


class IssueFigure(NamedTuple):
    """In how many cases a known issue is seen first, and how many campaigns did not see it; each plain, then guided. cases:
    medians over the seeds."""

    issue: str
    cases: tuple[float, float]
    missed: tuple[int, int]


def measure_guidance(rules: Rules, num_seeds: int, num_cases: int) -> list[IssueFigure]:
    """How soon campaigns see each known issue that any of them sees, with guidance and without."""
    seeds = range(1, num_seeds + 1)
    plain, guided = ([issue_sights(rules, seed, num_cases, guided) for seed in seeds] for guided in (False, True))

    def figure(issue: str) -> IssueFigure:
        cases = [median(run.get(issue, num_cases) for run in runs) for runs in (plain, guided)]
        missed = [sum(issue not in run for run in runs) for runs in (plain, guided)]
        return IssueFigure(issue, (cases[0], cases[1]), (missed[0], missed[1]))

    return [figure(issue) for issue in sorted({issue for run in plain + guided for issue in run})]


def issue_sights(rules: Rules, seed: int, num_cases: int, guided: bool) -> dict[str, int]:
    """In how many cases a campaign sees each known issue, by the model's own histories: it foresees what vLLM does wrong,
    and the laws judge it alike."""
    guidance = Guidance(seed, len(Coverage(rules).behaviours)) if guided else None
    seen: dict[str, int] = {}
    for start in range(0, num_cases, CASES_PER_ROUND):
        shard = Shard(Cases(seed, guide=guidance.guide(start) if guidance else None), rules, lambda case: [])
        for index in range(start, min(num_cases, start + CASES_PER_ROUND)):
            scenario = shard.cases.case(index, rules)
            shard.judge(index, scenario, predict(scenario, rules) or [])
            for issue in shard.num_known:
                seen.setdefault(issue, index + 1)
        if guidance is not None:
            guidance.take(shard.seen)
    return seen

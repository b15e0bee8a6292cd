"""A part of a campaign, run and judged in one process: which cases in, findings and counts out.

The process is the one that vLLM runs in, so that no history has to be handed over unless something is found. Model and laws
still share nothing with vLLM but the interpreter.
"""

from __future__ import annotations

import gc
import os
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count

from msgspec import Struct

from diff_tests.coverage import Coverage
from diff_tests.exhaustive import Scope
from diff_tests.failures import SavedFinding, saved_findings
from diff_tests.generate import FEATURES, LineageChooser, SeededChooser, case_seed, generate
from diff_tests.guidance import Guide, bits
from diff_tests.run import Outcome, explain_known, judge_run, verdict_of
from oracle.findings import Finding
from sim.history import History, Record
from sim.releases import Rules, rules_of
from sim.scenario import Scenario

REPEAT_EVERY = 50
"""Each so many cases one runs twice, for law 10."""
_MOST_ATTEMPTS = 1000
"""Generated cases that one case with a certain connector is chosen from, about two of them in fact."""
CASES_AT_ONCE = 32
"""Cases that are made, then run, then judged: code that has just run is still in the processor's caches."""
MOST_GROWTH_BYTES = 256 << 20
"""A case that leaves its process so much larger has leaked memory."""


@dataclass(frozen=True)
class Cases:
    """The cases of a campaign by number: those generated from a seed with a choice of features, or, with `kinds`, those
    of the exhaustive scope over these kinds of groups. connector: only cases with this one. first: what comes before them.
    guide: what the cases of one round of a guided campaign are made from.
    """

    seed: int
    features: tuple[str, ...] = tuple(FEATURES)
    kinds: tuple[str, ...] | None = None
    connector: str | None = None
    first: tuple[Scenario, ...] = ()
    guide: Guide | None = None

    def case(self, index: int, rules: Rules) -> Scenario:
        """The index-th case."""
        if index < len(self.first):
            return self.first[index]
        index -= len(self.first)
        if self.kinds is not None:
            return _scope(rules.release, self.kinds).case(index)
        if self.guide is not None:
            return generate(LineageChooser(self.guide.lineage(self.seed, index)), rules, self.features)
        if self.connector is None:
            return generate(SeededChooser(case_seed(self.seed, index)), rules, self.features)
        for attempt in count(index * _MOST_ATTEMPTS):
            scenario = generate(SeededChooser(case_seed(self.seed, attempt)), rules, self.features)
            if scenario.connector is not None and scenario.connector.name == self.connector:
                return scenario
        raise AssertionError("unreachable")


@lru_cache(maxsize=4)
def _scope(release: str, kinds: tuple[str, ...]) -> Scope:
    return Scope(rules_of(release), kinds)


class CaseReport(Struct, tag="case_report"):
    """A case with findings, and both histories. repeat: it is about two runs of the case (law 10)."""

    index: int
    findings: list[SavedFinding]
    predicted: list[Record] | None
    observed: list[Record]
    repeat: bool = False


class Sample(Struct, tag="sample"):
    """A case that was repeated here, to be run once more in another process."""

    index: int
    history: list[Record]


class Shard:
    """Runs and judges cases. run: a scenario's history; effective: the scenario as it is run; turn_to: told before
    anything is done about a case.

    coverage, num_known (findings of known issues by id) and num_cases sum up what was judged; in a guided campaign seen
    tells what each case showed (`guidance.bits`).
    """

    def __init__(
        self,
        cases: Cases,
        rules: Rules,
        run: Callable[[Scenario], History],
        effective: Callable[[Scenario], Scenario] = lambda scenario: scenario,
        turn_to: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.cases = cases
        self.rules = rules
        self._run = run
        self._effective = effective
        self._turn_to = turn_to
        self.coverage = Coverage(rules)
        self.num_known: Counter[str] = Counter()
        self.num_cases = 0
        self.seen: list[tuple[int, bytes]] = []
        self._resident_bytes = 0  # before the case at hand

    def run_cases(self, start: int, stop: int, send: Callable[[CaseReport | Sample], None]) -> None:
        """Runs the cases [start, stop), one in REPEAT_EVERY twice, and sends what is worth more than a count."""
        for first in range(start, stop, CASES_AT_ONCE):
            indices = range(first, min(first + CASES_AT_ONCE, stop))
            scenarios = [self.cases.case(index, self.rules) for index in self._each(indices)]
            self._resident_bytes = resident_bytes()
            ran = [self._run_and_weigh(scenario) for _, scenario in zip(self._each(indices), scenarios, strict=True)]
            for index, scenario, (history, grown) in zip(self._each(indices), scenarios, ran, strict=True):
                self._judge_and_send(index, scenario, history, grown, send)

    def _each(self, indices: range) -> Iterator[int]:
        for index in indices:
            self._turn_to(index)
            yield index

    def _run_and_weigh(self, scenario: Scenario) -> tuple[History, int]:
        """The history, and the bytes by which the case has made the process larger, for good if they are many."""
        before, history = self._resident_bytes, self._run(scenario)
        self._resident_bytes = resident_bytes()
        if self._resident_bytes - before > MOST_GROWTH_BYTES:
            gc.collect()
            self._resident_bytes = resident_bytes()
        return history, self._resident_bytes - before

    def _judge_and_send(
        self, index: int, scenario: Scenario, history: History, grown: int, send: Callable[[CaseReport | Sample], None]
    ) -> None:
        effective = self._effective(scenario)
        outcome = self.judge(index, effective, history)
        if grown > MOST_GROWTH_BYTES:
            outcome.findings += explain_known([_leak(grown)], effective, self.rules)
        if outcome.new_findings:
            send(report_of(index, outcome))
        if index % REPEAT_EVERY == REPEAT_EVERY - 1 and is_repeatable(scenario):
            again = self._run(scenario)
            if (differs := compare_repeat(effective, history, again, "the same process", self.rules)) is not None:
                send(report_of(index, differs, repeat=True))
            send(Sample(index, history))

    def judge(self, index: int, scenario: Scenario, history: History) -> Outcome:
        """Judges and counts one case's history."""
        self.num_cases += 1
        before = self.coverage.numbers() if self.cases.guide is not None else None
        self.coverage.add(scenario, history)
        if before is not None:
            self.seen.append((index, bits(self.coverage.numbers() > before)))
        outcome = judge_run(scenario, history, self.rules)
        self.num_known.update(judged.issue.id for judged in outcome.findings if judged.issue is not None)
        return outcome


def report_of(index: int, outcome: Outcome, repeat: bool = False) -> CaseReport:
    """A case's outcome as it is sent."""
    return CaseReport(index, saved_findings(outcome), outcome.predicted, outcome.observed, repeat)


def compare_repeat(scenario: Scenario, first: History, second: History, where: str, rules: Rules) -> Outcome | None:
    """Law 10: the same scenario gives the same history twice. None if it did."""
    if first == second:
        return None
    step = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
    finding = Finding(
        kind="schedule",
        law=10,
        cause="not_repeatable",
        step=getattr(second[min(step, len(second) - 1)], "step", 0) if second else 0,
        message=f"the same scenario, run again in {where}, gave another history from record {step} on",
    )
    judged = explain_known([finding], scenario, rules)
    return Outcome(scenario, verdict_of(judged), second, first, judged)


def is_repeatable(scenario: Scenario) -> bool:
    """Random fills differ from run to run by design."""
    return scenario.connector is None or not scenario.connector.extra.get("fill_std")


_PAGE_BYTES = resource.getpagesize()


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(os.pread(_memory_file(os.getpid()), 100, 0).split()[1]) * _PAGE_BYTES


@cache
def _memory_file(pid: int) -> int:
    """Stays open, since opening it costs more than reading it. A forked process has another."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY)


def _leak(num_bytes: int) -> Finding:
    return Finding(
        kind="crash",
        cause="memory_leaked",
        message=f"the process is {num_bytes >> 20} MiB larger after the case than before it (process {os.getpid()})",
    )

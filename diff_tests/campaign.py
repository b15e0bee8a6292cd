"""A campaign: many generated cases through both sides, every failure saved, one of each fault made small.

One child process serves the whole campaign and always has a case queued, so that parent and child work at the same time.
What is found is on disk at once: Ctrl-C, a dead child or a full time budget lose nothing.
"""

from __future__ import annotations

import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from diff_tests.corpus import fault_slug
from diff_tests.coverage import Coverage
from diff_tests.exhaustive import Scope
from diff_tests.failures import failure_of, load_failure, save, saved_findings
from diff_tests.generate import FEATURES, SeededChooser, case_seed, generate
from diff_tests.reduce import reduce
from diff_tests.run import Outcome, explain_known, judge_run, run_on, verdict_of
from diff_tests.vllm_target.target import Target, TargetInfo
from oracle.findings import Fault, Finding
from sim.history import History
from sim.releases import Rules
from sim.scenario import Scenario, dump, plain

REPEAT_EVERY = 50
"""Each so many cases one runs twice, for law 10; as many again run once more in another process at the end."""
SAMPLE_FOR_OTHER_PROCESS = 20
CASES_FOR_OTHER_PROCESS = 1000
SUMMARY = "summary.json"
HISTORIES_PER_FAULT = 200
"""Failures of one fault that are saved with both histories; later ones are saved without, they can be run again."""


@dataclass(frozen=True)
class Plan:
    """What to do. `vllm` and `connector` as the target takes them. Either `cases` or `seconds` bounds it; both may.

    scope: its cases in its order instead of generated ones; `seed` and `features` then decide nothing.
    """

    seed: int
    folder: Path
    vllm: str = "current"
    connector: str | None = None
    as_release: str | None = None
    cases: int | None = None
    seconds: float | None = None
    features: tuple[str, ...] = tuple(FEATURES)
    max_reduce_seconds: float = 20.0
    scope: Scope | None = None

    def case(self, index: int, rules: Rules) -> Scenario:
        """The index-th case."""
        if self.scope is not None:
            return self.scope.case(index)
        return generate(SeededChooser(case_seed(self.seed, index)), rules, self.features)


@dataclass
class FaultReport:
    """One fault of a campaign: how many cases showed it, the first finding, and where to look.

    driver: of the first case. command: the one that shows the fault again.
    """

    fault: Fault
    first: Finding
    first_case: int
    failure_path: Path
    driver: str
    command: str
    num_cases: int = 0
    reduced_path: Path | None = None


@dataclass
class Summary:
    """What a campaign did and found. `lost`: cases that a dying child took with it and that passed when run again."""

    plan: Plan
    info: TargetInfo
    coverage: Coverage = field(init=False)
    num_cases: int = 0
    seconds: float = 0.0
    lost: int = 0
    interrupted: bool = False
    faults: dict[Fault, FaultReport] = field(default_factory=dict)
    known: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.info.rules)

    @property
    def verdict(self) -> str:
        return "fail" if self.faults else "pass"

    def document(self) -> dict[str, Any]:
        """The JSON document of `fuzz --json`."""
        findings = [
            {
                **msgspec.to_builtins(report.first),
                "cases": report.num_cases,
                "scenario": str(report.reduced_path or report.failure_path),
                "failure": str(report.failure_path),
                "repeat": report.command,
            }
            for report in self.faults.values()
        ]
        return {
            "verdict": self.verdict,
            "target": {"vllm": self.info.version, "connector": self.info.connector},
            "seed": self.plan.seed,
            "cases": self.num_cases,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "lost": self.lost,
            "findings": findings,
            "known": dict(self.known),
            "coverage": dict(self.coverage.counts),
            "kinds": self.coverage.kinds_document(),
            "refusals": dict(self.coverage.refusals),
            "scope": None if self.plan.scope is None else {"cases": len(self.plan.scope), "covered": self.num_cases},
            "folder": str(self.plan.folder),
        }


def prepare_folder(folder: Path) -> None:
    """Makes the run folder and proves that it can be written. What an earlier run left in it goes: failures of two runs
    must not mix. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.write_bytes(b"")
    probe.unlink()
    if (folder / SUMMARY).exists():
        for old in (*folder.glob("failures/case-*.json"), *folder.glob("faults/*.yaml"), folder / SUMMARY):
            old.unlink()


class Campaign:
    """One campaign on a started target."""

    def __init__(self, plan: Plan, target: Target, info: TargetInfo) -> None:
        self.plan = plan
        self.target = target
        self.rules = info.rules
        self.summary = Summary(plan, info)
        self._pending: deque[tuple[int, bool]] = deque()
        self._first_run: History = []
        self._sample: list[tuple[int, Scenario, History]] = []
        self._lost_before = target.lost

    def run(self, on_progress: Callable[[Summary], None] = lambda summary: None) -> Summary:
        """Runs to the bound, or until Ctrl-C, then reduces one case of each fault."""
        started = time.monotonic()
        try:
            for scenario, history in self.target.run_many(self._cases(started)):
                self._take(scenario, history)
                self.summary.seconds = time.monotonic() - started
                on_progress(self.summary)
            self._repeat_in_another_process()
            self._reduce_faults()
        except KeyboardInterrupt:
            self.summary.interrupted = True
        finally:
            self.summary.lost = self.target.lost - self._lost_before
            self._write_summary()
        return self.summary

    # -- cases ---------------------------------------------------------------------------------------------------------

    def _cases(self, started: float) -> Iterator[Scenario]:
        """The cases in order; one in REPEAT_EVERY twice."""
        plan = self.plan
        case = 0
        while plan.cases is None or case < plan.cases:
            if plan.seconds is not None and time.monotonic() - started >= plan.seconds:
                return
            scenario = plan.case(case, self.rules)
            self._pending.append((case, False))
            yield scenario
            if case % REPEAT_EVERY == REPEAT_EVERY - 1 and _is_repeatable(scenario):
                self._pending.append((case, True))
                yield scenario
            case += 1

    def _take(self, scenario: Scenario, history: History) -> None:
        """Judges one history that came back."""
        scenario = self.target.effective(scenario)
        case, is_repeat = self._pending.popleft()
        if is_repeat:
            self._compare_repeat(case, scenario, self._first_run, history, "the same process")
            return
        if case % REPEAT_EVERY == REPEAT_EVERY - 1:
            self._first_run = history
            if _is_repeatable(scenario) and len(self._sample) < SAMPLE_FOR_OTHER_PROCESS:
                self._sample.append((case, scenario, history))
        self.summary.num_cases += 1
        self.summary.coverage.add(scenario, history)
        self._record(case, judge_run(scenario, history, self.rules))

    def _compare_repeat(self, case: int, scenario: Scenario, first: History, second: History, where: str) -> None:
        """Law 10: the same scenario gives the same history twice."""
        if first == second:
            return
        step = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        finding = Finding(
            kind="schedule",
            law=10,
            cause="not_repeatable",
            step=getattr(second[min(step, len(second) - 1)], "step", 0),
            message=f"the same scenario, run again in {where}, gave another history from record {step} on",
        )
        judged = explain_known([finding], scenario, self.rules)
        self._record(case, Outcome(scenario, verdict_of(judged), second, first, judged))

    def _repeat_in_another_process(self) -> None:
        """Law 10 across processes, where the campaign is long enough to be worth a second start of vLLM."""
        if self.summary.num_cases < CASES_FOR_OTHER_PROCESS or not self._sample:
            return
        with Target(self.plan.vllm, self.plan.connector, as_release=self.plan.as_release) as other:
            for case, scenario, history in self._sample:
                self._compare_repeat(case, scenario, history, other.run(scenario), "another process")

    # -- findings ------------------------------------------------------------------------------------------------------

    def _record(self, case: int, outcome: Outcome) -> None:
        """Counts the findings of one case, and saves it if there is a new one."""
        for judged in outcome.findings:
            if judged.issue is not None:
                self.summary.known[judged.issue.id] += 1
        by_fault = {finding.fault: finding for finding in reversed(outcome.new_findings)}
        if not by_fault:
            return
        path = self.plan.folder / "failures" / f"case-{case:06d}.json"
        for fault, finding in by_fault.items():
            self._count(FaultReport(fault, finding, case, path, outcome.scenario.driver, self.repeat_command(path)))
        self._save_failure(case, outcome, path)

    def _count(self, report: FaultReport) -> None:
        """Adds a case to its fault. A case of the real scheduler says more than one with hand-made tables: the first
        of those stands for the fault where there is one."""
        known = self.summary.faults.get(report.fault)
        if known is not None:
            report.num_cases = known.num_cases
        if known is None or (known.driver, report.driver) == ("direct", "scheduler"):
            self.summary.faults[report.fault] = known = report
        known.num_cases += 1

    def _save_failure(self, case: int, outcome: Outcome, path: Path) -> None:
        info = self.summary.info
        failure = failure_of(
            outcome,
            vllm=info.vllm,
            release=self.rules.release,
            connector=self.plan.connector,
            seed=self.plan.seed,
            case=case,
        )
        if min(self.summary.faults[f.fault].num_cases for f in outcome.new_findings) > HISTORIES_PER_FAULT:
            failure.predicted = failure.observed = None
        save(failure, path)

    def repeat_command(self, path: Path) -> str:
        """The one command that shows the failure again."""
        words = ["kvoracle", "run", str(path)]
        if self.plan.vllm != "current":
            words += ["--vllm", self.plan.vllm]
        if self.plan.connector is not None:
            words += ["--connector", self.plan.connector]
        if self.plan.as_release is not None:
            words += ["--as", self.plan.as_release]
        return shlex.join(words)

    # -- reduction -----------------------------------------------------------------------------------------------------

    def _reduce_faults(self) -> None:
        """The first case of each fault, made small and written as readable YAML."""
        for report in self.summary.faults.values():
            if report.fault[1] == 10:
                continue  # what differs between two runs cannot be asked of one run
            self._reduce_fault(report)

    def _reduce_fault(self, report: FaultReport) -> None:
        reduction = reduce(
            self.plan.case(report.first_case, self.rules),
            lambda candidate: self._shows(candidate, report.fault),
            max_seconds=self.plan.max_reduce_seconds,
        )
        outcome = self._run_once(reduction.scenario)
        shown = next(finding for finding in outcome.new_findings if finding.fault == report.fault)
        small = replace(reduction.scenario, about=shown.message)
        report.reduced_path = self.plan.folder / "faults" / f"{fault_slug(report.fault)}.yaml"
        report.reduced_path.parent.mkdir(parents=True, exist_ok=True)
        report.reduced_path.write_text(dump(small), encoding="utf-8")
        report.command = self.repeat_command(report.reduced_path)
        failure = load_failure(report.failure_path)
        failure.reduced = plain(replace(outcome.scenario, about=small.about))
        failure.reduced_findings = saved_findings(outcome)
        failure.reduced_observed = outcome.observed
        save(failure, report.failure_path)

    def _shows(self, scenario: Scenario, fault: Fault) -> bool:
        return any(finding.fault == fault for finding in self._run_once(scenario).new_findings)

    def _run_once(self, scenario: Scenario) -> Outcome:
        return run_on(self.target, scenario)

    def _write_summary(self) -> None:
        document = msgspec.json.format(msgspec.json.encode(self.summary.document()), indent=2)
        (self.plan.folder / SUMMARY).write_bytes(document + b"\n")


def _is_repeatable(scenario: Scenario) -> bool:
    """Random fills differ from run to run by design."""
    return scenario.connector is None or not scenario.connector.extra.get("fill_std")

"""A campaign: many generated cases through both sides, every failure saved, one of each fault made small.

Each job is a child process that runs and judges its share of the cases and reports what is worth more than a count. What is
found is on disk at once, and what has been done every few seconds: Ctrl-C, a dead child, a full time budget or a machine
that goes away lose nothing, and `resume` goes on.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec.structs import replace

from diff_tests.corpus import fault_slug
from diff_tests.coverage import Coverage
from diff_tests.exhaustive import Scope
from diff_tests.failures import SavedFailure, load_failure, save, saved_findings
from diff_tests.generate import FEATURES
from diff_tests.guidance import Guidance
from diff_tests.progress import State, load_state, replace_file, save_state
from diff_tests.reduce import reduce
from diff_tests.run import Outcome, run_on
from diff_tests.shard import CASES_AT_ONCE, CaseReport, Cases, Sample, Shard, compare_repeat, report_of
from diff_tests.vllm_target import wire
from diff_tests.vllm_target.target import Alone, CasesMessage, Target, TargetInfo
from oracle import contracts
from oracle.findings import Fault, Finding
from sim.history import History
from sim.scenario import Scenario, dump, parse, plain

if TYPE_CHECKING:
    from diff_tests.cluster import RayCrew

CASES_PER_SHARE = CASES_AT_ONCE
"""Cases that a job takes at a time."""
SAMPLE_FOR_OTHER_PROCESS = 20
CASES_FOR_OTHER_PROCESS = 1000
"""As many repeated cases of a campaign of this length run once more in another process at the end."""
HISTORIES_PER_FAULT = 200
"""Failures of one fault that are saved with both histories; later ones are saved without, they can be run again."""
MOST_RESIDENT_BYTES = 3 << 30
"""A child that has grown beyond this is replaced."""
SECONDS_BETWEEN_STATES = 5.0
_SECONDS_TO_WAIT = 0.2
"""A job that can have no share looks this often whether it should end."""


@dataclass(frozen=True)
class Plan:
    """What to do. `vllm` and `connector` as the target takes them. Either `cases` or `seconds` bounds it; both may.

    kinds: the exhaustive scope over these kinds instead of generated cases; `seed` and `features` then decide nothing.
    jobs: child processes. ray: the address of a Ray cluster that runs the cases instead, empty for one of our own with as
    many workers as there would be jobs. resume: go on where the state in the folder says.
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
    kinds: tuple[str, ...] | None = None
    jobs: int = 1
    ray: str | None = None
    resume: bool = False
    guided: bool = False

    @property
    def source(self) -> Cases:
        """Which cases."""
        return Cases(self.seed, self.features, self.kinds)


@dataclass
class FaultReport:
    """One fault of a campaign: how many cases showed it, the first finding, and where to look.

    scenario: of the first case. command: the one that shows the fault again.
    """

    fault: Fault
    first: Finding
    first_case: int
    failure_path: Path
    scenario: Scenario
    command: str
    num_cases: int = 0
    reduced_path: Path | None = None

    @property
    def order(self) -> tuple[bool, int]:
        """A case of the real scheduler says more than one with hand-made tables, an early one is found again sooner."""
        return self.scenario.driver == "direct", self.first_case


@dataclass
class Summary:
    """What a campaign did and found. `lost`: cases that a dying child took with it and that passed when run again;
    `unsaved`: failures that could not be written, with the reason."""

    plan: Plan
    info: TargetInfo
    coverage: Coverage = field(init=False)
    num_cases: int = 0
    seconds: float = 0.0
    lost: int = 0
    interrupted: bool = False
    faults: dict[Fault, FaultReport] = field(default_factory=dict)
    known: Counter[str] = field(default_factory=Counter)
    unsaved: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.coverage = Coverage(self.info.rules)

    @property
    def verdict(self) -> str:
        return "fail" if self.faults else "pass"

    @property
    def scope_size(self) -> int | None:
        """Cases of the exhaustive scope; None for generated cases."""
        return None if self.plan.kinds is None else len(Scope(self.info.rules, self.plan.kinds))

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
            "jobs": self.plan.jobs,
            "cases": self.num_cases,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "lost": self.lost,
            "unsaved": dict(self.unsaved),
            "findings": findings,
            "known": dict(self.known),
            "coverage": dict(self.coverage.counts),
            "kinds": self.coverage.kinds_document(),
            "refusals": dict(self.coverage.refusals),
            "scope": None if (size := self.scope_size) is None else {"cases": size, "covered": self.num_cases},
            "folder": str(self.plan.folder),
        }


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def prepare_folder(folder: Path) -> None:
    """Makes the run folder and proves that it can be written. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".writable-{os.getpid()}"
    probe.write_bytes(b"")
    probe.unlink()


class Campaign:
    """One campaign on a started target, which is the first job; the others are its siblings.

    Files in the run folder are named by seed, so that campaigns may share a folder. Raises StateError.
    """

    def __init__(self, plan: Plan, target: Target, info: TargetInfo) -> None:
        self.plan = plan
        self.target = target
        self.rules = info.rules
        self.summary = Summary(plan, info)
        self._source = plan.source
        self._guidance = Guidance(plan.seed, len(self.summary.coverage.behaviours)) if plan.guided else None
        self._shares = Shares(plan.cases)
        self._sample: dict[int, tuple[Scenario, History]] = {}
        self._seconds_before = 0.0
        self._saved_at = 0.0
        if plan.resume:
            self._restore(load_state(plan.folder, plan.seed))
        else:
            self._clear()
        self._open_shares()

    def run(self, on_progress: Callable[[Summary], None] = lambda summary: None) -> Summary:
        """Runs to the bound, or until Ctrl-C, then reduces one case of each fault."""
        started = time.monotonic()
        deadline = None if self.plan.seconds is None else started + self.plan.seconds
        crew = self._crew(deadline)
        try:
            for result in crew.results():
                seen = [shown for message in result.messages for shown in self._take(message)]
                if self._guidance is not None:
                    self._guidance.take(seen)
                self._shares.finish(result.share)
                self._open_shares()
                self.summary.seconds = self._seconds_before + time.monotonic() - started
                self.summary.lost = crew.lost
                self._save_state_now_and_then()
                on_progress(self.summary)
            self._repeat_in_another_process()
            self._reduce_faults()
        except KeyboardInterrupt:
            self.summary.interrupted = True
        finally:
            crew.close()
            self._save(self._write_summary)
        return self.summary

    def _crew(self, deadline: float | None) -> Crew | RayCrew:
        """Those who run the shares: processes here, or workers of a Ray cluster."""
        plan = self.plan
        if plan.ray is None:
            return Crew(self.target, self._cases, self._shares, plan.jobs, deadline)
        from diff_tests.cluster import RayCrew, TargetSettings

        settings = TargetSettings(plan.vllm, plan.connector, self.target.defect, plan.as_release, contracts.added())
        return RayCrew(settings, self._cases, self._shares, plan.ray, plan.jobs, deadline)

    def _cases(self, index: int) -> Cases:
        """The cases among which is the index-th one. In a guided campaign, until its share is through."""
        return (
            self._source if self._guidance is None else dataclasses.replace(self._source, guide=self._guidance.guide(index))
        )

    def _open_shares(self) -> None:
        """Lets jobs take what the rounds that are through allow for."""
        if self._guidance is not None:
            self._shares.open_until(self._guidance.num_open)

    def _scenario(self, index: int) -> Scenario:
        """A case of a share that is not through."""
        return self._cases(index).case(index, self.rules)

    # -- what the jobs send --------------------------------------------------------------------------------------------

    def _take(self, message: CasesMessage) -> list[tuple[int, bytes]]:
        """Counts and saves; of a guided campaign, returns what cases showed (`guidance.bits`)."""
        summary = self.summary
        seen: list[tuple[int, bytes]] = []
        if isinstance(message, wire.CasesNews):
            if isinstance(message.news, Sample):
                self._sample[message.news.index] = self._scenario(message.news.index), message.news.history
            else:
                self._record(message.news, self._scenario(message.news.index))
        elif isinstance(message, wire.CasesDone):
            summary.num_cases += message.num_cases
            summary.coverage.restore(message.coverage)
            summary.known.update(message.known)
            seen = message.seen
        elif isinstance(message, Alone):
            seen = self._take_alone(message)
        if len(self._sample) > SAMPLE_FOR_OTHER_PROCESS:
            del self._sample[max(self._sample)]
        return seen

    def _take_alone(self, alone: Alone) -> list[tuple[int, bytes]]:
        shard = Shard(self._cases(alone.index), self.rules, self.target.run)
        outcome = shard.judge(alone.index, alone.scenario, alone.history)
        self.summary.num_cases += shard.num_cases
        self.summary.coverage.merge(shard.coverage)
        self.summary.known.update(shard.num_known)
        if outcome.new_findings:
            self._record(report_of(alone.index, outcome), self._scenario(alone.index))
        return shard.seen

    def _repeat_in_another_process(self) -> None:
        """Law 10 across processes, where the campaign is long enough to be worth it."""
        if self.summary.num_cases < CASES_FOR_OTHER_PROCESS or not self._sample:
            return
        with self.target.sibling() as other:
            for index, (scenario, history) in sorted(self._sample.items()):
                again = other.run(scenario)
                effective = self.target.effective(scenario)
                if (differs := compare_repeat(effective, history, again, "another process", self.rules)) is not None:
                    self._record(report_of(index, differs, repeat=True), scenario)

    # -- findings ------------------------------------------------------------------------------------------------------

    def _record(self, report: CaseReport, generated: Scenario) -> None:
        """Counts and saves a case with new findings."""
        scenario = self.target.effective(generated)
        suffix = "-repeat" if report.repeat else ""
        path = self.plan.folder / "failures" / f"case-{self.plan.seed}-{report.index:06d}{suffix}.json"
        new = [saved.finding for saved in report.findings if saved.issue is None]
        for fault, finding in {finding.fault: finding for finding in reversed(new)}.items():
            self._count(FaultReport(fault, finding, report.index, path, generated, self.repeat_command(path)))
        rare = min(self.summary.faults[finding.fault].num_cases for finding in new) <= HISTORIES_PER_FAULT
        failure = SavedFailure(
            kvoracle_failure=1,
            vllm=self.summary.info.vllm,
            release=self.rules.release,
            connector=self.plan.connector,
            seed=self.plan.seed,
            case=report.index,
            findings=report.findings,
            scenario=plain(scenario),
            predicted=report.predicted if rare else None,
            observed=report.observed if rare else None,
        )
        self._save(lambda: save(failure, path))

    def _count(self, report: FaultReport) -> None:
        """Adds a case to its fault, for which the first case in `order` stands, whichever job found it first."""
        known = self.summary.faults.get(report.fault)
        report.num_cases = known.num_cases if known is not None else 0
        if known is None or report.order < known.order:
            self.summary.faults[report.fault] = known = report
        known.num_cases += 1

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

    def _save(self, write: Callable[[], None]) -> None:
        """Writes, if the disk lets us: what was found stays in the summary all the same."""
        try:
            write()
        except OSError as error:
            self.summary.unsaved[error.strerror or str(error)] += 1

    # -- reduction -----------------------------------------------------------------------------------------------------

    def _reduce_faults(self) -> None:
        """The first case of each fault, made small and written as readable YAML."""
        for report in self.summary.faults.values():
            # What differs between two runs, or grows with a process, cannot be asked of one run.
            if report.fault.law != 10 and report.fault.cause != "memory_leaked" and report.reduced_path is None:
                self._reduce_fault(report)

    def _reduce_fault(self, report: FaultReport) -> None:
        reduction = reduce(
            report.scenario,
            lambda candidate: self._shows(candidate, report.fault),
            max_seconds=self.plan.max_reduce_seconds,
        )
        outcome = self._run_once(reduction.scenario)
        shown = next(finding for finding in outcome.new_findings if finding.fault == report.fault)
        small = replace(reduction.scenario, about=shown.message)
        self._save(lambda: self._save_reduced(report, small, outcome))

    def _save_reduced(self, report: FaultReport, small: Scenario, outcome: Outcome) -> None:
        path = self.plan.folder / "faults" / f"{fault_slug(report.fault)}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, dump(small).encode())
        report.reduced_path = path
        report.command = self.repeat_command(path)
        failure = load_failure(report.failure_path)
        failure.reduced = plain(replace(outcome.scenario, about=small.about))
        failure.reduced_findings = saved_findings(outcome)
        failure.reduced_observed = outcome.observed
        save(failure, report.failure_path)

    def _shows(self, scenario: Scenario, fault: Fault) -> bool:
        return any(finding.fault == fault for finding in self._run_once(scenario).new_findings)

    def _run_once(self, scenario: Scenario) -> Outcome:
        return run_on(self.target, scenario)

    # -- on disk -------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """What an earlier run of this seed left goes: failures of two runs must not mix."""
        folder, seed = self.plan.folder, self.plan.seed
        for pattern in (f"failures/case-{seed}-*.json", f"state-{seed}.json", f"summary-{seed}.json"):
            for old in folder.glob(pattern):
                old.unlink()

    def _write_summary(self) -> None:
        save_state(self.plan.folder, self._state())
        document = msgspec.json.format(msgspec.json.encode(self.summary.document()), indent=2) + b"\n"
        for name in (f"summary-{self.plan.seed}.json", "summary.json"):
            replace_file(self.plan.folder / name, document)

    def _save_state_now_and_then(self) -> None:
        if time.monotonic() - self._saved_at > SECONDS_BETWEEN_STATES:
            self._saved_at = time.monotonic()
            self._save(lambda: save_state(self.plan.folder, self._state()))

    def _state(self) -> State:
        summary, plan = self.summary, self.plan
        return State(
            kvoracle_state=1,
            seed=plan.seed,
            vllm=plan.vllm,
            connector=plan.connector,
            as_release=plan.as_release,
            cases=plan.cases,
            features=plan.features,
            kinds=plan.kinds,
            done=self._shares.done,
            num_cases=summary.num_cases,
            seconds=summary.seconds,
            known=dict(summary.known),
            coverage=summary.coverage.plain(),
            guidance=self._guidance,
        )

    def _restore(self, state: State) -> None:
        """Goes on where an earlier run stopped. Findings come from the failures on disk; those of cases that do not count
        as done will be found again."""
        summary = self.summary
        self._shares.restore(state.done)
        self._guidance = state.guidance
        summary.num_cases, self._seconds_before = state.num_cases, state.seconds
        summary.known.update(state.known)
        summary.coverage.restore(state.coverage)
        for path in sorted(self.plan.folder.glob(f"failures/case-{self.plan.seed}-*.json")):
            failure = load_failure(path)
            if not self._shares.is_done(failure.case):
                path.unlink()
                continue
            scenario = parse(failure.scenario)
            new = {saved.finding.fault: saved.finding for saved in reversed(failure.findings) if saved.issue is None}
            for fault, finding in new.items():
                self._count(FaultReport(fault, finding, failure.case, path, scenario, self.repeat_command(path)))


# ---------------------------------------------------------------------------------------------------------------- jobs

Share = tuple[int, int]
"""Cases [start, stop)."""


class ShareResult(NamedTuple):
    """What a child sent about a share. It counts as a whole, so that no case counts twice or never. num_lost: cases that
    went well only when run again, where nobody here counts them."""

    share: Share
    messages: list[CasesMessage]
    num_lost: int = 0


class Shares:
    """Hands the cases of a campaign out in shares, in order, and remembers which are through. Safe between threads. Where
    `open_until` says so, only the first cases can be had for now."""

    def __init__(self, num_cases: int | None) -> None:
        self._num_cases = num_cases
        self._changed = threading.Condition()
        self._num_open: int | None = None
        self._next = 0
        self._done: dict[int, int] = {}  # by the first case of a share: the case before which all of it are through

    @property
    def done(self) -> list[Share]:
        """The cases that are through, as ranges."""
        ranges: list[list[int]] = []
        for start, stop in sorted(self._done.items()):
            if ranges and ranges[-1][1] == start:
                ranges[-1][1] = stop
            else:
                ranges.append([start, stop])
        return [(start, stop) for start, stop in ranges]

    def restore(self, done: list[Share]) -> None:
        """Takes these cases as through."""
        for start, stop in done:
            self._done.update((s, min(s + CASES_PER_SHARE, stop)) for s in range(start, stop, CASES_PER_SHARE))

    def is_done(self, case: int) -> bool:
        """Whether the case is through."""
        return case < self._done.get(_share_start(case), 0)

    def open_until(self, num_open: int) -> None:
        """From now on the cases before this number can be had."""
        with self._changed:
            self._num_open = num_open
            self._changed.notify_all()

    def take(self, timeout_s: float = 0.0) -> Share | None:
        """The next share; None after the last, or where it cannot be had within that time."""
        with self._changed:
            if not self._changed.wait_for(self._can_take, timeout_s) or self._is_after_last():
                return None
            start = self._next
            self._next = _share_start(start) + CASES_PER_SHARE
            return start, self._stop(start)

    @property
    def are_left(self) -> bool:
        """Whether there is a share that nobody has taken."""
        with self._changed:
            self._skip_done()
            return not self._is_after_last()

    def _can_take(self) -> bool:
        """Whether `take` need not wait."""
        self._skip_done()
        return self._num_open is None or self._next < self._num_open or self._is_after_last()

    def _skip_done(self) -> None:
        """Goes on to the next case that nobody has taken. A share is through in part where the bound was another."""
        while self._next < (stop := self._done.get(_share_start(self._next), 0)):
            self._next = stop

    def _is_after_last(self) -> bool:
        return self._num_cases is not None and self._next >= self._num_cases

    def finish(self, share: Share) -> None:
        """The share is through."""
        self._done[_share_start(share[0])] = share[1]

    def _stop(self, start: int) -> int:
        stop = _share_start(start) + CASES_PER_SHARE
        return stop if self._num_cases is None else min(stop, self._num_cases)


def _share_start(case: int) -> int:
    """The first case of a case's share."""
    return case // CASES_PER_SHARE * CASES_PER_SHARE  # floor


class Crew:
    """The jobs of a campaign: a thread each, which waits for its child. cases: among which a case is. The first target is
    the caller's to close."""

    def __init__(
        self, target: Target, cases: Callable[[int], Cases], shares: Shares, num_jobs: int, deadline: float | None
    ) -> None:
        self._targets = [target, *(target.sibling() for _ in range(num_jobs - 1))]
        self._cases = cases
        self._shares = shares
        self._deadline = deadline
        self._lost_before = target.lost
        self._stopping = False
        self._results: queue.Queue[ShareResult | BaseException | None] = queue.Queue()
        self._threads = [threading.Thread(target=self._work, args=(t,), daemon=True) for t in self._targets]

    @property
    def lost(self) -> int:
        """Cases that a dying child took with it and that passed when run again."""
        return sum(target.lost for target in self._targets) - self._lost_before

    def start_children(self) -> None:
        """Starts all children now rather than with their first share."""
        for target in self._targets:
            target.start()

    def results(self) -> Iterator[ShareResult]:
        """The shares as they end, until all are through or time is up. Raises what a job raised."""
        for thread in self._threads:
            thread.start()
        num_at_work = len(self._threads)
        while num_at_work:
            result = self._results.get()
            if result is None:
                num_at_work -= 1
            elif isinstance(result, BaseException):
                raise result
            else:
                yield result

    def close(self) -> None:
        """Ends the jobs at once; what they had not reported is not counted."""
        self._stopping = True
        for target, thread in zip(self._targets, self._threads, strict=True):
            if thread.is_alive():
                target.kill()
                thread.join()
        for sibling in self._targets[1:]:
            sibling.close()

    def _work(self, target: Target) -> None:
        try:
            while not self._is_time_up() and self._shares.are_left:
                if (share := self._shares.take(_SECONDS_TO_WAIT)) is not None:
                    self._run_share(target, share)
        except BaseException as error:
            if not self._stopping:
                self._results.put(error)
        finally:
            self._results.put(None)

    def _is_time_up(self) -> bool:
        return self._stopping or (self._deadline is not None and time.monotonic() >= self._deadline)

    def _run_share(self, target: Target, share: Share) -> None:
        messages = list(target.run_cases(self._cases(share[0]), *share))
        self._results.put(ShareResult(share, messages))
        if isinstance(messages[-1], wire.CasesDone) and messages[-1].resident_bytes > MOST_RESIDENT_BYTES:
            target.close()  # the next share starts a fresh child

"""Runs a gate: base and every candidate side by side, case by case, in children of one process that imported vLLM."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from diff_tests.corpus import fault_slug
from diff_tests.failures import failure_of, save, saved_findings
from diff_tests.gate.cases import (
    CHUNK,
    NUM_CASES,
    SEED,
    Concerns,
    GateCase,
    concerns_all,
    concerns_connector,
    corpus_cases,
    older,
    seeded_cases,
)
from diff_tests.gate.weighing import Ran, Weighed, Word, change_of, weigh
from diff_tests.reduce import reduce
from diff_tests.run import Outcome, judge_run
from diff_tests.vllm_target.connectors import is_file
from diff_tests.vllm_target.releases import is_release
from diff_tests.vllm_target.target import Target, TargetInfo, TargetInputError, TargetStartError
from oracle.findings import Fault, Finding
from sim.history import Failure, History
from sim.scenario import Scenario, dump, plain

# The slowest case fills large states, and took more than 20 s where many others wanted the same cores: a verdict that
# hangs on that would not come again. A candidate that hangs costs this once.
CASE_TIMEOUT_S = 120.0
# Causes that explain others: blocks in the wrong layers often just look like wrong values, where groups share memory.
_VAGUE = frozenset({"missing_block", "extra_block"})
_TELLING = {"swapped_groups": 0, "whole_tensor": 1, "wrong_layers": 1}
MAX_REDUCED = 3
# Bounded by tries, so that a rerun finds the same; the time is for a machine that is far too slow.
MAX_TRIES, MAX_REDUCE_SECONDS = 400, 60.0


@dataclass(frozen=True)
class Plan:
    """What to gate. head, base: as `--vllm`; base None: head's own. connectors: candidates on head; none: head itself is
    the candidate. as_release: rules for what is no release. seconds: go on with more cases until then. max_reduced: new
    failures of one candidate that are made small; the others keep the scenario that showed them."""

    folder: Path
    head: str = "current"
    base: str | None = None
    connectors: tuple[str, ...] = ()
    as_release: str | None = None
    seed: int = SEED
    cases: int = NUM_CASES
    seconds: float | None = None
    keep_going: bool = False
    max_reduced: int = MAX_REDUCED

    @property
    def base_name(self) -> str:
        return self.head if self.base is None else self.base


@dataclass
class Entry:
    """One verdict of a candidate: a fault and what it means, or a change of behaviour.

    finding: of the first case, or of the reduced scenario where there is one. known_issue: its id. scenario: file that
    shows it, command: the one that shows it again.
    """

    word: Word | None
    finding: Finding
    case: GateCase
    known_issue: str | None = None
    num_cases: int = 0
    scenario: Path | None = None
    command: str | None = None


@dataclass
class Candidate:
    """A connector on head, or head itself, and what came out so far. error: why it could not be run."""

    name: str
    connector: str | None
    entries: dict[tuple[Word, Fault], Entry] = field(default_factory=dict)
    changes: dict[Fault, Entry] = field(default_factory=dict)
    results: list[tuple[str, list[Finding]]] = field(default_factory=list)
    num_cases: int = 0
    error: str | None = None
    info: TargetInfo | None = None
    _first_faults: Counter[Fault] = field(default_factory=Counter)

    @property
    def new_failures(self) -> list[Entry]:
        """Its new failures. The cause that most cases show first is at the head: what comes first in a case is the cause of
        the rest. Some causes are never seen by chance and come before that; causes that only say that something is not
        there come behind the others, and an exception, which says least, comes last."""
        first_causes: Counter[str] = Counter()
        for fault, count in self._first_faults.items():
            first_causes[fault.cause] += count

        def rank(entry: Entry) -> tuple[int, int, int]:
            finding = entry.finding
            telling = _TELLING.get(finding.cause, 2) if first_causes[finding.cause] else 2
            if finding.cause in _VAGUE:
                telling = 3
            if finding.kind in ("crash", "hang"):
                telling = 4
            return telling, -first_causes[finding.cause], -self._first_faults[finding.fault]

        return sorted((entry for (word, _), entry in self.entries.items() if word == "new failure"), key=rank)

    @property
    def verdict(self) -> str:
        return "error" if self.error is not None else "fail" if self.new_failures else "pass"

    @property
    def headline(self) -> Finding | None:
        """The finding that a reader should see first."""
        return next((entry.finding for entry in self.new_failures), None)

    def take(self, case: GateCase, weighed: list[Weighed], change: Finding | None) -> None:
        """Counts one case."""
        self.num_cases += 1
        new = [w.judged.finding for w in weighed if w.word == "new failure"]
        self.results.append((case.name, new))
        if new:
            self._first_faults[new[0].fault] += 1
        for (word, _), w in {(w.word, w.judged.finding.fault): w for w in reversed(weighed)}.items():
            issue = w.judged.issue.id if w.judged.issue is not None else None
            entry = Entry(word, w.judged.finding, case, issue)
            self.entries.setdefault((word, entry.finding.fault), entry).num_cases += 1
        if change is not None:
            self.changes.setdefault(change.fault, Entry(None, change, case)).num_cases += 1


@dataclass
class Result:
    """What a gate found. num_seeded: seeded cases that were run for the candidate that took most."""

    plan: Plan
    base: TargetInfo
    head: TargetInfo
    candidates: list[Candidate]
    num_corpus: int = 0
    num_seeded: int = 0
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def changes(self) -> list[tuple[Candidate, Entry]]:
        return [(candidate, entry) for candidate in self.candidates for entry in candidate.changes.values()]

    @property
    def verdict(self) -> str:
        return "pass" if all(candidate.verdict == "pass" for candidate in self.candidates) else "fail"


def expand(connectors: tuple[str, ...]) -> list[str]:
    """Candidates in order: folders become their `.py` files. Raises TargetInputError for an empty folder."""
    found: list[str] = []
    for connector in connectors:
        if not Path(connector).is_dir():
            found.append(connector)
            continue
        files = sorted(str(path) for path in Path(connector).glob("*.py") if path.name != "__init__.py")
        if not files:
            raise TargetInputError(f"--connector {connector}: the folder holds no .py file")
        found += files
    return list(dict.fromkeys(found))


class Gate:
    """One gate. Starts its targets itself, as contexts of `run`."""

    def __init__(self, plan: Plan) -> None:
        """Raises TargetInputError where the plan names something that is not there."""
        self.plan = plan
        connectors = expand(plan.connectors)
        self._base = Target(plan.base_name, timeout_s=CASE_TIMEOUT_S, as_release=self._as_release_of(plan.base_name))
        self._head = Target(plan.head, timeout_s=CASE_TIMEOUT_S, as_release=self._as_release_of(plan.head))
        self._targets: dict[str, Target] = {}
        names = _names(connectors)
        self._candidates = [Candidate(name, c) for name, c in zip(names, connectors, strict=True)]
        if not connectors:
            self._candidates = [Candidate(f"vLLM {plan.head}", None)]

    def _as_release_of(self, vllm: str) -> str | None:
        """A release is judged by its own rules; `--as` speaks of what is none."""
        return None if is_release(vllm) else self.plan.as_release

    def run(self, on_progress: Callable[[Result], None] = lambda result: None) -> Result:
        """Runs everything. Raises TargetInputError or TargetStartError where head or base cannot be run at all."""
        started = time.monotonic()
        try:
            base, head = self._base.start(), self._head.start()
            result = Result(self.plan, base, head, self._candidates)
            try:
                self._run(result, started, on_progress)
            except KeyboardInterrupt:
                result.interrupted = True
                for candidate in self._candidates:
                    self._show(candidate, max_reduced=0)
            result.seconds = time.monotonic() - started
            return result
        finally:
            for target in (self._base, self._head, *self._targets.values()):
                target.close()

    def _run(self, result: Result, started: float, on_progress: Callable[[Result], None]) -> None:
        alike: dict[str | None, list[Candidate]] = {}
        for candidate in self._candidates:
            if self._start(candidate):
                assert candidate.info is not None
                alike.setdefault(candidate.info.replaces, []).append(candidate)
        for replaces, candidates in alike.items():
            concerns = partial(concerns_connector, replaces=replaces) if self.plan.connectors else concerns_all
            self._run_candidates(result, candidates, concerns, started, on_progress)

    def _run_candidates(
        self,
        result: Result,
        live: list[Candidate],
        concerns: Concerns,
        started: float,
        on_progress: Callable[[Result], None],
    ) -> None:
        """Candidates that take the same cases, side by side: the corpus, then seeded cases until there are enough and time
        is up. One that has failed is let go, but not before it has seen some seeded cases: they tell causes apart."""
        candidates = list(live)
        corpus = corpus_cases(concerns)
        source = seeded_cases(self.plan.seed, older(result.base.rules, result.head.rules), concerns)
        live = self._run_chunk(corpus, live)
        result.num_corpus = max(result.num_corpus, len(corpus))
        num_seeded = 0
        while live and (num_next := self._num_next(num_seeded, time.monotonic() - started)):
            live = self._run_chunk(list(islice(source, num_next)), live)
            num_seeded += num_next
            result.num_seeded = max(result.num_seeded, num_seeded)
            result.seconds = time.monotonic() - started
            on_progress(result)
            if self.plan.connectors and not self.plan.keep_going:
                live = [candidate for candidate in live if candidate.verdict == "pass"]
        for candidate in candidates:
            self._show(candidate, self.plan.max_reduced)

    def _num_next(self, num_seeded: int, seconds: float) -> int:
        """How many seeded cases to run before looking up; 0 at the end."""
        if num_seeded < self.plan.cases:
            return min(self.plan.cases - num_seeded, CHUNK)
        return CHUNK if seconds < (self.plan.seconds or 0.0) else 0

    # -- candidates ----------------------------------------------------------------------------------------------------

    def _start(self, candidate: Candidate) -> bool:
        """Whether the candidate runs. A broken file is its own error, nobody else's."""
        if candidate.connector is None:
            self._targets[candidate.name] = self._head
            candidate.info = self._head.info
            return True
        as_release = self._as_release_of(self.plan.head)
        try:
            target = Target(self.plan.head, candidate.connector, timeout_s=CASE_TIMEOUT_S, as_release=as_release)
            candidate.info = target.start()
        except (TargetInputError, TargetStartError) as error:
            candidate.error = str(error)
            return False
        self._targets[candidate.name] = target
        return True

    # -- cases ---------------------------------------------------------------------------------------------------------

    def _run_chunk(self, cases: list[GateCase], live: list[Candidate]) -> list[Candidate]:
        """Runs cases on base and on all candidates, one behind the other in each case. Returns those that go on."""
        scenarios = [case.scenario for case in cases]
        base_runs = self._base.run_many(scenarios)
        runs = {candidate.name: self._targets[candidate.name].run_many(scenarios) for candidate in live}
        for case in cases:
            scenario, history = next(base_runs)
            info = self._base.info
            base = Ran(judge_run(scenario, history, info.rules), info.rules, info.known_release)
            live = [candidate for candidate in live if self._take(candidate, case, base, runs[candidate.name])]
        return live

    def _take(self, candidate: Candidate, case: GateCase, base: Ran, runs: Iterator[tuple[Scenario, History]]) -> bool:
        """Judges one case of a candidate. Returns whether it goes on: one that hangs would take the time of all."""
        try:
            _, history = next(runs)
        except TargetStartError as error:  # its child died, and no other can be started
            candidate.error = str(error)
            return False
        head = self._ran(candidate, case.scenario, history, base)
        weighed = weigh(base, head)
        candidate.take(case, weighed, change_of(base, head, weighed))
        last = history[-1]
        return not (isinstance(last, Failure) and last.type == "Hang" and candidate.new_failures)

    def _ran(self, candidate: Candidate, scenario: Scenario, history: History, base: Ran) -> Ran:
        """What the candidate did; what base did as well has been judged before."""
        target = self._targets[candidate.name]
        info = target.info
        effective = target.effective(scenario)
        if history == base.outcome.observed and info.rules == base.rules and effective == scenario:
            outcome = base.outcome
        else:
            outcome = judge_run(effective, history, info.rules)
        return Ran(outcome, info.rules, info.known_release and candidate.connector is None)

    # -- what is shown of a failure ------------------------------------------------------------------------------------

    def _show(self, candidate: Candidate, max_reduced: int) -> None:
        """Saves every new failure, the first ones made small."""
        for number, entry in enumerate(candidate.new_failures):
            is_reduced = number < max_reduced
            outcome = self._reduced(candidate, entry) if is_reduced else self._outcome(candidate, entry.case.scenario)
            self._save(candidate, entry, outcome)

    def _reduced(self, candidate: Candidate, entry: Entry) -> Outcome:
        fault = entry.finding.fault
        reduction = reduce(
            entry.case.scenario,
            lambda scenario: self._is_new(candidate, scenario, fault),
            max_tries=MAX_TRIES,
            max_seconds=MAX_REDUCE_SECONDS,
        )
        outcome = self._outcome(candidate, reduction.scenario)
        shown = next((j.finding for j in outcome.findings if j.finding.fault == fault), None)
        entry.finding = shown or entry.finding  # what shows by chance only may not show again
        return outcome

    def _is_new(self, candidate: Candidate, scenario: Scenario, fault: Fault) -> bool:
        """Whether the candidate shows the fault, and base does not."""
        shows = any(j.finding.fault == fault for j in self._outcome(candidate, scenario).findings)
        if not shows:
            return False
        base = judge_run(scenario, self._base.run(scenario), self._base.info.rules)
        return all(j.finding.fault != fault for j in base.findings)

    def _outcome(self, candidate: Candidate, scenario: Scenario) -> Outcome:
        target = self._targets[candidate.name]
        return judge_run(target.effective(scenario), target.run(scenario), target.info.rules)

    def _save(self, candidate: Candidate, entry: Entry, outcome: Outcome) -> None:
        slug = f"{Path(candidate.name).stem}-{fault_slug(entry.finding.fault)}".replace(" ", "-")
        entry.scenario = self.plan.folder / "faults" / f"{slug}.yaml"
        entry.scenario.parent.mkdir(parents=True, exist_ok=True)
        small = replace(outcome.scenario, about=entry.finding.message)
        entry.scenario.write_text(dump(small), encoding="utf-8")
        entry.command = self._command(candidate, entry.scenario)
        failure = failure_of(
            outcome,
            vllm=self.plan.head,
            release=self._head.info.rules.release,
            connector=candidate.connector,
            seed=self.plan.seed,
            case=entry.case.case_index,
        )
        failure.scenario = plain(entry.case.scenario)
        failure.reduced, failure.reduced_findings = plain(small), saved_findings(outcome)
        save(failure, self.plan.folder / "failures" / f"case-{slug}.json")

    def _command(self, candidate: Candidate, path: Path) -> str:
        words = ["kvoracle", "run", str(path)]
        if self.plan.head != "current":
            words += ["--vllm", self.plan.head]
        if candidate.connector is not None:
            words += ["--connector", candidate.connector]
        if self.plan.as_release is not None:
            words += ["--as", self.plan.as_release]
        return shlex.join(words)


def _names(connectors: list[str]) -> list[str]:
    """File names, or whole paths where two files have the same name."""
    short = [Path(connector).name if is_file(connector) else connector for connector in connectors]
    return short if len(set(short)) == len(short) else connectors

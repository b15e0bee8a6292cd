"""How much of what can go wrong the tester finds: first-order mutants of a connector, and named defects, one at a time."""

from __future__ import annotations

import contextlib
import math
import tempfile
import threading
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from diff_tests.connector_edits import EDITS
from diff_tests.corpus import CORPUS, find_cases
from diff_tests.mutation import Mutant
from diff_tests.shard import CaseReport, Cases
from diff_tests.vllm_target import wire
from diff_tests.vllm_target.defects import DEFECTS
from diff_tests.vllm_target.target import Alone, Target, TargetInputError
from oracle.findings import Finding
from sim.scenario import Mamba, Scenario

EQUIVALENT = Path(__file__).parent / "equivalent_mutants.toml"
_SHARES = (8, 8, 16, 32, 64)
"""Cases per question to a child: few at first, since most mutants show at once; the last one is repeated."""


@dataclass(frozen=True)
class Subject:
    """Something wrong on purpose: a name, what it is, and how to run it. source: of a connector file; defect: one of
    `defects.DEFECTS`."""

    name: str
    about: str
    source: str | None = None
    defect: str | None = None


@dataclass(frozen=True)
class Result:
    """How one subject fared. finding: what gave it away, None if it survived; at_import: it did not even start."""

    subject: Subject
    finding: Finding | None
    num_cases: int
    seconds: float
    at_import: bool = False

    @property
    def killed(self) -> bool:
        return self.finding is not None or self.at_import


@dataclass(frozen=True)
class Trial:
    """What each subject has to face: `first`, then `num_cases` cases of a seed, all with the connector under test."""

    vllm: str
    connector: str
    seed: int
    num_cases: int
    jobs: int = 1
    first: tuple[Scenario, ...] = ()

    def cases(self, subject: Subject) -> Cases:
        """A defect of the engine shows with any connector, or with none, and in memory of any size."""
        if subject.defect is None:
            return Cases(self.seed, connector=self.connector, first=self.first)
        return Cases(self.seed, first=tuple(scenario for scenario in self.first if _effort(scenario)[0] < 1 << 20))

    @property
    def most_cases(self) -> int:
        """As many as a survivor has faced."""
        return len(self.first) + self.num_cases


class Equivalent(Struct, frozen=True, forbid_unknown_fields=True):
    """A mutant that no input tells from the original, and why. key: `Mutant.key`, a digest of the changed text; function
    and operator are there for the reader, and checked."""

    key: str
    function: str
    operator: str
    reason: str


class _Document(Struct, frozen=True, forbid_unknown_fields=True):
    mutant: list[Equivalent] = []


def load_equivalent(path: Path = EQUIVALENT) -> dict[str, Equivalent]:
    """The mutants judged equivalent, by key. Raises ValueError that names the entry."""
    entries = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Document).mutant
    by_key = {entry.key: entry for entry in entries}
    if len(by_key) != len(entries):
        twice = [key for key, count in Counter(entry.key for entry in entries).items() if count > 1]
        raise ValueError(f"{path.name}: listed twice: {', '.join(twice)}")
    return by_key


def stale(equivalent: dict[str, Equivalent], mutants: Sequence[Mutant]) -> list[str]:
    """Keys whose mutant is not among these any more, or reads differently: to be judged anew."""
    by_key = {mutant.key: mutant for mutant in mutants}
    return [
        key
        for key, entry in equivalent.items()
        if key not in by_key or (by_key[key].scope, by_key[key].operator) != (entry.function, entry.operator)
    ]


def directed_cases(connector: str, release: str) -> tuple[Scenario, ...]:
    """The corpus cases with this connector in which the release is sound, small ones first."""
    sound = [
        case.scenario
        for case in find_cases([CORPUS])
        if case.scenario.connector is not None
        and case.scenario.connector.name == connector
        and release in case.expect
        and case.expect[release].verdict in ("same", "known")
    ]
    return tuple(sorted(sound, key=_effort))


def _effort(scenario: Scenario) -> tuple[int, int]:
    """Elements of the states that are kept as tensors, and blocks of the pool."""
    mambas = [group for group in scenario.groups if isinstance(group, Mamba)]
    return sum(math.prod(state.shape) for group in mambas for state in group.states), scenario.engine.blocks


def subjects_of(mutants: Sequence[Mutant]) -> list[Subject]:
    """First-order mutants as subjects."""
    return [
        Subject(mutant.key, f"{mutant.scope}, line {mutant.line}, {mutant.operator}\n{mutant.diff}", mutant.source)
        for mutant in mutants
    ]


def named_subjects(source: str) -> list[Subject]:
    """The defects that have a name: those of engine and worker (`defects.DEFECTS`), and edits of the connector's source
    (`connector_edits.EDITS`) where it has what they change."""
    engine = [Subject(name, " ".join((defect.__doc__ or "").split()), defect=name) for name, defect in DEFECTS.items()]
    edits = []
    for name, edit in EDITS.items():
        with contextlib.suppress(ValueError, StopIteration):
            edits.append(Subject(name, edit.about, source=edit.applied_to(source)))
    return engine + edits


@dataclass
class Run:
    """Puts subjects on trial, several at a time, in processes forked from one vLLM. Results come as they are there."""

    trial: Trial
    subjects: Sequence[Subject]
    _left: deque[Subject] = field(init=False)

    def __post_init__(self) -> None:
        self._left = deque(self.subjects)

    def results(self, on_result: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """All results, in the order of the subjects. Ctrl-C ends it with those that are there."""
        found: dict[str, Result] = {}
        errors: list[BaseException] = []
        lock = threading.Lock()

        def work() -> None:
            with tempfile.TemporaryDirectory() as folder:
                while not errors:
                    try:
                        subject = self._left.popleft()
                    except IndexError:
                        return
                    try:
                        result = put_on_trial(self.trial, subject, Path(folder))
                    except BaseException as error:
                        errors.append(error)
                        return
                    with lock:
                        found[subject.name] = result
                        on_result(result)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self.trial.jobs)]
        for thread in threads:
            thread.start()
        with contextlib.suppress(KeyboardInterrupt):
            for thread in threads:
                thread.join()
        if errors:
            raise errors[0]
        return [found[subject.name] for subject in self.subjects if subject.name in found]


def installed_source(target: Target, connector: str) -> str:
    """The text of a connector's file in a target. Raises TargetInputError where it cannot be read."""
    path = target.connector_file(connector)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TargetInputError(f"{path}: {error.strerror}") from None


def put_on_trial(trial: Trial, subject: Subject, folder: Path) -> Result:
    """Runs cases on a target with the subject in place until something is found. Raises TargetStartError."""
    started = time.monotonic()
    connector = None
    if subject.source is not None:
        path = folder / f"{subject.name}.py"
        path.write_text(subject.source, encoding="utf-8")
        connector = str(path)
    try:
        with Target(trial.vllm, connector, subject.defect, timeout_s=20.0) as target:
            num_cases = 0
            for finding, num_cases in _findings(trial, target, trial.cases(subject)):
                return Result(subject, finding, num_cases, time.monotonic() - started)
    except TargetInputError:
        return Result(subject, None, 0, time.monotonic() - started, at_import=True)
    return Result(subject, None, trial.most_cases, time.monotonic() - started)


def _findings(trial: Trial, target: Target, cases: Cases) -> Iterator[tuple[Finding, int]]:
    """(what was found, cases until then), share by share."""
    from diff_tests.run import judge_run

    start = 0
    for number in count():
        stop = min(start + _SHARES[min(number, len(_SHARES) - 1)], trial.most_cases)
        if start == stop:
            return
        for message in target.run_cases(cases, start, stop):
            if isinstance(message, Alone):
                for finding in judge_run(message.scenario, message.history, target.info.rules).new_findings:
                    yield finding, message.index + 1
            elif isinstance(message, wire.CasesNews) and isinstance(message.news, CaseReport):
                for saved in message.news.findings:
                    if saved.issue is None:
                        yield saved.finding, message.news.index + 1
        start = stop


def document(trial: Trial, results: Sequence[Result], equivalent: dict[str, Equivalent]) -> dict[str, Any]:
    """The JSON document of `mutants --json`. equivalent: what is judged so, run or not."""
    killed = [result for result in results if result.killed]
    survived = [result for result in results if not result.killed]
    left = [result for result in survived if result.subject.name not in equivalent]
    misjudged = [result.subject.name for result in killed if result.subject.name in equivalent]
    num_equivalent = len(equivalent) - len(misjudged)
    by_law = Counter("import" if r.finding is None else _law(r.finding) for r in killed)
    return {
        "verdict": "fail" if left or misjudged else "pass",
        "target": {"vllm": trial.vllm, "connector": trial.connector},
        "seed": trial.seed,
        "cases": trial.most_cases,
        "subjects": len(killed) + len(left) + num_equivalent,
        "killed": len(killed),
        "equivalent": num_equivalent,
        "misjudged": misjudged,
        "killed_of_not_equivalent": len(killed) / (len(killed) + len(left)) if killed or left else 1.0,
        "by_law": dict(sorted(by_law.items())),
        "seconds": sum(result.seconds for result in results),
        "survivors": [{"name": r.subject.name, "about": r.subject.about} for r in left],
        "results": [
            {
                "name": r.subject.name,
                "about": r.subject.about,
                "killed": r.killed,
                "by": None if r.finding is None else msgspec.to_builtins(r.finding),
                "cases": r.num_cases,
                "seconds": round(r.seconds, 2),
            }
            for r in results
        ],
    }


def _law(finding: Finding) -> str:
    return "divergence" if finding.law is None else f"law {finding.law}"


def print_results(console: Console, trial: Trial, results: Sequence[Result], equivalent: dict[str, Equivalent]) -> None:
    """The survivors with what was changed, then how many were killed by what, and last the verdict."""
    shown = document(trial, results, equivalent)
    for survivor in shown["survivors"]:
        console.print(f"survived: {survivor['name']}: {survivor['about']}", markup=False, highlight=False)
    for name in shown["misjudged"]:
        console.print(f"judged equivalent, but killed: {name}", markup=False, highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("killed by")
    table.add_column("", justify="right")
    for law, num_killed in shown["by_law"].items():
        table.add_row(law, str(num_killed))
    console.print(table)
    console.print(
        f"{shown['verdict']}: {shown['killed']} of {shown['subjects']} killed, {shown['equivalent']} judged equivalent, "
        f"{shown['killed_of_not_equivalent']:.1%} of the others",
        markup=False,
        highlight=False,
    )

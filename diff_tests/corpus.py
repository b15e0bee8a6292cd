"""The corpus: scenarios worth keeping, each with what every release does with it.

A case is a YAML file: `why` it is kept, `expect` per release (verdict and faults), and the `scenario`. Replaying it says
whether that is still so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from diff_tests.failures import SavedFailure, load_failure
from diff_tests.loading import is_corpus_case, is_failure, read_yaml
from diff_tests.run import Outcome, Verdict, judge_run
from diff_tests.vllm_target.target import Target, TargetInfo
from oracle.findings import Fault, Finding
from sim.scenario import Scenario, ScenarioError, dump, loads, parse, plain

CORPUS = Path(__file__).parent / "corpus"

Status = Literal["OK", "KNOWN", "FIXED", "FAILED"]


class Expectation(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one release does: the verdict, and the faults it shows (kind, law, cause, group kind), sorted."""

    verdict: Verdict
    faults: tuple[Fault, ...] = ()


class _Document(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The YAML file."""

    why: str
    expect: dict[str, Expectation]
    scenario: Any


@dataclass
class CorpusCase:
    """A case of the corpus, or a saved failure that is replayed: then `path` is the failure's."""

    path: Path
    why: str
    expect: dict[str, Expectation]
    scenario: Scenario
    is_failure: bool = False

    @property
    def name(self) -> str:
        return self.path.stem


def load_case(path: Path) -> CorpusCase:
    """Reads a corpus case. Raises ScenarioError with the place, OSError if it cannot be read."""
    raw = read_yaml(path.read_text(encoding="utf-8"))
    try:
        document = msgspec.convert(raw, _Document)
    except msgspec.ValidationError as error:
        raise ScenarioError("$", f"{path} is not a corpus case: {error}") from None
    return CorpusCase(path, document.why, document.expect, parse(document.scenario))


def save_case(case: CorpusCase) -> None:
    """Writes a case as YAML that a person reads easily. Raises OSError."""
    head = {
        "why": case.why,
        "expect": {
            release: _Line(msgspec.to_builtins(expectation)) for release, expectation in sorted(case.expect.items())
        },
    }
    text = yaml.dump(head, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)
    body = "".join(f"  {line}\n" if line else "\n" for line in dump(case.scenario).splitlines())
    case.path.parent.mkdir(parents=True, exist_ok=True)
    case.path.write_text(f"{text}scenario:\n{body}", encoding="utf-8")


class _Line(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Line, lambda d, v: d.represent_mapping("tag:yaml.org,2002:map", v, flow_style=True))


def find_cases(paths: Sequence[Path]) -> list[CorpusCase]:
    """The cases named by paths: corpus cases, saved failures, scenarios, or folders of them.

    Raises ScenarioError, OSError.
    """
    cases: list[CorpusCase] = []
    for path in paths:
        files = sorted([*path.rglob("*.yaml"), *path.rglob("case-*.json")]) if path.is_dir() else [path]
        cases += [_load_named(file) for file in files]
    return cases


def _load_named(path: Path) -> CorpusCase:
    """A case; an error names its file, since it may be one of many."""
    try:
        return _load_any(path)
    except ScenarioError as error:
        raise ScenarioError(error.path, f"{error.reason} (in {path.name})") from None


def _load_any(path: Path) -> CorpusCase:
    if is_failure(path):
        return case_of(load_failure(path), path)
    text = path.read_text(encoding="utf-8")
    if is_corpus_case(text):
        return load_case(path)
    return CorpusCase(path, "", {}, loads(text))


def find_failures(path: Path) -> list[SavedFailure]:
    """The failure saved in a file, or all that a run folder holds. Raises ScenarioError, OSError."""
    if not path.is_dir():
        return [load_failure(path)]
    failures = [load_failure(file) for file in sorted(path.rglob("case-*.json"))]
    if not failures:
        raise ScenarioError("$", "the folder holds no saved failure (case-*.json)")
    # The reduced ones first: they are what a cause is best kept as.
    return sorted(failures, key=lambda failure: failure.reduced is None)


# ------------------------------------------------------------------------------------------------------------- keeping


def faults_of(findings: Iterable[Finding]) -> tuple[Fault, ...]:
    """The faults that findings show, each once, sorted."""
    return tuple(sorted({finding.fault for finding in findings}, key=str))


def expectation_of(outcome: Outcome) -> Expectation:
    """What an outcome amounts to, known issues included."""
    return Expectation(outcome.verdict, faults_of(judged.finding for judged in outcome.findings))


def case_of(failure: SavedFailure, path: Path) -> CorpusCase:
    """A saved failure as a case. It expects the faults on their release; what a changed vLLM or connector did wrong is
    expected to go well on the unmodified release."""
    headline = failure.headline
    expected = Expectation("different", faults_of(saved.finding for saved in failure.smallest_findings))
    if failure.is_of_changed_code:
        expected = Expectation("same")
    return CorpusCase(path, headline.message, {failure.release: expected}, failure.smallest, is_failure=True)


def keep(failure: SavedFailure, folder: Path = CORPUS, why: str | None = None) -> tuple[CorpusCase, bool]:
    """Makes a corpus case of a failure. Returns it and whether it is new.

    A case that already expects the same faults, or was kept for the same fault, is not doubled: it learns of the release
    instead, and of the scenario where the new one is smaller.
    """
    faults = faults_of(saved.finding for saved in failure.smallest_findings)
    new = case_of(failure, folder / f"{fault_slug(failure.headline.fault)}.yaml")
    new.is_failure = False
    new.why = why or new.why
    release, expected = next(iter(new.expect.items()))
    for old in find_cases([folder]) if folder.is_dir() else []:
        if old.path == new.path or any(e.faults == faults for e in old.expect.values()):
            return _merged(old, new, release, expected), False
    save_case(new)
    return new, True


def record_verdicts(cases: Sequence[CorpusCase], target: Target, info: TargetInfo) -> None:
    """Writes into the cases what a release does with them. Raises OSError."""
    for replayed in replay_on(cases, target, info):
        replayed.case.expect[replayed.release] = expectation_of(replayed.outcome)
        save_case(replayed.case)


def _merged(old: CorpusCase, new: CorpusCase, release: str, expected: Expectation) -> CorpusCase:
    """The old case, with what the new one adds."""
    if release in old.expect and _size(new.scenario) < _size(old.scenario):
        old.scenario, old.expect = new.scenario, {release: expected}
    elif release not in old.expect and new.scenario == old.scenario:
        old.expect[release] = expected
    save_case(old)
    return old


def _size(scenario: Scenario) -> int:
    return len(msgspec.json.encode(plain(scenario)))


def fault_slug(fault: Fault) -> str:
    """A fault as a file name: `selection-law4-starts_early-full`."""
    kind, law, cause, group_kind = fault
    return "-".join([kind, "divergence" if law is None else f"law{law}", cause, group_kind or "any"])


# ----------------------------------------------------------------------------------------------------------- replaying


@dataclass
class Replayed:
    """What one case did on one release, against what was expected. `expected` is None where the case says nothing.

    unmodified: the target is a release that we know, so what the corpus says of it must be true.
    """

    case: CorpusCase
    release: str
    status: Status
    outcome: Outcome
    expected: Expectation | None
    unmodified: bool = True

    @property
    def bad(self) -> bool:
        """Whether a replay must not pass with this: a failure, or a corpus entry that claims one and is wrong."""
        is_stale = self.status == "FIXED" and self.unmodified and not self.case.is_failure
        return self.status == "FAILED" or is_stale

    @property
    def sentence(self) -> str:
        """Why it is not OK."""
        if self.status == "FIXED":
            return "does not fail any more"
        if self.status == "FAILED":
            new = self.outcome.new_findings
            found = new[0].message if new else f"verdict {self.outcome.verdict}"
            return f"expected {self.expected.verdict if self.expected else 'nothing'}; found: {found}"
        return ""


def status_of(outcome: Outcome, expected: Expectation | None) -> Status:
    """OK: nothing found, as expected; KNOWN: fails exactly as recorded, or by known issues only; FIXED: recorded as
    failing and does not; FAILED: anything else."""
    found = expectation_of(outcome)
    if expected is not None and found == expected and found.verdict == "different":
        return "KNOWN"
    if expected is not None and expected.faults and found.verdict == "same":
        return "FIXED"
    if expected is not None and found != expected:
        return "FAILED"
    return _BARE_STATUS[found.verdict]


def failure_status_of(outcome: Outcome) -> Status:
    """The status of a saved failure: FAILED as long as anything new is found, else FIXED, or KNOWN."""
    status = _BARE_STATUS[outcome.verdict]
    return "FIXED" if status == "OK" else status


_BARE_STATUS: dict[Verdict, Status] = {"same": "OK", "refused": "OK", "known": "KNOWN", "different": "FAILED"}


def replay_on(cases: Sequence[CorpusCase], target: Target, info: TargetInfo) -> Iterator[Replayed]:
    """Runs the cases on a started target, in order, and holds each against what it expects of this release."""
    runs = target.run_many(case.scenario for case in cases)
    for case, (scenario, history) in zip(cases, runs, strict=True):
        outcome = judge_run(target.effective(scenario), history, info.rules)
        expected = case.expect.get(info.rules.release)
        status = failure_status_of(outcome) if case.is_failure else status_of(outcome, expected)
        yield Replayed(case, info.rules.release, status, outcome, expected, info.known_release)

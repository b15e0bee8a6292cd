"""Corpus cases on disk, what counts as OK, KNOWN, FIXED or FAILED, and keeping a failure once."""

from __future__ import annotations

from pathlib import Path

import pytest

from diff_tests.corpus import (
    CORPUS,
    CorpusCase,
    Expectation,
    failure_status_of,
    find_cases,
    keep,
    load_case,
    save_case,
    status_of,
)
from diff_tests.failures import failure_of
from diff_tests.loading import load_scenario
from diff_tests.run import Judged, Outcome, Verdict
from oracle.findings import Fault, Finding
from sim.history import History, Start
from sim.scenario import ScenarioError, loads

SCENARIO = loads("""
kvoracle: 1
engine: {blocks: 9}
connector: null
groups: [{kind: full, block: 4}]
steps:
  - add: {id: A, prompt: [[a, 6]]}
  - step: 1
""")
EARLY = Finding(kind="selection", law=4, cause="starts_early", group=0, group_kind="full", message="too early")
LATE = Finding(kind="selection", law=4, cause="ends_late", group=0, group_kind="full", message="too late")


def _outcome(verdict: Verdict, *findings: Finding) -> Outcome:
    observed: History = [Start(source="vllm", release="0.29.0")]
    return Outcome(SCENARIO, verdict, observed, None, [Judged(finding) for finding in findings])


@pytest.mark.parametrize("case", find_cases([CORPUS]), ids=lambda case: case.name)
def test_a_case_survives_being_written_and_says_why_it_is_kept(case: CorpusCase, tmp_path: Path) -> None:
    copy = CorpusCase(tmp_path / case.path.name, case.why, case.expect, case.scenario)
    save_case(copy)
    assert load_case(copy.path) == copy
    assert load_scenario(copy.path) == case.scenario
    assert len(case.why) > 40


@pytest.mark.parametrize(
    ("outcome", "expected", "status"),
    [
        (_outcome("same"), Expectation("same"), "OK"),
        (_outcome("refused"), Expectation("refused"), "OK"),
        (_outcome("same"), None, "OK"),
        (_outcome("different", EARLY), Expectation("different", (EARLY.fault,)), "KNOWN"),
        (_outcome("known", EARLY), Expectation("known", (EARLY.fault,)), "KNOWN"),
        (_outcome("known", EARLY), None, "KNOWN"),
        (_outcome("same"), Expectation("different", (EARLY.fault,)), "FIXED"),
        (_outcome("same"), Expectation("refused"), "FAILED"),
        (_outcome("different", LATE), Expectation("same"), "FAILED"),
        (_outcome("different", LATE), Expectation("different", (EARLY.fault,)), "FAILED"),
        (_outcome("different", EARLY, LATE), Expectation("different", (EARLY.fault,)), "FAILED"),
        (_outcome("different", LATE), None, "FAILED"),
    ],
)
def test_status(outcome: Outcome, expected: Expectation | None, status: str) -> None:
    assert status_of(outcome, expected) == status


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(_outcome("same"), "FIXED"), (_outcome("known", EARLY), "KNOWN"), (_outcome("different", EARLY), "FAILED")],
)
def test_a_saved_failure_fails_until_it_is_fixed(outcome: Outcome, status: str) -> None:
    assert failure_status_of(outcome) == status


def test_keeping_a_failure_twice_keeps_it_once(tmp_path: Path) -> None:
    outcome = _outcome("different", EARLY)
    failure = failure_of(outcome, vllm="0.29.0", release="0.29.0", connector=None, seed=1, case=2)
    case, is_new = keep(failure, tmp_path, why="the reason")
    assert is_new
    assert case.path.name == "selection-law4-starts_early-full.yaml"
    assert load_case(case.path).why == "the reason"
    assert load_case(case.path).expect == {"0.29.0": Expectation("different", (Fault(*EARLY.fault),))}
    again, is_new = keep(failure, tmp_path)
    assert not is_new
    assert again.path == case.path
    failure.release = "0.30.0"
    assert not keep(failure, tmp_path)[1]
    assert set(load_case(case.path).expect) == {"0.29.0", "0.30.0"}


def test_a_fault_of_changed_code_is_kept_as_what_the_release_must_not_do(tmp_path: Path) -> None:
    outcome = _outcome("different", EARLY)
    failure = failure_of(outcome, vllm="current", release="0.32.0", connector="mine.py", seed=1, case=2)
    case, is_new = keep(failure, tmp_path)
    assert is_new
    assert load_case(case.path).expect == {"0.32.0": Expectation("same")}
    assert not keep(failure, tmp_path)[1]


def test_two_faults_are_two_cases(tmp_path: Path) -> None:
    for finding in (EARLY, LATE):
        outcome = _outcome("different", finding)
        keep(failure_of(outcome, vllm="0.29.0", release="0.29.0", connector=None, seed=1, case=2), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_bad_case_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("why: x\nexpect:\n  0.29.0: {verdict: perhaps}\nscenario: {}\n")
    with pytest.raises(ScenarioError, match=r"bad\.yaml"):
        find_cases([tmp_path])

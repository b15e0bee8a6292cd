"""Campaigns: nothing found is lost, whatever happens, and failures come in groups with one command each."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from diff_tests.behaviours import TABLE
from diff_tests.campaign import REPEAT_EVERY, Campaign, Plan, Summary, prepare_folder
from diff_tests.failures import load_failure
from diff_tests.loading import load_scenario
from diff_tests.run import run_on
from diff_tests.vllm_target.target import Target
from sim.scenario import Add, check


@pytest.fixture(autouse=True)
def _sound(target: Target) -> Iterator[None]:
    """No test leaves a defect behind."""
    yield
    target.defect = None


def _campaign(target: Target, folder: Path, **settings: object) -> Campaign:
    plan = Plan(seed=1, folder=folder, **settings)  # type: ignore[arg-type]
    return Campaign(plan, target, target.info)


def test_an_unmodified_release_passes_and_its_fills_are_judged(target: Target, tmp_path: Path) -> None:
    summary = _campaign(target, tmp_path, cases=600).run()
    assert summary.verdict == "pass", [report.first.message for report in summary.faults.values()]
    assert summary.num_cases == 600
    assert summary.coverage.counts["preemptions"]
    assert all(summary.coverage.counts[name] for name, behaviour in TABLE.items() if behaviour.needs_worker)


def test_failures_are_saved_grouped_and_reduced(target: Target, tmp_path: Path) -> None:
    target.defect = "drop_last_selected"
    summary = _campaign(target, tmp_path, cases=60).run()
    assert summary.verdict == "fail"
    report = next(r for r in summary.faults.values() if r.first.law == 5)
    assert report.num_cases > 1
    failure = load_failure(report.failure_path)
    assert failure.seed == 1
    assert failure.case == report.first_case
    assert failure.release == target.info.rules.release
    assert failure.predicted is not None or failure.scenario["driver"] == "direct"
    assert failure.observed
    assert report.reduced_path is not None
    small = load_scenario(report.reduced_path)
    check(small)
    assert len(small.groups) == 1
    assert shlex.split(report.command) == ["kvoracle", "run", str(report.reduced_path)]
    assert report.fault in {f.fault for f in run_on(target, small).new_findings}
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert len(saved["findings"]) == len(summary.faults)


def test_ctrl_c_keeps_what_was_found(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"

    def interrupt(summary: Summary) -> None:
        if summary.faults:
            raise KeyboardInterrupt

    summary = _campaign(target, tmp_path, cases=500).run(interrupt)
    assert summary.interrupted
    assert 0 < summary.num_cases < 500
    assert all(report.failure_path.exists() for report in summary.faults.values())
    assert json.loads((tmp_path / "summary.json").read_text())["interrupted"]


def test_a_child_killed_in_the_middle_costs_nothing(target: Target, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(summary: Summary) -> None:
        if summary.num_cases == 20 and not killed:
            assert target.pid is not None
            killed.append(target.pid)
            os.kill(target.pid, signal.SIGKILL)

    lost_before = target.lost
    summary = _campaign(target, tmp_path, cases=60).run(kill)
    assert killed
    assert summary.num_cases == 60
    assert target.lost - lost_before == summary.lost == 1
    assert summary.verdict == "pass"


def test_a_run_folder_holds_one_run(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"
    _campaign(target, tmp_path, cases=20).run()
    (tmp_path / "notes.txt").write_text("mine")
    assert list(tmp_path.glob("failures/*.json"))
    prepare_folder(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes.txt"]


def test_time_is_a_bound(target: Target, tmp_path: Path) -> None:
    summary = _campaign(target, tmp_path, seconds=1.0).run()
    assert 1.0 <= summary.seconds < 5.0
    assert summary.num_cases > 20


def test_a_history_that_changes_when_repeated_is_a_finding(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 10: every so many cases one runs twice."""
    run_many = target.run_many
    seen: list[object] = []

    def forgetful(scenarios: object) -> Iterator[object]:
        for scenario, history in run_many(scenarios):  # type: ignore[arg-type]
            repeated = bool(seen) and seen[-1] is scenario
            seen.append(scenario)
            yield scenario, history[:-1] if repeated else history

    monkeypatch.setattr(target, "run_many", forgetful)
    summary = _campaign(target, tmp_path, cases=REPEAT_EVERY).run()
    (report,) = summary.faults.values()
    assert report.fault[:3] == ("schedule", 10, "not_repeatable")


def test_the_same_seed_finds_the_same_faults(target: Target, tmp_path: Path) -> None:
    target.defect = "free_order"
    first = _campaign(target, tmp_path / "one", cases=40).run()
    second = _campaign(target, tmp_path / "two", cases=40).run()
    assert {f: r.num_cases for f, r in first.faults.items()} == {f: r.num_cases for f, r in second.faults.items()}
    assert first.faults


def test_the_reduced_prefix_case_of_0_29_is_tiny(tmp_path: Path) -> None:
    from diff_tests.tests.conftest import started

    target = started("0.29.0")
    plan = Plan(seed=1, folder=tmp_path, vllm="0.29.0", cases=250)
    summary = Campaign(plan, target, target.info).run()
    causes = {(fault.kind, fault.cause, fault.group_kind) for fault in summary.faults}
    assert ("selection", "starts_early", "full") in causes, "prefix selection"
    assert any(cause == "null_selected" for _, cause, _ in causes), "null blocks"
    assert any(cause == "wrong_layers" for _, cause, _ in causes), "group routing"
    assert any(kind == "circular" for _, _, kind in causes), "circular filling"
    assert any(cause == "wrong_block_size" for _, cause, _ in causes), "geometry under DCP"
    prefix = next(r for f, r in summary.faults.items() if (f.cause, f.group_kind) == ("starts_early", "full"))
    assert prefix.reduced_path is not None
    small = load_scenario(prefix.reduced_path)
    assert len(small.groups) == 1
    assert small.engine.blocks <= 6
    assert sum(isinstance(step, Add) for step in small.steps) == 2

"""Campaigns: nothing found is lost, whatever happens, and failures come in groups with one command each."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diff_tests.behaviours import TABLE
from diff_tests.campaign import CASES_PER_SHARE, Campaign, Plan, Shares, Summary
from diff_tests.cli import progress_line, run_cli
from diff_tests.connector_edits import EDITS
from diff_tests.failures import load_failure
from diff_tests.loading import load_scenario
from diff_tests.mutants import installed_source
from diff_tests.run import run_on
from diff_tests.shard import Cases
from diff_tests.vllm_target import wire
from diff_tests.vllm_target.target import Target
from sim.releases import Rules
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
    summary = _campaign(target, tmp_path, cases=170).run()
    assert summary.verdict == "pass", [report.first.message for report in summary.faults.values()]
    assert summary.num_cases == 170
    assert summary.coverage.counts["preemptions"]
    assert all(summary.coverage.counts[name] for name, behaviour in TABLE.items() if behaviour.needs_worker)


@pytest.mark.parametrize(("edit", "expected"), [(None, 0), ("start_at_block_0", 1), ("last_block_dropped", 1)])
def test_the_canary(target: Target, tmp_path: Path, edit: str | None, expected: int) -> None:
    """The command fails on a connector with a planted defect, and passes on the same connector without it."""
    source = installed_source(target, "DecodeBenchConnector")
    path = tmp_path / "connector.py"
    path.write_text(EDITS[edit].applied_to(source) if edit else source)
    words = [
        "fuzz",
        "--connector",
        str(path),
        "--cases",
        "64",
        "--seed",
        "1",
        "--jobs",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    assert run_cli(words) == expected
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert found["verdict"] == ("fail" if expected else "pass")
    assert found["cases"] == 64


DEADLY = """
import os, signal, time

class Deadly(DecodeBenchConnector):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.num_prompt_tokens == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.num_prompt_tokens == HANGS:
            time.sleep(600)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

DecodeBenchConnector = Deadly
"""


def _lengths_of_first_prompts(cases: Cases, rules: Rules) -> list[int]:
    """The first prompts of two of a campaign's cases that ask the connector under test, of different lengths in tokens."""
    lengths: dict[int, None] = {}
    for index in range(64):
        scenario = cases.case(index, rules)
        adds = [step for step in scenario.steps if isinstance(step, Add)]
        if scenario.driver == "scheduler" and scenario.connector is not None and scenario.connector.name != "scripted":
            lengths |= dict.fromkeys(sum(span.count for span in add.prompt) for add in adds[:1])
    return list(lengths)[:2]


def test_what_kills_its_child_or_hangs_is_a_finding_and_the_campaign_goes_on(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "deadly.py"
    kills, hangs = _lengths_of_first_prompts(Cases(1), target.info.rules)
    path.write_text(f"{installed_source(target, 'DecodeBenchConnector')}\nKILLS, HANGS = {kills}, {hangs}\n{DEADLY}")
    plan = Plan(seed=1, folder=tmp_path / "run", connector=str(path), cases=64, jobs=2, max_reduce_seconds=1.0)
    with Target(connector=str(path), timeout_s=2.5) as deadly:
        summary = Campaign(plan, deadly, deadly.info).run()
    assert summary.num_cases == 64
    assert {"crash", "hang"} <= {fault.kind for fault in summary.faults}
    assert all(report.failure_path.exists() for report in summary.faults.values())
    assert any("killed by signal 9" in report.first.message for report in summary.faults.values())


SLOW = """
import time

class Slow(DecodeBenchConnector):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        time.sleep(0.4)

DecodeBenchConnector = Slow
"""


def test_each_case_has_the_time_limit_for_itself(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(f"{installed_source(target, 'DecodeBenchConnector')}\n{SLOW}")
    with Target(connector=str(path), timeout_s=1.5) as slow:
        slow.start()
        started = time.monotonic()
        (message,) = slow.run_cases(Cases(1), 0, 24)
        assert time.monotonic() - started > 2 * 1.5
    assert isinstance(message, wire.CasesDone)
    assert message.num_cases == 24
    assert slow.lost == 0


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
        if not killed:
            assert target.pid is not None
            killed.append(target.pid)
            os.kill(target.pid, signal.SIGKILL)

    lost_before = target.lost
    summary = _campaign(target, tmp_path, cases=170).run(kill)
    assert killed
    assert summary.num_cases == 170
    assert target.lost - lost_before == summary.lost <= 1  # none, if the child was between two shares
    assert summary.verdict == "pass"


def test_a_seed_starts_anew_in_its_folder_and_leaves_the_rest(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"
    first = _campaign(target, tmp_path, cases=CASES_PER_SHARE).run()
    assert first.faults
    (tmp_path / "notes.txt").write_text("mine")
    target.defect = None
    other = Campaign(Plan(seed=2, folder=tmp_path, cases=CASES_PER_SHARE), target, target.info).run()
    assert other.verdict == "pass"
    assert list(tmp_path.glob("failures/case-1-*.json")), "campaigns with other seeds share the folder"
    _campaign(target, tmp_path, cases=CASES_PER_SHARE).run()
    assert not list(tmp_path.glob("failures/*.json"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_jobs_find_the_same_as_one(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"
    one, two = (_campaign(target, tmp_path / str(jobs), cases=150, jobs=jobs).run() for jobs in (1, 2))
    assert {f: (r.num_cases, r.first_case) for f, r in one.faults.items()} == {
        f: (r.num_cases, r.first_case) for f, r in two.faults.items()
    }
    assert one.coverage.plain() == two.coverage.plain()
    assert one.num_cases == two.num_cases == 150
    names = [sorted(path.name for path in (tmp_path / jobs / "failures").iterdir()) for jobs in "12"]
    assert names[0] == names[1]


def test_an_interrupted_campaign_goes_on_where_it_stopped(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"

    def interrupt(summary: Summary) -> None:
        if summary.num_cases >= 2 * CASES_PER_SHARE:
            raise KeyboardInterrupt

    first = _campaign(target, tmp_path / "parts", cases=150).run(interrupt)
    assert first.interrupted
    assert first.num_cases < 150
    resumed = _campaign(target, tmp_path / "parts", cases=150, resume=True).run()
    whole = _campaign(target, tmp_path / "whole", cases=150).run()
    assert resumed.num_cases == 150
    assert resumed.coverage.plain() == whole.coverage.plain()
    assert {f: (r.num_cases, r.first_case) for f, r in resumed.faults.items()} == {
        f: (r.num_cases, r.first_case) for f, r in whole.faults.items()
    }


def test_sigterm_ends_with_a_summary_and_the_command_goes_on(target: Target, tmp_path: Path) -> None:
    words = ["fuzz", "--cases", "100000", "--seed", "1", "--jobs", "2", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "diff_tests.cli", *words], stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "state-1.json").exists():  # written with the first share that is through
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"interrupted; what was found is in {tmp_path}" in " ".join(output.split())
    ended = json.loads((tmp_path / "summary.json").read_text())
    assert ended["interrupted"]
    num_more = ended["cases"] + CASES_PER_SHARE
    assert run_cli(["fuzz", "--resume", str(tmp_path), "--cases", str(num_more)]) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["cases"] == num_more


def test_progress_says_how_fast_what_was_found_and_how_much_was_seen(target: Target, tmp_path: Path) -> None:
    target.defect = "leak_reference"
    summary = _campaign(target, tmp_path, cases=32, max_reduce_seconds=0.1).run()
    line = progress_line(summary)
    assert line.startswith(f"32 cases, {32 / summary.seconds:.0f}/s, faults: divergence: ")
    assert "law 1: 1" in line
    num_seen = sum(count > 0 for count in summary.coverage.counts.values())
    assert line.endswith(f", {num_seen} of {len(summary.coverage.counts)} behaviours")


def test_shares_cover_every_case_once_also_after_a_restart() -> None:
    shares = Shares(100)
    first = shares.take()
    shares.take()
    assert first is not None
    shares.finish(first)
    later = Shares(100)
    later.restore(shares.done)
    taken = [first]
    while (share := later.take()) is not None:
        taken.append(share)
    assert [case for share in taken for case in range(*share)] == list(range(100))
    assert later.is_done(0)
    assert not later.is_done(CASES_PER_SHARE)


def test_shares_go_on_inside_one_where_the_bound_was_another() -> None:
    shares = Shares(CASES_PER_SHARE + 8)
    while (share := shares.take()) is not None:
        shares.finish(share)
    assert shares.done == [(0, CASES_PER_SHARE + 8)]
    later = Shares(3 * CASES_PER_SHARE)
    later.restore(shares.done)
    assert later.is_done(CASES_PER_SHARE + 7)
    assert not later.is_done(CASES_PER_SHARE + 8)
    taken = []
    while (share := later.take()) is not None:
        taken.append(share)
        later.finish(share)
    assert taken == [(CASES_PER_SHARE + 8, 2 * CASES_PER_SHARE), (2 * CASES_PER_SHARE, 3 * CASES_PER_SHARE)]
    assert later.done == [(0, 3 * CASES_PER_SHARE)]
    fewer = Shares(20)
    fewer.restore(shares.done)
    assert not fewer.are_left


def test_shares_that_are_not_open_yet_cannot_be_had() -> None:
    shares = Shares(100)
    shares.open_until(CASES_PER_SHARE)
    assert shares.take() == (0, CASES_PER_SHARE)
    assert shares.take(timeout_s=0.01) is None
    assert shares.are_left
    shares.open_until(2 * CASES_PER_SHARE)
    assert shares.take() == (CASES_PER_SHARE, 2 * CASES_PER_SHARE)


def test_a_full_disk_loses_nothing_that_was_found(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target.defect = "leak_reference"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("diff_tests.campaign.save", full)
    monkeypatch.setattr("diff_tests.campaign.replace_file", full)
    summary = _campaign(target, tmp_path, cases=40).run()
    assert summary.faults
    assert summary.num_cases == 40
    assert summary.unsaved["No space left on device"] >= 2


def test_time_is_a_bound(target: Target, tmp_path: Path) -> None:
    summary = _campaign(target, tmp_path, seconds=1.0).run()
    assert 1.0 <= summary.seconds < 5.0
    assert summary.num_cases > 20


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

"""A campaign on a real local Ray cluster of two workers, one of which is killed, finds what one process finds."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from diff_tests.campaign import CASES_PER_SHARE, Campaign, Plan, Summary
from diff_tests.cli import run_cli
from diff_tests.cluster import TargetSettings, run_share
from diff_tests.shard import Cases
from diff_tests.vllm_target.target import Target

ray = pytest.importorskip("ray", reason="the ray extra is not installed")

CASES = 128


def workers_at_work() -> list[int]:
    """Process IDs of Ray's workers that run a share: it names them after the task."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                name = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::run_share"):
                found.append(int(process.name))
    return found


def test_a_killed_worker_changes_nothing(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in a guided campaign, where later cases depend on what earlier ones showed."""
    monkeypatch.setattr("diff_tests.guidance.CASES_PER_ROUND", CASES_PER_SHARE)
    target.defect = "leak_reference"
    killed: list[int] = []

    def kill(summary: Summary) -> None:
        at_work = workers_at_work()
        if at_work and not killed:
            killed.append(at_work[0])
            os.kill(at_work[0], signal.SIGKILL)

    try:
        plans = [
            Plan(seed=1, folder=tmp_path / name, cases=CASES, jobs=2, ray=address, max_reduce_seconds=1.0, guided=True)
            for name, address in (("here", None), ("cluster", ""))
        ]
        here = Campaign(plans[0], target, target.info).run()
        there = Campaign(plans[1], target, target.info).run(kill)
    finally:
        target.defect = None
    assert killed
    assert there.num_cases == here.num_cases == CASES
    assert here.faults
    assert {f: (r.num_cases, r.first_case) for f, r in there.faults.items()} == {
        f: (r.num_cases, r.first_case) for f, r in here.faults.items()
    }
    assert there.coverage.plain() == here.coverage.plain()


def test_a_worker_takes_in_the_contracts_from_outside() -> None:
    settings = TargetSettings("current", None, None, None, ("nowhere.to_be_found:Contract",))
    with pytest.raises(ValueError, match=r"nowhere\.to_be_found:Contract"):
        run_share(settings, Cases(seed=1), (0, 1))


def test_no_cluster_at_an_address_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fuzz", "--cases", "1", "--ray", "nonsense://here", "--out", str(tmp_path)]
    assert run_cli(words) == 2
    assert "--ray nonsense://here: no cluster there" in capsys.readouterr().err

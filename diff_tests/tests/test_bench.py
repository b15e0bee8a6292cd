"""The benchmark measures what it says. Bounds here are far from what is measured, so that a busy machine passes."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from diff_tests import bench, cli
from diff_tests.bench import (
    HistoryError,
    Measure,
    append_figures,
    document,
    earlier_values,
    growth_measure,
    measure_building,
    measure_campaign,
    measure_model,
    print_measures,
)
from diff_tests.growth_bench import SERIES, Series, exponent, measure_growth
from diff_tests.power_bench import BUGGY_RELEASE, BUGS, MOST_CASES, measure_bug_sights
from diff_tests.probe_bench import measure_probe_cost
from diff_tests.tests.conftest import started
from diff_tests.vllm_target.target import Target
from diff_tests.workload.race import RaceError, race
from diff_tests.workload.report import origin


def test_the_model_is_faster_than_the_scheduler_step_for_step(target: Target) -> None:
    found = measure_model(target, target.info.rules, num_requests=4, num_blocks=1000, num_steps=40)
    assert found.kept, found


def test_building_a_large_model_costs_next_to_nothing(target: Target) -> None:
    assert measure_building(target.info.rules).kept


def test_campaign_speed_counts_both_processes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CASES_PER_BATCH", 20)
    monkeypatch.setattr(bench, "NUM_BATCHES", 2)
    rate, ratio = measure_campaign(target)
    assert rate.value > 10
    assert 1.0 < ratio.value < 5.0


def test_the_child_times_every_step_after_the_warm_up(target: Target) -> None:
    seconds = target.step_times(bench.decoding(4, 1000), 3, 10)
    assert len(seconds) == 10
    assert all(0 < s < 1 for s in seconds)


def test_verification_is_held_against_a_copy_of_the_same_memory() -> None:
    measures = bench.measure_memory("cpu", num_bytes=1 << 24)
    assert [m.at_least for m in measures] == [0.6, None]
    assert all(0.01 < m.value < 10 for m in measures), measures


def test_the_probe_costs_an_engine_next_to_nothing(target: Target) -> None:
    cost = measure_probe_cost("current", num_rounds=1, num_requests=20)
    assert 0 < cost.without[0] < 60
    assert 0.3 < cost.with_probe[0] / cost.without[0] < 2


def test_no_cuda_device_is_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_has_cuda", lambda: False)
    assert cli.run_cli(["bench", "--only", "memory", "--device", "cuda"]) == cli.BAD_INPUT
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "kept"), [(2.9, False), (3.0, True)])
def test_a_missed_promise_is_said(target: Target, value: float, kept: bool) -> None:
    found = Measure("speed", value, "times", at_least=3.0)
    assert found.kept is kept
    assert document([found], target.info)["verdict"] == ("pass" if kept else "fail")
    assert Measure("cost", 5.0 - value, "times", at_most=2.0).kept is kept


def test_the_bugs_of_0_29_0_are_seen_soon() -> None:
    started(BUGGY_RELEASE)
    figures = measure_bug_sights(num_seeds=1)
    assert [figure.name for figure in figures] == list(BUGS)
    assert all(figure.missed == 0 and 0 < figure.num_cases < MOST_CASES for figure in figures)
    assert all(0 < figure.seconds < 60 for figure in figures)


def test_a_trace_is_replayed_beside_the_other_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}
    trace.write_text(f"{json.dumps(row)}\n" * 20_000)
    other = tmp_path / "kvcache-simulator"
    other.write_text(
        f"#!{sys.executable}\nimport sys, time\nlast = time.process_time() + len(open(sys.argv[3]).readlines()) / 1e6\n"
        "while time.process_time() < last: pass\n"
    )
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = race(trace, num_rounds=1)
    assert found.theirs > found.their_start > 0
    assert found.ours > found.our_start > 0
    assert found.ratio == pytest.approx((found.theirs - found.their_start) / (found.ours - found.our_start))
    other.write_text(f"#!{sys.executable}\nraise SystemExit('no such budget')\n")
    with pytest.raises(RaceError, match="kvcache-simulator failed: no such budget"):
        race(trace, num_rounds=1)


def test_a_race_needs_the_other_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RaceError, match="not on PATH"):
        race(tmp_path / "trace.jsonl", num_rounds=1)


def test_the_trace_and_its_part_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["bench", "--only", "workload"]) == cli.BAD_INPUT
    assert "--trace" in capsys.readouterr().err


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    sizes = (1, 2, 4, 8, 16)
    assert exponent(sizes, [3.0 * size**power for size in sizes]) == pytest.approx(power)
    dear_start = [100.0 if size == 1 else 3.0 * size**power for size in sizes]
    assert exponent(sizes, dear_start) == pytest.approx(power)


@pytest.mark.parametrize("series", SERIES, ids=lambda series: series.name)
def test_the_cost_of_growing_cases_is_measured(series: Series, target: Target) -> None:
    small = series._replace(sizes=series.sizes[:3])
    assert all(after == 2 * before for before, after in zip(series.sizes, series.sizes[1:], strict=False))
    growth = measure_growth(target, small, num_rounds=1)
    assert len(growth.judging) == len(growth.real) == 3
    assert all(0 < seconds < 10 for seconds in growth.judging + growth.real)
    assert growth_measure(growth).value < 3


def test_figures_are_kept_and_a_slowdown_shows(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    assert earlier_values(path, target.info.version) == {}
    made_by = origin("0.32.0", ["bench"])
    for rate, cost in ((250.0, 1.2), (200.0, 1.3), (190.0, 1.4)):
        measures = [Measure("speed", rate, "cases/s", at_least=150), Measure("cost", cost, "times", at_most=1.6)]
        append_figures(path, measures, target.info, made_by)
    earlier = earlier_values(path, target.info.version)
    assert earlier == {"speed": [250.0, 200.0, 190.0], "cost": [1.2, 1.3, 1.4]}
    assert earlier_values(path, "another") == {}
    for rate, cost, worse in ((160.0, 1.57, 2), (170.0, 1.5, 0)):
        console = Console(record=True, width=150)
        measures = [Measure("speed", rate, "cases/s", at_least=150), Measure("cost", cost, "times", at_most=1.6)]
        print_measures(console, measures, target.info, earlier)
        text = console.export_text()
        assert re.search(r"speed +\d+ +cases/s +at least 150 +200", text)
        assert text.count("WORSE") == worse
    path.write_bytes(path.read_bytes() + b"{}\n")
    with pytest.raises(HistoryError, match="line 4 is no figures"):
        earlier_values(path, target.info.version)
    with pytest.raises(HistoryError, match="cannot be written"):
        earlier_values(tmp_path / "no" / "f", target.info.version)

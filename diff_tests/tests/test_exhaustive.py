"""The small scope: its size is known beforehand, every case of it is valid and met once, and a part of it is even."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from diff_tests.campaign import Campaign, Plan
from diff_tests.cli import cli, run_cli
from diff_tests.coverage import Coverage, accepted_kind_sets, kind_set
from diff_tests.exhaustive import Part, Scope
from diff_tests.run import predict
from diff_tests.vllm_target.target import Target
from sim.refusals import refusal
from sim.releases import NEWEST, RELEASES, Rules
from sim.scenario import Add, check, encode
from sim.startup import smallest_pool

RULES = RELEASES[NEWEST]


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_a_part_has_as_many_different_cases_as_it_says(num_requests: int) -> None:
    part = Part(("full",), (2,), num_requests)
    cases = [part.case(index, RULES) for index in range(len(part))]
    assert len({encode(case) for case in cases}) == len(cases) == len(part)
    assert {sum(isinstance(step, Add) for step in case.steps) for case in cases} == {num_requests}


def test_every_case_is_met_once() -> None:
    scope = Scope(RULES, ["circular", "mamba none"])
    met = Counter(encode(scope.case(number)) for number in range(len(scope)))
    assert len(met) == len(scope)


@pytest.mark.parametrize("rules", RELEASES.values(), ids=list(RELEASES))
def test_the_scope_covers_what_the_release_accepts_with_valid_cases(rules: Rules) -> None:
    scope = Scope(rules)
    assert scope.kind_sets == accepted_kind_sets(rules)
    for number in range(1500):
        case = scope.case(number)
        check(case)
        assert refusal(case, rules) is None
        assert 0 <= case.engine.blocks - smallest_pool(case, rules) <= 2


def test_a_part_of_the_scope_is_spread_evenly_over_the_kinds() -> None:
    scope = Scope(RULES)
    taken = Counter(kind_set(scope.case(number).groups) for number in range(2000))
    assert set(taken) == set(scope.kind_sets)
    assert max(taken.values()) < 8 * min(taken.values()), "pairs have three times the geometries of a kind alone"


def test_kinds_are_taken_alone_and_in_pairs() -> None:
    assert Scope(RULES, ["full", "sliding_window"]).kind_sets == [
        ("full",),
        ("sliding_window",),
        ("full", "sliding_window"),
    ]
    assert len(Scope(RULES, ["full"])) < len(Scope(RULES, ["full", "sliding_window"])) < len(Scope(RULES))


def test_the_scope_is_tight_enough_for_evictions_and_preemptions() -> None:
    scope, coverage = Scope(RULES, ["full", "sliding_window"]), Coverage(RULES)
    for number in range(1500):
        case = scope.case(number)
        coverage.add(case, predict(case, RULES) or [])
    wanted = ("evictions", "preemptions", "admissions refused for now", "resumption with a local hit", "external tokens")
    assert all(coverage.counts[name] for name in wanted)


def test_a_campaign_takes_the_scope_and_finds_what_is_wrong(target: Target, tmp_path: Path) -> None:
    scope = Scope(target.info.rules, ["full"])
    plan = Plan(seed=0, folder=tmp_path, cases=200, kinds=("full",), max_reduce_seconds=2.0)
    sound = Campaign(plan, target, target.info).run()
    assert sound.verdict == "pass"
    assert sound.document()["scope"] == {"cases": len(scope), "covered": 200}
    target.defect = "leak_reference"
    try:
        broken = Campaign(plan, target, target.info).run()
    finally:
        target.defect = None
    assert broken.verdict == "fail"
    assert all(report.failure_path.exists() and report.reduced_path for report in broken.faults.values())


def test_the_size_is_said_first_and_the_share_last(tmp_path: Path) -> None:
    words = ["fuzz", "--exhaustive", "--kinds", "circular", "--cases", "30", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, words)
    size = len(Scope(RULES, ["circular"]))
    assert f"scope: {size:,} cases over 1 kinds and pairs of kinds" in result.output
    assert f"scope: 30 of {size:,} cases" in result.output
    assert json.loads((tmp_path / "summary.json").read_text())["scope"] == {"cases": size, "covered": 30}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kinds", "full"], "only with --exhaustive"),
        (["--exhaustive", "--kinds", "full,moon"], "no kind 'moon'; known: full, mla"),
    ],
)
def test_bad_kinds_are_an_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["fuzz", *words]) == 2
    assert message in capsys.readouterr().err

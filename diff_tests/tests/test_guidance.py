"""Guided campaigns: what showed something new is kept and changed, and everybody makes the same cases of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from diff_tests import guidance
from diff_tests.bench import measure_guided
from diff_tests.campaign import CASES_PER_SHARE, Campaign, Plan, Summary
from diff_tests.cli import run_cli
from diff_tests.coverage import Coverage
from diff_tests.generate import LineageChooser, SeededChooser, case_seed, generate
from diff_tests.guidance import CASES_PER_ROUND, Guidance, Guide, behaviours_of, bits
from diff_tests.power_bench import issue_sights, measure_guidance
from diff_tests.run import predict
from diff_tests.shard import Cases, Shard
from diff_tests.vllm_target.target import Target
from sim.releases import NEWEST, rules_of
from sim.scenario import check

RULES = rules_of(NEWEST)
SEED = 5


@pytest.fixture
def broken(target: Target) -> Iterator[Target]:
    """The target with a defect, which it loses afterwards."""
    target.defect = "free_order"
    yield target
    target.defect = None


def learned(num_rounds: int, order: str = "forwards") -> Guidance:
    """What a campaign on the model has learned; the shares of each two rounds come in some order."""
    found = Guidance(SEED, len(Coverage(RULES).behaviours))
    for start in range(0, num_rounds * CASES_PER_ROUND, 2 * CASES_PER_ROUND):
        shares = []
        for first in range(start, start + 2 * CASES_PER_ROUND, CASES_PER_SHARE):
            shard = Shard(Cases(SEED, guide=found.guide(first)), RULES, lambda case: [])
            for index in range(first, first + CASES_PER_SHARE):
                scenario = shard.cases.case(index, RULES)
                shard.judge(index, scenario, predict(scenario, RULES) or [])
            shares.append(shard.seen)
        if order == "backwards":
            shares.reverse()
        for seen in shares:
            found.take(seen)
    return found


def test_what_a_case_showed_is_a_bit_a_behaviour() -> None:
    shown = np.array([True, False] * 9 + [True])
    assert behaviours_of(bits(shown), len(shown)).tolist() == list(range(0, 19, 2))


def test_a_lineage_of_one_seed_is_that_seeds_case_and_a_change_is_another_valid_one() -> None:
    num_changed = 0
    for index in range(150):
        seed = case_seed(SEED, index)
        plain = generate(SeededChooser(seed), RULES)
        assert generate(LineageChooser((seed,)), RULES) == plain
        for lineage in ((seed, index), (seed, index, 7)):
            changed = generate(LineageChooser(lineage), RULES)
            check(changed)
            assert changed == generate(LineageChooser(lineage), RULES)
            num_changed += changed != plain
    assert num_changed > 250


def test_rounds_are_learned_from_in_order_whatever_comes_first() -> None:
    forwards, backwards = learned(2), learned(2, order="backwards")
    assert forwards.num_rounds == 2
    assert not forwards.seen
    assert backwards == forwards
    assert forwards.num_open == 4 * CASES_PER_ROUND
    assert sorted(forwards.guides) == [2, 3], "what is through needs no guide"


def test_half_of_what_comes_later_changes_what_was_kept() -> None:
    found = learned(2)
    assert len(found.kept) > 100
    lineages = [found.guide(2 * CASES_PER_ROUND).lineage(SEED, index) for index in range(400)]
    assert all(lineage[-1] == case_seed(SEED, index) for index, lineage in enumerate(lineages))
    changed = [lineage for lineage in lineages if len(lineage) > 1]
    assert 150 < len(changed) < 250
    assert {lineage[:-1] for lineage in changed} <= {kept.lineage for kept in found.kept}
    assert len({lineage[0] for lineage in changed}) > 30
    assert Guide().lineage(SEED, 3) == (case_seed(SEED, 3),)


def test_rare_pairs_weigh_more() -> None:
    found = Guidance(SEED, 3)
    common, rare = bits(np.array([True, True, False])), bits(np.array([True, False, True]))
    found.take((index, rare if index == 9 else common) for index in range(CASES_PER_ROUND))
    assert [kept.lineage[0] for kept in found.kept] == [case_seed(SEED, 0), case_seed(SEED, 9)]
    first, both = found.guides[2].sums
    assert both - first > 10 * first


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guidance, "_MOST_KEPT", 50)
    assert 30 < len(learned(2).kept) <= 50


def test_what_was_learned_goes_to_disk_and_back() -> None:
    found = learned(2)
    found.take((index, random.Random(index).randbytes(25)) for index in range(300, 320))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Guidance) == found


def test_jobs_and_resumption_make_the_same_guided_campaign(
    broken: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guidance, "CASES_PER_ROUND", CASES_PER_SHARE)

    def campaign(name: str, **settings: object) -> Campaign:
        plan = Plan(seed=1, folder=tmp_path / name, cases=200, guided=True, max_reduce_seconds=0.1, **settings)  # type: ignore[arg-type]
        return Campaign(plan, broken, broken.info)

    def interrupt(summary: Summary) -> None:
        if summary.num_cases >= 3 * CASES_PER_SHARE:
            raise KeyboardInterrupt

    one, two = campaign("one").run(), campaign("two", jobs=2).run()
    assert campaign("parts").run(interrupt).interrupted
    parts = campaign("parts", resume=True).run()
    plain = Campaign(Plan(seed=1, folder=tmp_path / "plain", cases=200, max_reduce_seconds=0.1), broken, broken.info).run()
    assert one.num_cases == two.num_cases == parts.num_cases == 200
    for other in (two, parts):
        assert other.coverage.plain() == one.coverage.plain()
        assert {f: (r.num_cases, r.first_case) for f, r in other.faults.items()} == {
            f: (r.num_cases, r.first_case) for f, r in one.faults.items()
        }
    assert one.coverage.plain() != plain.coverage.plain()
    assert all(report.reduced_path is not None for report in one.faults.values())


def test_known_issues_are_sought_with_guidance_and_without() -> None:
    rules = rules_of("0.30.0")
    plain, guided = (issue_sights(rules, 1, 400, guided) for guided in (False, True))
    in_first_rounds = {issue: cases for issue, cases in plain.items() if cases <= 2 * CASES_PER_ROUND}
    assert in_first_rounds
    assert in_first_rounds.items() <= guided.items(), "nothing is learned before"
    figures = measure_guidance(rules, num_seeds=1, num_cases=200)
    assert figures
    assert all(figure.cases[0] == figure.cases[1] < 200 and figure.missed == (0, 0) for figure in figures)
    overall, *each = measure_guided(rules, num_seeds=1, num_cases=200)
    assert overall.value == 1.0
    assert [measure.value for measure in each] == [1.0] * len(figures)


def test_guidance_is_for_generated_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["fuzz", "--guided", "--exhaustive"]) == 2
    assert "--guided" in capsys.readouterr().err

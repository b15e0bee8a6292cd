"""Every rule of `sim.releases` is needed: its case in the corpus comes out otherwise where the rule is turned round.

Whether the real releases agree with their own rules in these cases is what the replay of the corpus shows.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from diff_tests.corpus import CORPUS, load_case
from diff_tests.run import predict
from oracle.compare import compare
from oracle.contracts import contract_for
from sim.history import Refusal
from sim.releases import RELEASES, Rules
from sim.scenario import Scenario

FOLDER = CORPUS / "rules"
RULES = [field.name for field in dataclasses.fields(Rules) if field.name != "release"]

# Rules without a case, and why.
EXEMPT = {
    "loads_may_restore_windows": "the first connector that restores windows came a release later, with 0.33",
}
# Releases beside a change whose other rules leave this one nothing to decide in its case.
ONE_SIDED = {
    "checkpoint_cap_includes_speculative": {"0.30.0"},
    "checkpoint_estimate_is_exact": {"0.29.0", "0.31.0"},
    "checkpoint_step_keeps_speculative": {"0.29.0"},
    "eagle_keeps_block_before_shared_prefix_end": {"0.33.0"},
    "relocation_spares_checkpoint": {"0.31.0"},
}


def _file_name(rule: str) -> str:
    return f"{rule.replace('_', '-')}.yaml"


def _releases_beside_a_change(rule: str) -> list[str]:
    """Releases whose neighbour has the rule the other way round."""
    changes = [pair for pair in pairwise(RELEASES) if getattr(RELEASES[pair[0]], rule) != getattr(RELEASES[pair[1]], rule)]
    return list(dict.fromkeys(release for pair in changes for release in pair))


def _is_otherwise(scenario: Scenario, rules: Rules, rule: str) -> bool:
    """Whether turning the rule round changes the predicted history, or what the worker is expected to write."""
    change: dict[str, Any] = {rule: not getattr(rules, rule)}
    turned = dataclasses.replace(rules, **change)
    mine, theirs = predict(scenario, rules), predict(scenario, turned)
    assert mine is not None
    assert theirs is not None
    if isinstance(mine[0], Refusal) != isinstance(theirs[0], Refusal):
        return True
    ours, others = contract_for(scenario, rules), contract_for(scenario, turned)
    if ours is not None and others is not None and ours.startup_fill() != others.startup_fill():
        return True
    return compare(mine, theirs) is not None


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in EXEMPT])
def test_turning_a_rule_round_changes_what_is_predicted(rule: str) -> None:
    scenario = load_case(FOLDER / _file_name(rule)).scenario
    expected = set(_releases_beside_a_change(rule)) - ONE_SIDED.get(rule, set())
    assert expected
    assert {release for release in expected if _is_otherwise(scenario, RELEASES[release], rule)} == expected


def test_every_rule_differs_between_some_releases() -> None:
    assert [rule for rule in RULES if not _releases_beside_a_change(rule)] == []


def test_no_case_stands_for_a_rule_that_is_gone() -> None:
    names = {path.name for path in FOLDER.iterdir()}
    assert names == {_file_name(rule) for rule in RULES if rule not in EXEMPT}

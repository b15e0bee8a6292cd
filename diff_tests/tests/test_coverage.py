"""What is counted is what happened; a predicted history counts as an observed one does."""

from __future__ import annotations

from typing import Any

import pytest

from diff_tests.behaviours import KINDS, TABLE
from diff_tests.coverage import (
    Coverage,
    KindCount,
    accepted_kind_sets,
    can_hit,
    kind_set,
    kind_sets,
    refusal_of_kinds,
    sample_groups,
)
from diff_tests.generate import SeededChooser, case_seed, generate
from diff_tests.run import predict
from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.target import Target
from diff_tests.walk import Walk, kind_of
from sim.history import History
from sim.releases import NEWEST, RELEASES
from sim.scenario import Scenario

RULES = RELEASES[NEWEST]
NEEDS_WORKER = {name for name, behaviour in TABLE.items() if behaviour.needs_worker}

STATES = {"kind": "mamba", "block": 8, "mode": "align"}
WINDOW = {"kind": "sliding_window", "block": 4, "window": 5}
SMALL = {"kind": "full", "block": 4}


def counted(case: Scenario, history: History | None = None, release: str = NEWEST) -> Coverage:
    """The coverage of one case, by its prediction unless a history is given."""
    history = history or predict(case, RELEASES[release])
    assert history is not None
    coverage = Coverage(RELEASES[release])
    coverage.add(case, history)
    return coverage


def shown(case: Scenario, release: str = NEWEST) -> set[str]:
    """The behaviours of one case."""
    return {name for name, number in counted(case, release=release).counts.items() if number}


def test_a_lone_request_shows_nothing_special() -> None:
    case = scenario([add("A", ("a", 20)), {"run": 20}], connector=None)
    assert shown(case) == {
        "driver: scheduler",
        "connector: none",
        "group: full",
        "retention: ends of prompts only",
        "blocks freed to the front, without a key",
        "blocks freed to the back, with a key",
        "steps",
        "admissions",
    }


# Per behaviour that is recognised from several records: (groups, steps, settings) that show it, and a change of the steps
# after which nothing does.
CASES: dict[str, tuple[list[Any], list[Any], dict[str, Any], list[Any]]] = {
    "hit takes a block out of the free queue": (
        [SMALL],
        [add("A", ("a", 9)), {"run": 20}, add("B", ("a", 9)), {"run": 20}],
        {},
        [add("A", ("a", 9)), {"run": 20}, add("B", ("b", 9)), {"run": 20}],
    ),
    "hit shares a block in use": (
        [SMALL],
        [add("A", ("a", 9)), {"step": 1}, add("B", ("a", 9)), {"run": 20}],
        {},
        [add("A", ("a", 9)), {"run": 20}, add("B", ("a", 9)), {"run": 20}],
    ),
    "hit of generated tokens": (
        [SMALL],
        [add("A", ("a", 3), max_tokens=8), {"run": 20}, add("B", ("a", 3), ("A.out", 6)), {"run": 20}],
        {},
        [add("A", ("a", 9), max_tokens=8), {"run": 20}, add("B", ("a", 9)), {"run": 20}],
    ),
    "hit chooses among several blocks": (
        [SMALL],
        [add("A", ("a", 8)), add("B", ("a", 8)), {"run": 20}, add("C", ("a", 9)), {"run": 20}],
        {},
        [add("A", ("a", 9)), add("B", ("a", 9)), {"run": 20}, add("C", ("a", 9)), {"run": 20}],
    ),
    "a request preempts itself": (
        [SMALL],
        [add("A", ("a", 9), max_tokens=8), add("B", ("b", 10), max_tokens=8), {"run": 60}],
        {"blocks": 7, "max_model_len": 20},
        [add("A", ("a", 10), max_tokens=8), add("B", ("b", 9), max_tokens=8), {"run": 60}],
    ),
    "hit inside a block": (
        [SMALL, STATES],
        [add("A", ("a", 13), max_tokens=2), {"run": 20}, add("B", ("a", 13), ("b", 5)), {"run": 20}],
        {},
        [add("A", ("a", 17), max_tokens=2), {"run": 20}, add("B", ("a", 17), ("b", 5)), {"run": 20}],
    ),
    "state copied for a hit": (
        [SMALL, STATES],
        [add("A", ("a", 13), max_tokens=2), {"run": 20}, add("B", ("a", 13), ("b", 5)), {"run": 20}],
        {},
        [add("A", ("a", 13), max_tokens=2), {"run": 20}, add("B", ("b", 18)), {"run": 20}],
    ),
    "blocks released early: sliding_window": (
        [WINDOW],
        [add("A", ("a", 9), max_tokens=8), {"run": 20}],
        {},
        [add("A", ("a", 3), max_tokens=1), {"run": 20}],
    ),
    "reset with running requests": (
        [SMALL],
        [add("A", ("a", 9)), {"step": 1}, {"reset_prefix_cache": {"running": True}}, {"run": 20}],
        {},
        [add("A", ("a", 9)), {"step": 1}, {"reset_prefix_cache": {}}, {"run": 20}],
    ),
    "abort: waiting": (
        [SMALL],
        [add("A", ("a", 9)), {"abort": "A"}],
        {},
        [add("A", ("a", 9)), {"step": 1}, {"abort": "A"}],
    ),
    "drafts accepted in part": (
        [SMALL],
        [add("A", ("a", 9), max_tokens=12), {"run": 20}],
        {"speculative": {"method": "ngram", "tokens": 2, "accept": [1]}},
        [add("A", ("a", 9), max_tokens=1), {"run": 20}],
    ),
    "step scheduled before the last one's output": (
        [SMALL],
        [add("A", ("a", 9)), {"run": 20}],
        {"async_scheduling": True},
        [add("A", ("a", 9), max_tokens=1), {"run": 20}],
    ),
    "priorities: a later arrival goes first": (
        [SMALL],
        [
            {"add": {"id": "A", "prompt": [["a", 9]], "priority": 1}},
            {"add": {"id": "B", "prompt": [["b", 9]]}},
            {"step": 1},
        ],
        {"policy": "priority", "max_num_seqs": 1},
        [
            {"add": {"id": "A", "prompt": [["a", 9]]}},
            {"add": {"id": "B", "prompt": [["b", 9]], "priority": 1}},
            {"step": 1},
        ],
    ),
    "paused for new requests: the others go on": (
        [SMALL],
        [add("A", ("a", 9)), {"step": 1}, {"pause": "new"}, add("B", ("b", 9)), {"step": 1}],
        {},
        [add("A", ("a", 9)), {"step": 1}, add("B", ("b", 9)), {"step": 1}],
    ),
}


@pytest.mark.parametrize("behaviour", CASES)
def test_what_happened_is_seen_and_what_did_not_is_not(behaviour: str) -> None:
    groups, steps, settings, others = CASES[behaviour]
    assert behaviour in shown(scenario(steps, groups, connector=None, **settings))
    assert behaviour not in shown(scenario(others, groups, connector=None, **settings))


def test_a_behaviour_that_a_release_does_not_have_is_not_asked_of_it() -> None:
    oldest = Coverage(RELEASES["0.29.0"])
    assert "long-prefill threshold off for a lone request" not in oldest.counts
    assert "long-prefill threshold off for a lone request" in Coverage(RULES).at_zero


def test_what_stays_at_zero_is_named() -> None:
    coverage = counted(scenario([add("A", ("a", 20)), {"run": 20}], connector=None))
    assert "preemptions" in coverage.at_zero
    assert "steps" not in coverage.at_zero
    assert "exceptions" not in coverage.at_zero, "nobody promises them"
    assert "full: preemptions" in coverage.kinds_at_zero
    assert "full: cases" not in coverage.kinds_at_zero
    assert "circular: hits" not in coverage.kinds_at_zero, "impossible"


def test_kinds_are_counted_alone_and_in_pairs() -> None:
    steps = [add("A", ("a", 9)), {"run": 20}, add("B", ("a", 9)), {"run": 20}]
    coverage = counted(scenario(steps, [SMALL, WINDOW, SMALL], connector=None))
    assert coverage.kinds[("full", "sliding_window")] == KindCount(cases=1, hits=1)
    assert ("full",) not in coverage.kinds


def test_every_kind_has_a_sample_and_some_release_accepts_it() -> None:
    accepted = {kinds for rules in RELEASES.values() for kinds in accepted_kind_sets(rules)}
    for kind in KINDS:
        (group,) = sample_groups((kind,))
        assert kind_of(group) == kind
        assert kind_set([group, group]) == (kind,)
    assert {kind for kinds in accepted for kind in kinds} == set(KINDS)
    assert all(
        refusal_of_kinds(kinds, RULES) is not None for kinds in set(kind_sets(RULES)) - set(accepted_kind_sets(RULES))
    )
    assert can_hit(("full", "circular"))
    assert not can_hit(("circular",))


def test_counts_of_two_parts_add_up() -> None:
    cases = [_generated(i) for i in range(60)]
    whole, parts = Coverage(RULES), [Coverage(RULES), Coverage(RULES)]
    for number, (case, history) in enumerate(cases):
        whole.add(case, history)
        parts[number % 2].add(case, history)
    parts[0].merge(parts[1])
    assert parts[0].counts == whole.counts
    assert parts[0].kinds == whole.kinds
    assert parts[0].refusals == whole.refusals


def _generated(index: int) -> tuple[Scenario, History]:
    """A generated case that the model predicts."""
    case = generate(
        SeededChooser(case_seed(5, index)), RULES, ("several_groups", "tight_pool", "sharing", "resets", "refused")
    )
    history = predict(case, RULES)
    assert history is not None
    return case, history


def test_a_prediction_counts_as_the_real_run_does(target: Target) -> None:
    """So that the promise over many cases can be held by the model alone."""
    rules = target.info.rules
    cases = [generate(SeededChooser(case_seed(3, i)), rules) for i in range(250)]
    predicted, observed = Coverage(rules), Coverage(rules)
    for case, history in target.run_many(cases):
        forecast = predict(case, rules)
        if forecast is not None:
            predicted.add(case, forecast)
            observed.add(case, history)
    assert predicted.counts["preemptions"] > 0
    assert {n: c for n, c in predicted.counts.items() if n not in NEEDS_WORKER} == {
        n: c for n, c in observed.counts.items() if n not in NEEDS_WORKER
    }
    assert predicted.kinds == observed.kinds
    assert predicted.refusals == observed.refusals


def test_the_walk_knows_prefixes_as_cached_keys_name_them() -> None:
    """The keys that the walk derives from the prompts are those of the history."""
    steps = [
        add("A", ("a", 9)),
        {"run": 20},
        add("B", ("a", 6), ("b", 4)),
        {"run": 20},
        add("C", ("a", 6), ("b", 4)),
        {"run": 20},
    ]
    case = scenario(steps, [SMALL], connector=None)
    walk = Walk(case, RULES)
    for _ in walk.follow(predict(case, RULES) or []):
        pass
    first, second, third = walk.lives
    assert walk.num_common(first, second) == 6
    assert {walk.key(0, first, 4), walk.key(0, first, 8), walk.key(0, third, 8)} <= walk.keys.keys()
    assert walk.key(0, second, 4) == (0, 0, 4)
    assert walk.key(0, third, 8) == (0, 1, 8)

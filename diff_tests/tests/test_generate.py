"""The generator: valid input only, the same for the same seed, and the whole space within reach."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diff_tests.generate import FEATURES, KINDS, HypothesisChooser, SeededChooser, case_seed, generate, label
from oracle.contracts import contract_for
from sim.geometry import page_bytes
from sim.refusals import refusal
from sim.releases import NEWEST, RELEASES, Rules
from sim.scenario import Add, Circular, Direct, LoadDone, Mamba, Pause, Scenario, Schedule, check, dump, loads
from sim.simulator import Simulator
from sim.startup import smallest_pool

NUM_CASES = 1500


def _cases(release: str = NEWEST, num_cases: int = NUM_CASES) -> list[Scenario]:
    return [generate(SeededChooser(case_seed(7, i)), RELEASES[release]) for i in range(num_cases)]


@st.composite
def scenarios(draw: st.DrawFn, release: str) -> Scenario:
    return generate(HypothesisChooser(draw), RELEASES[release])


@pytest.mark.parametrize("release", RELEASES)
def test_every_case_is_valid_and_refused_only_on_purpose(release: str) -> None:
    rules = RELEASES[release]
    num_refused = 0
    for scenario in _cases(release, 600):
        check(scenario)
        num_refused += refusal(scenario, rules) is not None
    assert 0 < num_refused < 30
    others = tuple(name for name in FEATURES if name != "refused")
    for i in range(600):
        assert refusal(generate(SeededChooser(i), rules, others), rules) is None


def test_the_same_seed_gives_the_same_cases_and_another_seed_others() -> None:
    assert _cases(num_cases=50) == _cases(num_cases=50)
    assert _cases(num_cases=50) != [generate(SeededChooser(case_seed(8, i)), RELEASES[NEWEST]) for i in range(50)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data(), st.sampled_from(list(RELEASES)))
def test_hypothesis_explores_the_same_space(data: st.DataObject, release: str) -> None:
    scenario = data.draw(scenarios(release))
    check(scenario)
    assert loads(dump(scenario)) == scenario


def test_every_feature_and_kind_turns_up() -> None:
    cases = _cases()
    engines = [scenario.engine for scenario in cases]
    kinds = {label(group) for scenario in cases for group in scenario.groups}
    assert kinds == set(KINDS) - {"mamba all"}  # the newest release has it no more
    seen = {
        "direct driver": any(s.driver == "direct" for s in cases),
        "no connector": any(s.connector is None for s in cases),
        "mixed blocks": any(len({g.block for g in s.groups}) > 1 for s in cases),
        "dcp 2 and 4": {1, 2, 4} <= {e.dcp for e in engines},
        "caching off": any(not e.prefix_caching for e in engines),
        "chunked prefill off": any(not e.chunked_prefill for e in engines),
        "dense and interval": {True, False} == {e.retention_interval is None for e in engines}
        and any(e.retention_interval for e in engines),
        "gate off": any(not e.reserve_full_isl for e in engines),
        "watermark": any(e.watermark for e in engines),
        "long prefill": any(e.long_prefill_token_threshold for e in engines),
        "kernel blocks": any(g.kernel_block for s in cases for g in s.groups),
        "fp8": any(g.dtype.startswith("fp8") for s in cases for g in s.groups),
        "asynchronous": any(e.async_scheduling for e in engines),
        "priorities": any(e.policy == "priority" for e in engines),
        "drafts": {"ngram", "draft_model", "eagle"} <= {e.speculative.method for e in engines if e.speculative},
        "a speculator's group": any(g.draft for s in cases for g in s.groups),
        "KV events": any(e.kv_events for e in engines),
        "adaptive threshold": any(e.long_prefill_adaptive for e in engines),
        "prefill interval": any(e.prefill_schedule_interval > 1 for e in engines),
        "match unit": any(e.prefix_match_unit for e in engines),
        "checkpoints": any(isinstance(g, Mamba) and g.checkpoint_blocks for s in cases for g in s.groups),
        "halves": any(isinstance(step, Schedule) for s in cases for step in s.steps),
        "pauses": {"new", "all", "none"} <= {step.what for s in cases for step in s.steps if isinstance(step, Pause)},
        "scripted": any(step.external for s in cases for step in s.steps if isinstance(step, Add)),
        "loads that arrive later": any(isinstance(step, LoadDone) for s in cases for step in s.steps),
        "embeddings": any(step.embeds for s in cases for step in s.steps if isinstance(step, Add)),
        "an encoder": any(step.encoder for s in cases for step in s.steps if isinstance(step, Add)),
        "skipping the cache": any(step.skip_cache for s in cases for step in s.steps if isinstance(step, Add)),
        "id used again": any(_repeats_id(s) for s in cases),
        "output quoted": any(_quotes_output(s) for s in cases),
    }
    assert [name for name, holds in seen.items() if not holds] == []


def _repeats_id(scenario: Scenario) -> bool:
    ids = [step.id for step in scenario.steps if isinstance(step, Add)]
    return len(set(ids)) < len(ids)


def _quotes_output(scenario: Scenario) -> bool:
    return any(span.stream.endswith(".out") for step in scenario.steps if isinstance(step, Add) for span in step.prompt)


def test_features_can_be_switched_off() -> None:
    only = tuple(name for name in FEATURES if name not in ("direct", "connector", "several_groups"))
    for i in range(200):
        scenario = generate(SeededChooser(i), RELEASES[NEWEST], only)
        assert scenario.driver == "scheduler"
        assert scenario.connector is None
        assert len(scenario.groups) == 1


def test_pools_reach_down_to_the_smallest_and_sometimes_below() -> None:
    distances: Counter[str] = Counter()
    for scenario in _cases():
        if scenario.driver == "scheduler":
            difference = scenario.engine.blocks - smallest_pool(scenario, RELEASES[NEWEST])
            distances["below" if difference < 0 else "smallest" if difference == 0 else "above"] += 1
    assert all(distances[name] > 20 for name in ("below", "smallest", "above"))


@pytest.mark.parametrize("rules", RELEASES.values(), ids=list(RELEASES))
def test_no_id_is_used_again_while_its_request_is_alive(rules: Rules) -> None:
    cases = [s for s in _cases(rules.release, 500) if s.driver == "scheduler" and refusal(s, rules) is None]
    assert sum(_repeats_id(scenario) for scenario in cases) > 10
    for scenario in cases:
        _run_with_distinct_ids(scenario, rules)


def _run_with_distinct_ids(scenario: Scenario, rules: Rules) -> None:
    contract = contract_for(scenario, rules)
    simulator = Simulator(scenario, rules, contract.rule() if contract is not None else None)
    scheduler = simulator.scheduler
    add = scheduler.add

    def checked_add(step: Add) -> Any:
        alive = {request.id for queue in (scheduler.running, scheduler.waiting, scheduler.aside) for request in queue}
        assert step.id not in alive | set(scheduler.ended_loads), dump(scenario)
        return add(step)

    scheduler.add = checked_add  # type: ignore[assignment, method-assign]
    simulator.history()


@pytest.mark.parametrize("rules", RELEASES.values(), ids=list(RELEASES))
def test_hand_made_tables_are_what_an_allocator_gives(rules: Rules) -> None:
    cases = [generate(SeededChooser(i), rules, ("direct", "several_groups", "mixed_blocks")) for i in range(2000)]
    for scenario in cases:
        held: list[int] = []
        for step in scenario.steps:
            if isinstance(step, Direct):
                for group, table in zip(scenario.groups, step.tables, strict=True):
                    blocks = [block_id for block_id in table if block_id]
                    held += blocks
                    assert table[: len(table) - len(blocks)] == (0,) * (len(table) - len(blocks))
                    assert not isinstance(group, Circular) or len(table) == 1
                    # The state after the computed tokens, and one more where the next token starts a block.
                    assert not isinstance(group, Mamba) or len(blocks) - group.speculative_blocks in (1, 2)
        assert len(set(held)) == len(held)


def test_kernel_blocks_divide_blocks_of_equal_pages_only() -> None:
    for scenario in _cases():
        if any(group.kernel_block is not None for group in scenario.groups):
            pages = {page_bytes(group) for group in scenario.groups if not isinstance(group, Mamba)}
            assert len(pages) == 1
            assert all(group.kernel_block is None for group in scenario.groups if isinstance(group, Mamba))

"""The reducer: hard cases shrink to the minimum that is known for them."""

from __future__ import annotations

import time

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diff_tests.generate import HypothesisChooser, SeededChooser, generate
from diff_tests.reduce import reduce
from sim.history import Scheduled
from sim.releases import NEWEST, RELEASES
from sim.scenario import Add, ChunkedLocal, Direct, Run, Scenario, SlidingWindow, check, loads
from sim.simulator import Simulator

RULES = RELEASES[NEWEST]


def _records(scenario: Scenario) -> list[Scheduled]:
    return [record for record in Simulator(scenario, RULES).history() if isinstance(record, Scheduled)]


def _model_cases(num_cases: int) -> list[Scenario]:
    features = ("several_groups", "mixed_blocks", "sharing", "tight_pool", "phases", "aborts", "small_budget", "salts")
    return [generate(SeededChooser(i), RULES, features) for i in range(num_cases)]


def _has_hit(scenario: Scenario) -> bool:
    return any(num_tokens for record in _records(scenario) for num_tokens in record.hits.values())


def _has_preemption(scenario: Scenario) -> bool:
    return any(record.preempted for record in _records(scenario))


def test_a_local_hit_needs_two_requests_one_group_and_a_handful_of_blocks() -> None:
    # Chunks before the one that matters count as hit without anybody having had them.
    cases = [s for s in _model_cases(160) if not any(isinstance(group, ChunkedLocal) for group in s.groups)]
    failing = [scenario for scenario in cases if _has_hit(scenario)][:6]
    assert failing
    for scenario in failing:
        small = reduce(scenario, _has_hit).scenario
        adds = [step for step in small.steps if isinstance(step, Add)]
        assert len(adds) == 2
        assert len(small.groups) == 1
        assert small.groups[0].block == 1
        assert small.engine.blocks <= 5
        assert max(add.num_prompt_tokens for add in adds) <= 2
        assert len(small.steps) <= 4


def test_a_preemption_needs_a_tiny_pool_and_at_most_two_requests() -> None:
    failing = [scenario for scenario in _model_cases(200) if _has_preemption(scenario)][:4]
    assert failing
    for scenario in failing:
        small = reduce(scenario, _has_preemption).scenario
        assert sum(isinstance(step, Add) for step in small.steps) <= 2
        assert len(small.groups) == 1
        assert small.engine.blocks <= 4


def test_settings_go_back_to_their_defaults_unless_they_matter() -> None:
    def is_window_of_two_or_more(scenario: Scenario) -> bool:
        return any(isinstance(group, SlidingWindow) and group.window >= 2 for group in scenario.groups)

    scenario = loads("""
kvoracle: 1
engine: {blocks: 90, max_model_len: 77, max_num_seqs: 3, watermark: 0.25, dcp: 2, chunked_prefill: false}
connector: {name: DecodeBenchConnector, extra: {fill_mean: 2.0}}
groups:
  - {kind: full, block: 16, layers: 3, dtype: float16}
  - {kind: sliding_window, block: 12, window: 40, kernel_block: 6}
steps:
  - add: {id: Q, prompt: [[z, 5]], salt: x}
  - run: 9
""")
    small = reduce(scenario, is_window_of_two_or_more).scenario
    expected = loads("""
kvoracle: 1
engine: {blocks: 2}
connector: null
groups: [{kind: sliding_window, block: 1, window: 2}]
steps: []
""")
    assert small == expected


def test_hand_made_tables_shrink_and_are_numbered_from_one() -> None:
    def starts_inside_a_block(scenario: Scenario) -> bool:
        block = scenario.groups[0].block
        return block > 1 and any(isinstance(s, Direct) and s.local % block for s in scenario.steps)

    scenario = loads("""
kvoracle: 1
driver: direct
engine: {blocks: 50}
connector: {name: DecodeBenchConnector}
groups: [{kind: full, block: 16}, {kind: sliding_window, block: 16, window: 20}]
steps:
  - direct: {id: K, num_tokens: 70, local: 21, tables: [[9, 8, 7, 6, 5], [0, 0, 4, 3, 2]]}
  - step: 2
""")
    small = reduce(scenario, starts_inside_a_block).scenario
    (direct,) = [step for step in small.steps if isinstance(step, Direct)]
    assert direct == Direct(id="A", num_tokens=2, local=1, tables=((1,),))
    assert small.groups[0].block == 2
    assert len(small.groups) == 1


def test_time_and_tries_are_bounds() -> None:
    scenario = _model_cases(1)[0]

    def slow(_: Scenario) -> bool:
        time.sleep(0.01)
        return False

    started = time.monotonic()
    assert not reduce(scenario, slow, max_seconds=0.2).complete
    assert time.monotonic() - started < 2
    few = reduce(scenario, lambda s: True, max_tries=5)
    assert few.tries <= 5
    assert not few.complete


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_only_valid_scenarios_are_tried_and_the_result_still_fails(data: st.DataObject) -> None:
    scenario = data.draw(st.composite(lambda draw: generate(HypothesisChooser(draw), RULES))())

    def fails(candidate: Scenario) -> bool:
        check(candidate)
        return len(candidate.steps) >= 2 and not isinstance(candidate.steps[0], Run)

    if fails(scenario):
        assert fails(reduce(scenario, fails, max_tries=150).scenario)

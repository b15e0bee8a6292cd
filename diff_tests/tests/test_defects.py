"""Broken on purpose: each planted defect is caught, and named for what it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from diff_tests.generate import SeededChooser, case_seed, generate
from diff_tests.run import Outcome, run_on
from diff_tests.vllm_target.target import Target
from sim.pool import BlockPool
from sim.scenario import loads

TWO_REQUESTS = loads("""
kvoracle: 1
engine: {blocks: 30, max_model_len: 256}
connector: {name: DecodeBenchConnector}
groups:
  - {kind: full, block: 16}
  - {kind: sliding_window, block: 16, window: 32}
steps:
  - add: {id: A, prompt: [[sys, 60]], max_tokens: 4}
  - run: 50
  - add: {id: B, prompt: [[sys, 40], [b, 30]], max_tokens: 4}
  - run: 50
""")


@pytest.fixture(autouse=True)
def _sound(target: Target) -> Iterator[None]:
    """No test leaves a defect behind."""
    yield
    target.defect = None


def _with_defect(target: Target, defect: str) -> Outcome:
    target.defect = defect
    return run_on(target, TWO_REQUESTS)


def _first(outcome: Outcome) -> tuple[str, int | None, str]:
    finding = outcome.new_findings[0]
    return finding.kind, finding.law, finding.cause


def test_nothing_is_found_without_a_defect(target: Target) -> None:
    assert run_on(target, TWO_REQUESTS).verdict == "same"


def test_two_blocks_swapped_in_the_models_free_order(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def swapped(self: BlockPool, block_ids: list[int]) -> None:
        ordered = list(block_ids)
        ordered[:2] = ordered[1::-1]
        release(self, ordered)

    monkeypatch.setattr(BlockPool, "release", swapped)
    # Without keys all blocks go to the head of the queue, so that a swap shows at once.
    scenario = replace(TWO_REQUESTS, engine=replace(TWO_REQUESTS.engine, prefix_caching=False))
    outcome = run_on(target, scenario)
    assert _first(outcome) == ("pool", None, "free_queue")
    assert "free queue" in outcome.new_findings[0].message


def test_a_fill_after_the_forward_pass_that_reads_it(target: Target) -> None:
    outcome = _with_defect(target, "late_fill")
    assert _first(outcome) == ("fill", 11, "forward_before_fill")
    assert outcome.new_findings[0].step == 1


def test_the_last_selected_block_gets_lost_on_the_way_to_the_worker(target: Target) -> None:
    outcome = _with_defect(target, "drop_last_selected")
    finding = next(f for f in outcome.new_findings if f.law == 5)
    assert finding.kind == "routing"
    assert finding.request == "A"
    assert finding.group == 1


def test_one_byte_written_outside_the_selection(target: Target) -> None:
    outcome = _with_defect(target, "write_outside")
    finding = next(f for f in outcome.new_findings if f.law == 6)
    assert finding.kind == "fill"
    assert "29" in finding.message, "the block that was written must be named"


def test_a_leaked_reference(target: Target) -> None:
    outcome = _with_defect(target, "leak_reference")
    by_law = next(f for f in outcome.new_findings if f.law == 1)
    assert by_law.kind == "pool"
    assert any(f.law is None and f.kind == "pool" for f in outcome.new_findings), "the model must see it too"


@pytest.mark.parametrize("defect", ["leak_reference", "drop_last_selected", "write_outside", "free_order"])
def test_generated_cases_find_each_defect(target: Target, defect: str) -> None:
    target.defect = defect
    scenarios = (generate(SeededChooser(case_seed(3, i)), target.info.rules) for i in range(60))
    found = sum(bool(run_on(target, scenario).new_findings) for scenario in scenarios)
    assert found >= 10

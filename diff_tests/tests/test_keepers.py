"""Connectors that keep content outside the KV cache: vLLM's own keep their contracts, single edits of them do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from diff_tests.connector_edits import KEEPER_EDITS, KEEPER_FILES, edited_checkout
from diff_tests.run import Outcome, run_on
from diff_tests.tests.conftest import started
from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.releases import installed_version
from diff_tests.vllm_target.target import Target
from sim.history import Failure, Move, Scheduled
from sim.releases import RELEASES
from sim.scenario import Scenario

EXAMPLE = {"name": "ExampleConnector"}
OFFLOADING = {"name": "OffloadingConnector", "extra": {"cpu_bytes_to_use": 1 << 18}}  # 64 slots of 4 KiB


def _files(**engine: object) -> Scenario:
    """A's prompt is stored; X's is another; B begins like A's and is given that by its file."""
    steps = [
        add("A", ("p", 15), max_tokens=2),
        {"run": 20},
        {"reset_prefix_cache": {}},
        add("X", ("x", 10), max_tokens=1),
        {"run": 20},
        add("B", ("p", 12), ("b", 3), max_tokens=2),
        {"run": 20},
    ]
    return scenario(steps, [{"kind": "full", "block": 4}], EXAMPLE, blocks=30, max_model_len=64, **engine)


def _slots(**engine: object) -> Scenario:
    """A fills slots, ends, and its blocks go to others; B is given A's tokens, and C those that B goes on with."""
    steps = [
        add("A", ("p", 30), max_tokens=6),
        {"run": 20},
        {"reset_prefix_cache": {}},
        add("X", ("x", 40), max_tokens=2),
        {"run": 20},
        add("B", ("p", 24), ("b", 9), max_tokens=9),
        {"step": 2},
        add("C", ("p", 24), ("b", 9), ("c", 1), max_tokens=2),
        {"run": 40},
    ]
    groups = [{"kind": "full", "block": 8}, {"kind": "sliding_window", "block": 8, "window": 12}]
    return scenario(steps, groups, OFFLOADING, blocks=16, max_model_len=64, **engine)


def _reused_at_once() -> Scenario:
    """The pool is so small that a block goes to another request while its store is under way."""
    steps = [
        add("A", ("a", 17), max_tokens=1),
        add("B", ("b", 17), max_tokens=1),
        add("C", ("c", 17), max_tokens=1),
        {"run": 30},
    ]
    groups = [{"kind": "full", "block": 4}]
    return scenario(steps, groups, OFFLOADING, blocks=7, max_model_len=24, max_num_seqs=1)


def _moves(outcome: Outcome, what: str) -> list[Move]:
    steps = [record.moves for record in outcome.observed if isinstance(record, Scheduled) and record.moves is not None]
    return [move for moves in steps for move in getattr(moves, what)]


@pytest.mark.parametrize("release", RELEASES)
def test_files_hold_what_they_are_named_for(release: str) -> None:
    outcome = run_on(started(release), _files())
    assert outcome.verdict == "same", outcome.new_findings
    assert outcome.predicted is not None
    (load,) = _moves(outcome, "loads")
    assert load.request == "B"
    assert outcome.notes == []


@pytest.mark.parametrize("release", RELEASES)
def test_slots_hold_what_is_loaded_from_them(release: str) -> None:
    for case in (_slots(), _slots(async_scheduling=True), _reused_at_once()):
        outcome = run_on(started(release), case)
        assert outcome.verdict == "same", outcome.new_findings
        assert outcome.predicted is not None
        assert _moves(outcome, "stores")
        assert bool(_moves(outcome, "loads")) == (case.engine.blocks == 16)


def test_a_store_hurries_before_its_block_is_another_s() -> None:
    steps = [record.moves for record in run_on(started(), _reused_at_once()).observed if isinstance(record, Scheduled)]
    assert any(moves is not None and moves.hurried for moves in steps)


def test_of_a_prompt_that_ends_with_a_block_the_file_has_another_name() -> None:
    """vLLM stores 16 of 17 tokens, but looks for 12; what it finds there it takes for the 16."""
    steps = [add("A", ("p", 15), max_tokens=1), {"run": 20}, add("B", ("p", 17), max_tokens=1), {"run": 20}]
    case = scenario(steps, [{"kind": "full", "block": 4}], EXAMPLE, blocks=30, max_model_len=64, prefix_caching=False)
    outcome = run_on(started(), case)
    assert {finding.cause for finding in outcome.new_findings} >= {"ends_late", "never_stored"}
    end = outcome.observed[-1]
    assert isinstance(end, Failure)
    assert "FOLDER/" in end.message
    assert run_on(started(), case).observed == outcome.observed


@pytest.mark.parametrize("name", KEEPER_EDITS)
def test_a_single_edit_is_found(name: str, tmp_path: Path) -> None:
    started()
    connector = name.partition("_")[0]
    case = _files() if connector == "example" else _reused_at_once() if name.endswith("hurries") else _slots()
    folder = edited_checkout(tmp_path, KEEPER_FILES[connector], KEEPER_EDITS[name])
    with Target(str(folder), as_release=installed_version()) as target:
        outcome = run_on(target, case)
    assert {finding.cause for finding in outcome.new_findings} & KEEPER_EDITS[name].causes, outcome.new_findings
    assert {finding.law for finding in outcome.new_findings} & {4}

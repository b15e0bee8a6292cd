"""Law 4 for connectors that keep content: what is stored, and what is brought back. Moves are written out by hand."""

from __future__ import annotations

import pytest

from oracle.contracts.offloading import Offloading
from oracle.laws import judge
from oracle.tests.histories import RULES, scenario, scheduled
from sim.connector import GivenAnswers
from sim.history import History, Move, Moves, Scheduled, Selection
from sim.scenario import Scenario
from sim.simulator import Simulator

# A's blocks 1 and 2 are stored; B is given their tokens in step 3, in blocks of its own.
CASE = scenario(
    "{blocks: 9, max_model_len: 32}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[p, 9]], max_tokens: 1}}, {step: 1}, {reset_prefix_cache: {}}, "
    "{add: {id: X, prompt: [[x, 9]], max_tokens: 1}}, {step: 1}, "
    "{add: {id: B, prompt: [[p, 8], [b, 1]], max_tokens: 1}}, {run: 9}]",
    "{name: OffloadingConnector}",
)
STORE = Move("A", 0, [1, 2], ["0", "1"], 0)


def history(loads: list[Move], stores: list[Move], answered: int = 8, hurried: tuple[int, ...] = ()) -> History:
    """What the model says, with these moves: stores in step 1, loads in step 3."""
    answers = GivenAnswers([("A", 0, 0), ("X", 0, 0), ("B", 0, answered)], loads_later=True, requires_kv_delivery=False)
    records = Simulator(CASE, RULES, answers, arrived={3: ["B"]}).history()
    for record in records:
        if isinstance(record, Scheduled):
            record.moves = Moves()
            record.selected = {}
    scheduled(records, 1).moves = Moves(stores=stores)
    scheduled(records, 2).moves = Moves(hurried=list(hurried))
    scheduled(records, 3).moves = Moves(loads=loads)
    scheduled(records, 3).selected = {"B": Selection([[block for move in loads for block in move.blocks]], None)}
    return records


def causes(records: History, case: Scenario = CASE) -> list[str]:
    return [finding.cause for finding in judge(case, records, RULES, Offloading(case, RULES)) if finding.law == 4]


def table_of_b() -> list[int]:
    tables = scheduled(history([], []), 3).tables
    assert tables is not None
    return tables["B"][0]


def test_each_block_comes_from_where_its_tokens_were_stored() -> None:
    assert causes(history([Move("B", 0, table_of_b()[:2], ["0", "1"], 1)], [STORE])) == []


@pytest.mark.parametrize(
    ("blocks", "places", "expected"),
    [
        ((0, 1), ["1", "0"], ["wrong_content"]),
        ((0, 1), ["0", "7"], ["never_stored"]),
        ((0,), ["0"], ["ends_early"]),
        ((1,), ["1"], ["starts_late"]),
        ((), [], ["missing_block"]),
    ],
)
def test_a_load_of_something_else(blocks: tuple[int, ...], places: list[str], expected: list[str]) -> None:
    table = table_of_b()
    assert causes(history([Move("B", 0, [table[i] for i in blocks], places, 1)], [STORE])) == expected


def test_a_store_of_what_is_not_there() -> None:
    whole = [Move("B", 0, table_of_b()[:2], ["0", "1"], 1)]
    in_part = causes(history(whole, [Move("A", 0, [3, 2], ["0", "1"], 0)]))
    assert in_part == ["stored_unwritten", "store_overtaken", "wrong_content"]  # without a key it is X's in the next step
    assert causes(history(whole, [Move("A", 0, [0, 2], ["0", "1"], 0)])) == ["stored_unwritten", "wrong_content"]
    assert causes(history(whole, [Move("X", 0, [1, 2], ["0", "1"], 0)])) == []  # who is gone cannot be told from others


@pytest.mark.parametrize(("hurried", "expected"), [((), ["store_overtaken"]), ((0,), [])])
def test_a_block_that_another_gets_while_its_store_is_under_way(hurried: tuple[int, ...], expected: list[str]) -> None:
    small = scenario(
        "{blocks: 4, max_model_len: 12}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[p, 9]], max_tokens: 1}}, {step: 1}, "
        "{add: {id: X, prompt: [[x, 9]], max_tokens: 1}}, {step: 1}]",
        "{name: OffloadingConnector}",
    )
    answers = GivenAnswers([], loads_later=True, requires_kv_delivery=False)
    records = Simulator(small, RULES, answers).history()
    scheduled(records, 1).moves = Moves(stores=[STORE])
    scheduled(records, 2).moves = Moves(hurried=list(hurried))
    assert causes(records, small) == expected


def test_fewer_than_no_tokens() -> None:
    assert "negative_external" in causes(history([], [STORE], answered=-4))

"""The first divergence, named by kind, cause, request, group and position."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oracle.compare import compare
from oracle.tests.histories import RULES, history_of, scenario, scheduled
from sim.history import Acted, Failure, History, Refusal, Scheduled, Start, StateRecord, Updated, pack, unpack
from sim.simulator import Simulator

CASE = scenario(
    "{blocks: 20, max_model_len: 64}",
    "[{kind: full, block: 4}, {kind: sliding_window, block: 4, window: 6}]",
    "[{add: {id: A, prompt: [[s, 9]], max_tokens: 3}}, {add: {id: B, prompt: [[s, 8], [b, 3]], max_tokens: 3}}, "
    "{step: 2}, {abort: B}, {run: 20}]",
    "null",
)

CONNECTED = scenario(
    "{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]", "[{add: {id: A, prompt: [[a, 9]]}}, {run: 9}]"
)


def updated(history: History, step: int) -> Updated:
    return next(record for record in history if isinstance(record, Updated) and record.step == step)


def test_equal_histories() -> None:
    assert compare(history_of(CASE), history_of(CASE)) is None


def test_state_left_out_is_what_it_was() -> None:
    """One side says everything in every record, the other only what changed."""
    sparse = Simulator(CASE, RULES).history()
    assert any(isinstance(record, Updated) and record.free is None for record in sparse)
    assert compare(sparse, history_of(CASE)) is None
    assert compare(history_of(CASE), sparse) is None
    last = next(record for record in reversed(sparse) if isinstance(record, StateRecord) and record.free)
    assert isinstance(last, StateRecord)
    assert last.free is not None
    last.free = [*last.free[1:], last.free[0]]
    assert compare(sparse, history_of(CASE)) is not None


def test_what_one_side_does_not_see_is_skipped() -> None:
    blind = history_of(CASE)
    assert isinstance(blind[0], Start)
    blind[0].sees = ("tables",)
    for record in blind:
        if isinstance(record, StateRecord):
            record.free = record.refs = record.keys = None
        if isinstance(record, Scheduled):
            record.asked = None
    assert compare(history_of(CASE), blind) is None
    assert compare(blind, history_of(CASE)) is None


def test_what_the_connector_did_is_not_predicted() -> None:
    case = CONNECTED
    without = history_of(case)
    for record in without:
        if isinstance(record, Scheduled):
            record.selected = record.received = record.written = None
    assert compare(without, history_of(case)) is None


def _swap_requests(history: History) -> None:
    record = scheduled(history, 2)
    record.scheduled = dict(reversed(record.scheduled.items()))


def _set(step: int, field: str, value: object) -> Callable[[History], None]:
    return lambda history: setattr(scheduled(history, step), field, value)


def _table(history: History) -> None:
    tables = scheduled(history, 2).tables
    assert tables is not None
    tables["B"][1][2] = 17


def _lost_table(history: History) -> None:
    tables = scheduled(history, 2).tables
    assert tables is not None
    del tables["B"]


def _swap_free(history: History) -> None:
    free = scheduled(history, 1).free
    assert free is not None
    free[2], free[3] = free[3], free[2]


def _leak(history: History) -> None:
    refs = updated(history, 2).refs
    assert refs is not None
    refs[4] += 1


def _key(history: History) -> None:
    keys = scheduled(history, 1).keys
    assert keys is not None
    keys.pop(0)


def _finished(history: History) -> None:
    updated(history, 3).finished = []


def _geometry(history: History) -> None:
    assert isinstance(history[0], Start)
    history[0].hash_block_size = 8


def _result(history: History) -> None:
    last = history[-1]
    assert isinstance(last, Acted)
    last.result = "stalled"


@pytest.mark.parametrize(
    ("tamper", "kind", "cause"),
    [
        (_swap_requests, "schedule", "schedule_order"),
        (_set(2, "scheduled", {"A": 1, "B": 2}), "schedule", "scheduled_tokens"),
        (_set(1, "admitted", ["B", "A"]), "schedule", "admitted"),
        (_set(2, "resumed", ["A"]), "schedule", "resumed"),
        (_set(2, "preempted", ["A"]), "schedule", "preempted"),
        (_set(1, "hits", {"A": 0, "B": 4}), "hit", "local_hit"),
        (_set(1, "external", {"A": 0, "B": 4}), "hit", "external_tokens"),
        (_set(1, "zeroed", [3]), "allocation", "zeroed_blocks"),
        (_set(1, "copies", [(3, 4)]), "allocation", "copies"),
        (_table, "allocation", "block_table"),
        (_lost_table, "allocation", "block_table"),
        (_swap_free, "pool", "free_queue"),
        (_leak, "pool", "reference_counts"),
        (_key, "pool", "cached_keys"),
        (_finished, "schedule", "finished"),
        (_geometry, "allocation", "geometry"),
        (_result, "schedule", "result"),
    ],
)
def test_a_difference_is_found_and_named(tamper: Callable[[History], None], kind: str, cause: str) -> None:
    observed = history_of(CASE)
    tamper(observed)
    finding = compare(history_of(CASE), observed)
    assert finding is not None
    assert (finding.kind, finding.cause, finding.law) == (kind, cause, None)


def test_the_message_says_where() -> None:
    observed = history_of(CASE)
    _table(observed)
    finding = compare(history_of(CASE), observed)
    assert finding is not None
    assert (finding.request, finding.group, finding.group_kind, finding.positions) == ("B", 1, "sliding_window", [2])
    assert finding.message == (
        f"step 2: request B, group 1 (sliding_window): position 2: the model says block {finding.expected[2]}, "
        "vLLM has block 17"
    )


def test_connector_answers_are_compared() -> None:
    case = CONNECTED
    observed = history_of(case)
    scheduled(observed, 1).asked = [("A", 0, 9)]
    finding = compare(history_of(case), observed)
    assert finding is not None
    assert (finding.kind, finding.cause) == ("hit", "connector_answers")


def test_an_exception_that_was_not_foreseen() -> None:
    failure = Failure(step=2, type="ValueError", phase="schedule", message="no")
    finding = compare(history_of(CASE), [*history_of(CASE)[:3], failure])
    assert finding is not None
    assert (finding.kind, finding.cause, finding.step) == ("crash", "failure", 2)
    assert compare([failure], [failure]) is None
    other = Failure(step=2, type="KeyError", phase="schedule")
    assert compare([failure], [other]) is not None


@pytest.mark.parametrize("phase", ["worker", "connector"])
def test_an_exception_of_the_connector_is_left_to_the_laws(phase: str) -> None:
    failure = Failure(step=1, type="ValueError", phase=phase, message="no")
    assert compare(history_of(CASE), [*history_of(CASE)[:2], failure]) is None


def test_refusals() -> None:
    refusal = Refusal(type="ValueError", message="one thing")
    assert compare([refusal], [Refusal(type="ValueError", message="another")]) is None
    pairs: list[tuple[History, History]] = [
        ([refusal], history_of(CASE)),
        (history_of(CASE), [refusal]),
        ([refusal], [Refusal(type="KeyError")]),
    ]
    for predicted, observed in pairs:
        finding = compare(predicted, observed)
        assert finding is not None
        assert (finding.kind, finding.cause) == ("crash", "refusal")


def test_a_history_that_goes_on() -> None:
    finding = compare(history_of(CASE)[:-1], history_of(CASE))
    assert finding is not None
    assert finding.cause == "length"
    assert "only vLLM goes on, with run -> idle" in finding.message
    finding = compare(history_of(CASE), unpack(pack(history_of(CASE)[:-2])))
    assert finding is not None
    assert "only the model goes on" in finding.message

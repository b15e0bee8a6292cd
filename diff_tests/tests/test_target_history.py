"""What the real vLLM does with a scenario: histories of the installed release, with block IDs written out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diff_tests.tests.target_cases import DECODE_BENCH, FULL, add, scenario, three_requests
from diff_tests.vllm_target.target import Target
from sim.history import Acted, Failure, History, Refusal, Scheduled, Selection, Start, Updated, resolve
from sim.scenario import Scenario, load, parse

SHARED = list(range(1, 102))


@pytest.fixture(autouse=True)
def sound(target: Target) -> Iterator[None]:
    """No test leaves a defect behind."""
    yield
    target.defect = None


def steps_of(history: History) -> list[Scheduled]:
    return [record for record in history if isinstance(record, Scheduled)]


def written(history: History, step: int) -> list[tuple[str, str, list[int]]]:
    """(layer, state, blocks) of what was written in a step."""
    return [(entry.layer, entry.state, entry.blocks) for entry in steps_of(history)[step - 1].written or []]


def test_three_requests(target: Target) -> None:
    """The first prompt is external but for its last token; the later ones only from token 1616 on."""
    history = target.run(three_requests())
    start, first = history[0], steps_of(history)[0]
    assert isinstance(start, Start)
    assert (start.source, start.scheduler_block_size, start.hash_block_size) == ("vllm", 16, 16)
    assert start.groups[0].layers == ["g0.l0"]
    assert start.free == list(range(1, 300))
    assert (first.scheduled, first.admitted, first.hits, first.external) == ({"A": 1}, ["A"], {"A": 0}, {"A": 1620})
    assert first.asked == [("A", 0, 1620)]
    assert first.tables == {"A": [[*SHARED, 102]]}
    assert first.selected == first.received == {"A": Selection(groups=[[*SHARED, 102]], tokens=1620)}
    assert written(history, 1) == [("g0.l0", "filled", [*SHARED, 102])]
    second, third = steps_of(history)[4:6]
    assert (second.hits, second.external) == ({"B": 1616}, {"B": 4})
    assert second.selected == {"B": Selection(groups=[[102]], tokens=4)}
    assert written(history, 5) == [("g0.l0", "filled", [102])]
    assert third.tables == {"B": [[*SHARED, 102]], "C": [[*SHARED, 103]]}
    assert third.selected == {"C": Selection(groups=[[103]], tokens=4)}
    assert history[-1] == Acted(step=9, action="run", result="idle")


def test_state_is_complete(target: Target) -> None:
    """Free queue, references and keys after the first prompt was admitted, and after it was gone."""
    history = target.run(three_requests())
    states = [(record, state) for record, state in resolve(history)]
    _, admitted = states[1]
    assert admitted.free == list(range(103, 300))
    assert admitted.refs == [0] + [1] * 102 + [0] * 197
    assert admitted.keys is not None
    assert [key.blocks for key in admitted.keys] == [[block_id] for block_id in SHARED]
    assert admitted.keys[4] == (0, 0, 80, [5])
    record, gone = states[8]
    assert isinstance(record, Updated)
    assert (record.finished, record.new_tokens) == (["A"], {"A": 1})
    # The block without a key is the next to go; the others wait, the end of the prompt first.
    assert gone.free == [102, *range(103, 300), *reversed(SHARED)]
    assert gone.tables == {}


def test_same_scenario_same_history(target: Target) -> None:
    first, other, second = [history for _, history in target.run_many([three_requests(), three_requests(dcp=2)] * 2)][:3]
    assert first == second != other


def test_halves_of_a_step(target: Target) -> None:
    whole = target.run(scenario([add("A", ("a", 40)), {"step": 2}]))
    halves = target.run(scenario([add("A", ("a", 40)), *[{"schedule": 1}, {"update": 1}] * 2]))
    assert halves == whole


def test_preempted_and_resumed(target: Target) -> None:
    """Seven blocks for two requests that need four each: the younger goes, and comes back."""
    history = target.run(
        scenario(
            [add("A", ("a", 40), max_tokens=24), add("B", ("b", 40), max_tokens=24), {"run": 200}],
            connector=None,
            blocks=8,
            max_model_len=96,
        )
    )
    steps = steps_of(history)
    preempted = next(i for i, record in enumerate(steps) if record.preempted)
    assert steps[preempted].preempted == ["B"]
    assert "B" not in steps[preempted].scheduled
    resumed = [record for record in steps if record.resumed]
    assert [record.resumed for record in resumed] == [["B"]]
    assert history[-1] == Acted(step=len(steps), action="run", result="idle")


def test_abort_and_reset(target: Target) -> None:
    history = target.run(
        scenario(
            [
                add("A", ("a", 40)),
                {"step": 1},
                {"reset_prefix_cache": {}},
                {"abort": "A"},
                {"abort": "A"},
                {"reset_prefix_cache": {}},
            ],
            connector=None,
        )
    )
    acted = [(r.action, r.request, r.result) for r in history if isinstance(r, Acted)]
    assert acted == [
        ("reset_prefix_cache", None, "refused"),
        ("abort", "A", "done"),
        ("abort", "A", "gone"),
        ("reset_prefix_cache", None, "done"),
    ]
    *_, (_, state) = resolve(history)
    assert (state.tables, state.keys) == ({}, [])


def test_refusal_is_the_only_record(target: Target) -> None:
    (record,) = target.run(scenario([add("A", ("a", 40)), {"run": 10}], prefix_match_unit=8))
    assert isinstance(record, Refusal)
    assert record.type == "ValueError"
    assert "prefix_match_unit=8" in record.message


def test_exception_is_the_last_record(target: Target) -> None:
    """The connector asserts that a request's table covers its tokens."""
    history = target.run(direct([direct_step("A", 40, 0, [[1]]), {"step": 1}]))
    failure = history[-1]
    assert isinstance(failure, Failure)
    assert (failure.type, failure.phase) == ("AssertionError", "connector")
    assert failure.trail[-1] == "DecodeBenchConnectorScheduler.update_state_after_alloc"


def test_an_exception_tells_where_it_was_raised(target: Target) -> None:
    """An assertion of the scheduler without words of its own."""
    padded = load(Path(__file__).parents[1] / "known_issues" / "padded_admission_cut.yaml")
    failure = target.run(padded)[-1]
    assert isinstance(failure, Failure)
    assert (failure.phase, failure.trail, failure.message) == ("schedule", ["Scheduler.schedule"], "")
    assert failure.line.startswith("assert num_new_tokens == ")


# ---------------------------------------------------------------------------------------------------------------- memory


def test_groups_share_pages(target: Target) -> None:
    """Full attention with two layers beside a sliding window: each layer's own blocks are filled, nothing else."""
    groups = [{**FULL, "layers": 2}, {"kind": "sliding_window", "block": 16, "window": 32}]
    history = target.run(three_requests(groups=groups))
    full, window = [*SHARED, 102], [103, 104, 105]
    assert written(history, 1) == [
        ("g0.l0", "filled", full),
        ("g0.l1", "filled", full),
        ("g1.l0", "filled", window),
    ]


@pytest.mark.parametrize(
    ("dtype", "element"),
    [("bfloat16", "763c"), ("float16", "ae23"), ("float32", "8fc2753c"), ("fp8_e4m3", "08"), ("fp8_e5m2", "24")],
)
def test_element_of_each_dtype(target: Target, dtype: str, element: str) -> None:
    history = target.run(scenario([add("A", ("a", 40)), {"step": 1}], groups=[{**FULL, "dtype": dtype}]))
    entries = steps_of(history)[0].written or []
    assert [(entry.state, entry.value, entry.blocks) for entry in entries] == [("filled", element, [1, 2, 3])]


def test_circular_group_is_filled_with_zeros(target: Target) -> None:
    history = target.run(scenario([add("A", ("a", 40)), {"step": 1}], groups=[FULL, {"kind": "circular", "block": 8}]))
    entries = steps_of(history)[0].written or []
    assert [(entry.layer, entry.state, entry.value) for entry in entries] == [
        ("g0.l0", "filled", "763c"),
        ("g1.l0", "filled", "00"),
    ]


def test_startup_fill_is_judged_once(target: Target) -> None:
    connector = {**DECODE_BENCH, "extra": {"startup_fill": True}}
    history = target.run(scenario([add("A", ("a", 40)), {"step": 1}], connector=connector))
    start = history[0]
    assert isinstance(start, Start)
    assert [(entry.state, entry.blocks) for entry in start.written or []] == [("filled", list(range(300)))]
    assert steps_of(history)[0].written is None


# ---------------------------------------------------------------------------------------------------------------- direct


def direct_step(request_id: str, num_tokens: int, local: int, tables: list[list[int]]) -> dict[str, Any]:
    return {"direct": {"id": request_id, "num_tokens": num_tokens, "local": local, "tables": tables}}


def direct(steps: list[Any]) -> Scenario:
    raw = {"kvoracle": 1, "driver": "direct", "engine": {"blocks": 20}, "connector": DECODE_BENCH, "groups": [FULL]}
    return parse({**raw, "steps": steps})


def test_direct_driver_starts_inside_a_block(target: Target) -> None:
    history = target.run(direct([direct_step("A", 50, 20, [[9, 3, 0, 5]]), {"step": 1}, {"abort": "A"}, {"step": 1}]))
    first, second = steps_of(history)
    assert (first.admitted, first.hits, first.external) == (["A"], {"A": 20}, {"A": 29})
    assert first.asked == [("A", 20, 29)]
    assert first.tables == {"A": [[9, 3, 0, 5]]}
    assert first.selected == first.received == {"A": Selection(groups=[[3, 5]], tokens=29)}
    assert written(history, 1) == [("g0.l0", "filled", [3, 5])]
    assert (second.admitted, second.tables, second.selected) == ([], {}, {})


def test_direct_driver_asks_once_in_the_life_of_a_request(target: Target) -> None:
    again = direct_step("A", 50, 0, [[1, 2, 3, 4]])
    history = target.run(direct([again, {"step": 1}, again, {"step": 1}, {"abort": "A"}, again, {"step": 1}]))
    assert [record.external for record in steps_of(history)] == [{"A": 49}, {"A": 0}, {"A": 49}]


# ------------------------------------------------------------------------------------------------------- planted defects


def test_defect_leak_reference(target: Target) -> None:
    target.defect = "leak_reference"
    *_, (_, state) = resolve(target.run(three_requests()))
    assert state.refs is not None
    assert sum(state.refs) == 1
    assert state.free is not None
    assert len(state.free) == 298


def test_defect_free_order(target: Target) -> None:
    case = scenario([add("A", ("a", 40)), {"run": 10}], connector=None, prefix_caching=False)
    sound = [state.free for _, state in resolve(target.run(case))][-1]
    target.defect = "free_order"
    swapped = [state.free for _, state in resolve(target.run(case))][-1]
    assert sound is not None
    assert swapped is not None
    assert (sound[:3], swapped[:3]) == ([3, 2, 1], [2, 3, 1])


def test_defect_drop_last_selected(target: Target) -> None:
    target.defect = "drop_last_selected"
    first = steps_of(target.run(scenario([add("A", ("a", 40)), {"step": 1}])))[0]
    assert first.selected == {"A": Selection(groups=[[1, 2, 3]], tokens=39)}
    assert first.received == {"A": Selection(groups=[[1, 2]], tokens=39)}


def test_defect_write_outside(target: Target) -> None:
    target.defect = "write_outside"
    first = steps_of(target.run(scenario([add("A", ("a", 40)), {"step": 1}])))[0]
    outside = [(entry.blocks, entry.num_bytes) for entry in first.written or [] if entry.state == "outside"]
    assert outside == [([299], 1)]


# --------------------------------------------------------------------------------------------------------------- start-up


def test_startup_pool(target: Target) -> None:
    """Room for one request of 2,048 tokens, and the null block."""
    assert target.startup_pool(three_requests()) == 129
    window = {"kind": "sliding_window", "block": 16, "window": 32}
    assert target.startup_pool(three_requests(groups=[window], max_num_batched_tokens=2048)) == 130


def test_startup_pool_of_a_refused_configuration(target: Target) -> None:
    mixed = [{"kind": "mamba", "block": 16, "mode": mode} for mode in ("none", "align")]
    with pytest.raises(ValueError, match="one Mamba cache mode"):
        target.startup_pool(three_requests(groups=mixed))

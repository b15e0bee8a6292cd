"""Faults of whole groups and tensors: swapped groups in laws 4 to 6, a whole tensor, an exception that names its group."""

from __future__ import annotations

from oracle.tests.histories import filled, history_of, scenario, scheduled, verdicts
from sim.history import Failure, Selection, Written

THREE = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4, layers: 2}, {kind: sliding_window, block: 4, window: 8}, {kind: circular, block: 4}]",
    "[{add: {id: B, prompt: [[b, 9]], max_tokens: 3}}, {run: 50}]",
)
IDS = [[1, 2], [3, 4], [5]]
MEAN = "763c"


def _fault(history):
    (finding,) = verdicts(THREE, history)
    return finding.kind, finding.law, finding.cause, finding.request, finding.group


def test_law_4_and_law_5_name_groups_that_changed_places():
    history = history_of(THREE)
    record = scheduled(history, 1)
    assert record.selected == {"B": Selection(IDS, 8)}
    record.received = {"B": Selection([IDS[1], IDS[0], IDS[2]], 8)}
    record.written = filled(THREE, record.received)
    assert _fault(history) == ("routing", 5, "swapped_groups", "B", None)
    record.selected = record.received
    assert _fault(history) == ("selection", 4, "swapped_groups", "B", None)


def _written(first, second, window, ring):
    """Entries of the layers in order."""
    history = history_of(THREE)
    record = scheduled(history, 1)
    names = [(0, "g0.l0"), (0, "g0.l1"), (1, "g1.l0"), (2, "g2.l0")]
    record.written = [
        Written(group, layer, blocks, state, value, 9)
        for (group, layer), entries in zip(names, (first, second, window, ring), strict=True)
        for state, blocks, value in entries
    ]
    return history


def _right(group):
    return [("filled", IDS[group], "00" if group == 2 else MEAN)]


def _of(group):
    """What a layer shows that was written in another group's blocks instead of its own."""
    return lambda other: [("unwritten", IDS[group], None), ("outside", IDS[other], MEAN)]


def _causes(history):
    return {finding.cause for finding in verdicts(THREE, history)}


def test_law_6_groups_written_through_each_others_layers():
    assert _causes(_written(_right(0), _right(0), _right(1), _right(2))) == set()
    apart = _written(_of(0)(1), _of(0)(1), _of(1)(0), _right(2))
    assert "swapped_groups" in _causes(apart)
    shared = _written(_right(0), _of(0)(1), _right(1), _right(2))  # g0.l0 and g1.l0 are the same memory
    assert "swapped_groups" in _causes(shared)
    all_of_group_0 = _written(_right(0), _right(0), _of(1)(0), _right(2))  # every layer got group 0's blocks
    assert _causes(all_of_group_0) == {"wrong_layers"}
    window = [("wrong_value", IDS[1], "0000")]
    by_value = _written(_right(0), _right(0), window, [("wrong_value", IDS[2], MEAN)])
    assert "swapped_groups" in _causes(by_value)
    ring_only = _written(_right(0), _right(0), _right(1), [("wrong_value", IDS[2], MEAN)])
    assert _causes(ring_only) == {"wrong_value"}


def test_law_6_a_whole_tensor():
    others = [block for block in range(40) if block not in (1, 2, 3, 4, 5)]
    history = _written([*_right(0), ("outside", others, MEAN)], _right(0), _right(1), _right(2))
    assert _fault(history) == ("fill", 6, "whole_tensor", None, 0)
    history = _written([*_right(0), ("outside", others[1:], MEAN)], _right(0), _right(1), _right(2))
    assert _fault(history) == ("fill", 6, "outside_selection", None, 0)


def test_law_6_says_what_should_have_been_written():
    history = _written(_right(0), _right(0), [("wrong_value", IDS[1], "0000")], _right(2))
    (finding,) = verdicts(THREE, history)
    assert finding.message.endswith("elements 0000 instead of 763c (0.015 as bfloat16)")


def test_law_7_knows_the_kind_of_a_group_that_an_exception_names():
    history = history_of(THREE)
    for words, told in (("group=2, range=[0, 3)", "(group 2 is circular)"), ("group 9", "group 9"), ("no", "no")):
        (finding,) = verdicts(THREE, [history[0], Failure(step=1, type="AssertionError", phase="schedule", message=words)])
        assert finding.message.endswith(told)

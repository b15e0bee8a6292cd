"""A history goes through JSON lines and MessagePack unchanged; omitted state means unchanged state."""

from __future__ import annotations

import pytest

from sim.history import (
    CachedKey,
    Failure,
    Scheduled,
    Selection,
    Start,
    Updated,
    from_lines,
    pack,
    resolve,
    to_lines,
    unpack,
)

HISTORY = [
    Start(source="model", release="0.33.0", sees=("tables", "free"), tables={}, free=[1, 2]),
    Scheduled(
        step=1,
        scheduled={"B": 4, "A": 1},
        tables={"A": [[1]]},
        keys=[CachedKey(0, 0, 16, [1])],
        selected={"A": Selection([[1]], 3)},
    ),
    Updated(step=1, finished=["A"], new_tokens={"A": 1}, tables={}),
    Failure(step=2, type="ValueError", phase="schedule", message="no"),
]


def test_round_trips():
    assert from_lines(to_lines(HISTORY)) == HISTORY
    assert unpack(pack(HISTORY)) == HISTORY
    assert list(from_lines(to_lines(HISTORY))[1].scheduled) == ["B", "A"]


def test_a_bad_line_is_named():
    lines = to_lines(HISTORY).splitlines()
    lines[2] = lines[2].replace("update", "uppdate")
    with pytest.raises(ValueError, match="line 3"):
        from_lines("\n".join(lines))


def test_resolve_fills_in_what_did_not_change():
    states = [state for _, state in resolve(HISTORY)]
    assert states[1].free == [1, 2]
    assert states[2].tables == {}
    assert states[2].keys == [CachedKey(0, 0, 16, [1])]
    assert states[0].keys is None

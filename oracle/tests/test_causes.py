"""Causes: each fault by its own name, from block IDs alone."""

from __future__ import annotations

import pytest

from oracle.causes import (
    Asked,
    FillAsked,
    are_swapped,
    routing_cause,
    selection_causes,
    unwritten_cause,
    written_cause,
)

FULL = [[11, 12, 13, 14, 15, 16]]  # one group, blocks of 4 tokens
WINDOW = [[1, 2, 3, 4], [0, 0, 7, 8]]  # the second group's window has left two blocks


def slugs(asked: Asked, expected: list[int], observed: list[int]) -> list[str]:
    return [cause.slug for cause in selection_causes(asked, expected, observed)]


@pytest.mark.parametrize(
    ("observed", "cause"),
    [
        ([13, 14, 15], None),
        ([12, 13, 14, 15], "starts_early"),
        ([11, 12, 13], "starts_early"),
        ([14, 15], "starts_late"),
        ([13, 14, 15, 16], "ends_late"),
        ([13, 14], "ends_early"),
        ([13, 15], "missing_block"),
        ([], "missing_block"),
        ([11, 13, 14, 15], "extra_block"),
        ([15, 14, 13], "wrong_order"),
        ([13, 14, 14, 15], "duplicate_block"),
        ([13, 14, 99], "foreign_block"),
        ([12, 13], "wrong_block_size"),  # tokens [8, 20) in blocks of 8: positions [1, 3)
    ],
)
def test_selections_of_tokens_8_to_20(observed: list[int], cause: str | None) -> None:
    assert slugs(Asked(FULL, 0, 4, [2, 8], 8, 20), [13, 14, 15], observed) == ([cause] if cause else [])


def test_positions_and_words() -> None:
    asked = Asked(FULL, 0, 4, [2, 8], 8, 20)
    (early,) = selection_causes(asked, [13, 14, 15], [11, 12, 13])
    assert early.positions == [0, 1]
    (size,) = selection_causes(asked, [13, 14, 15], [12, 13])
    assert size.words == ", as with blocks of 8 tokens instead of 4"
    (lost,) = selection_causes(asked, [13, 14, 15], [13, 15])
    assert lost.positions == [3]


def test_positions_of_ends_and_nulls() -> None:
    asked = Asked(FULL, 0, 4, [], 8, 20)
    (late,) = selection_causes(asked, [13, 14, 15], [13, 14, 15, 16])
    assert late.positions == [5]
    (early,) = selection_causes(asked, [13, 14, 15], [13])
    assert early.positions == [3, 4]
    (begins_late,) = selection_causes(asked, [13, 14, 15], [15])
    assert begins_late.positions == [2, 3]
    (nulls,) = selection_causes(Asked(WINDOW, 1, 4, [], 0, 16), [7, 8], [0, 7, 8])
    assert nulls.positions == [0]
    (other,) = selection_causes(Asked(WINDOW, 1, 4, [], 0, 16), [7, 8], [3, 4])
    assert (other.positions, other.words) == ([2, 3], " (group 0)")
    (twice,) = selection_causes(asked, [13, 14, 15], [13, 14, 14, 15])
    assert twice.positions == [3]


def test_as_many_blocks_as_smaller_ones_would_need() -> None:
    """32 tokens are one block of 32 and two of 16."""
    asked = Asked([[1, 2, 3]], 0, 32, [16], 0, 32)
    assert slugs(asked, [1], [1, 2]) == ["wrong_block_size"]
    asked = Asked([[1, 2, 3]], 0, 32, [], 0, 32)  # nobody has such blocks
    assert slugs(asked, [1], [1, 2]) == ["ends_late"]


@pytest.mark.parametrize(
    ("observed", "causes"),
    [
        ([7, 8], []),
        ([0, 0, 7, 8], ["null_selected"]),
        ([0, 0], ["null_selected"]),
        ([0, 0, 7], ["null_selected", "ends_early"]),
        ([3, 4], ["wrong_group"]),
        ([1, 99], ["foreign_block"]),
    ],
)
def test_selections_in_a_window(observed: list[int], causes: list[str]) -> None:
    assert slugs(Asked(WINDOW, 1, 4, [], 0, 16), [7, 8], observed) == causes


def test_nothing_was_to_be_selected() -> None:
    asked = Asked(FULL, 0, 4, [], 8, 20)
    assert slugs(asked, [], [13]) == ["extra_block"]
    assert slugs(asked, [], []) == []


@pytest.mark.parametrize(
    ("received", "cause"),
    [
        ([1, 2], "missing_block"),
        ([1, 2, 9], "missing_block"),
        ([1, 2, 3, 4], "extra_block"),
        ([3, 2, 1], "wrong_order"),
        ([1, 2, 3, 3], "duplicate_block"),
    ],
)
def test_routing(received: list[int], cause: str) -> None:
    assert routing_cause([1, 2, 3], received) == cause


class TestFill:
    """Two groups: the first has kernel blocks of half a block where the test says so."""

    plain = FillAsked([[4, 5, 6], [7, 8]], [1, 1])
    split = FillAsked([[4, 5, 6], [7, 8]], [2, 1])

    def test_a_block_left_out(self) -> None:
        assert unwritten_cause(self.plain, 0, [6]) == "missing_block"

    def test_a_layer_left_out(self) -> None:
        assert unwritten_cause(self.plain, 1, [7, 8]) == "wrong_layers"

    def test_a_layer_that_got_another_groups_blocks(self) -> None:
        mixed = FillAsked([[4, 5, 0], [7, 0]], [1, 1])
        assert unwritten_cause(mixed, 1, [7]) == "wrong_layers"  # the null block was written on the other's behalf
        assert written_cause(self.plain, 1, [4, 5], "outside_selection") == ("wrong_layers", 1)

    def test_blocks_that_nobody_has(self) -> None:
        assert written_cause(self.plain, 1, [30], "outside_selection") == ("outside_selection", 1)
        assert written_cause(self.plain, 1, [7], "wrong_value") == ("wrong_value", 1)

    def test_block_ids_taken_for_rows(self) -> None:
        """Rows 4, 5 and 6 are block 2 and half of block 3."""
        assert unwritten_cause(self.split, 0, [4, 5, 6]) == "wrong_rows"
        assert written_cause(self.split, 1, [2, 3], "outside_selection") == ("wrong_rows", 0)
        assert written_cause(self.split, 1, [3], "wrong_value") == ("wrong_rows", 0)
        assert unwritten_cause(self.split, 1, [8]) == "missing_block"

    def test_rows_that_happen_to_make_a_whole_block(self) -> None:
        """Rows 2 and 3 are block 1, which is written; of block 2 only rows 4 and 5 would be missing."""
        rows = FillAsked([[1, 2, 3]], [2])
        assert unwritten_cause(rows, 0, [2, 3]) == "wrong_rows"
        assert unwritten_cause(rows, 0, [1, 2, 3]) == "wrong_layers"
        assert rows.half_written(0) == {2, 3}
        assert rows.written_as_rows(0) == {0, 1}
        assert FillAsked([[1, 2, 3]], [1]).written_as_rows(0) == set()

    def test_blocks_of_one_row(self) -> None:
        assert unwritten_cause(self.plain, 0, [4]) == "missing_block"


def test_groups_whose_blocks_are_all_there_but_in_each_others_places():
    assert are_swapped([[1, 2], [3]], [[3], [1, 2]])
    assert not are_swapped([[1, 2], [3]], [[1, 2], [3]])
    assert not are_swapped([[1, 2], [3]], [[2, 1], [3]])
    assert not are_swapped([[1, 2], [3]], [[3], [1]])


def test_no_block_at_all_points_to_a_block_size_only_with_a_reason():
    asked = Asked([[0, 0, 5]], 0, 16, [32], 0, 48)
    assert slugs(asked, [5], []) == ["missing_block"]
    (cause,) = selection_causes(asked._replace(size_words={32: "the reason"}), [5], [])
    assert cause.slug == "wrong_block_size"
    assert cause.words.endswith("blocks of 32 tokens instead of 16: the reason")

"""Why a selection or a fill is not what it should be: the most specific cause that explains what was observed.

Pure functions on block IDs. A cause is a slug that stays the same for one fault, whatever request shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from oracle.selection import NULL


class Cause(NamedTuple):
    """A cause, the table positions it concerns, and more words where the slug alone does not tell."""

    slug: str
    positions: list[int]
    words: str = ""


class Asked(NamedTuple):
    """One request's selection in one group: the tables of all groups, which is its own, the effective block size, other
    block sizes that somebody might have used instead, and the external tokens [start, end). size_words: how somebody comes
    to such a size. Sizes in tokens."""

    tables: Sequence[Sequence[int]]
    group: int
    block_size: int
    other_sizes: Sequence[int]
    start: int
    end: int
    size_words: Mapping[int, str] = {}

    @property
    def table(self) -> Sequence[int]:
        return self.tables[self.group]


def selection_causes(asked: Asked, expected: Sequence[int], observed: Sequence[int]) -> list[Cause]:
    """What is wrong with a selection; empty where nothing is. Null entries are a fault of their own: the rest is judged
    without them."""
    causes = []
    chosen = [block for block in observed if block != NULL]
    if len(chosen) < len(observed):
        nulls = [position for position, block in enumerate(asked.table) if block == NULL]
        causes.append(Cause("null_selected", nulls[: len(observed) - len(chosen)]))
        if not chosen:
            return causes  # nothing but nulls: that is why no block was chosen
    if chosen != list(expected):
        causes.append(_selection_cause(asked, expected, chosen))
    return causes


def _selection_cause(asked: Asked, expected: Sequence[int], chosen: Sequence[int]) -> Cause:
    place = {block: position for position, block in enumerate(asked.table) if block != NULL}
    strangers = [block for block in chosen if block not in place]
    if strangers:
        return _strangers(asked, strangers)
    got, wanted = [place[block] for block in chosen], [place[block] for block in expected]
    if len(set(got)) < len(got):
        return Cause("duplicate_block", sorted({position for position in got if got.count(position) > 1}))
    if set(got) == set(wanted):
        return Cause("wrong_order", got)
    # Where nothing was chosen at all, many a size would do; only one with a reason of its own counts.
    for size in asked.other_sizes if got and wanted else asked.size_words:
        if chosen == _slice(asked, size):
            reason = f": {asked.size_words[size]}" if size in asked.size_words else ""
            words = f", as with blocks of {size} tokens instead of {asked.block_size}{reason}"
            return Cause("wrong_block_size", sorted(set(got) ^ set(wanted)), words)
    if not got or not wanted:
        return Cause("extra_block", got) if got else Cause("missing_block", wanted)
    if got != [position for block, position in place.items() if got[0] <= position <= got[-1]]:
        missing = sorted(set(wanted) - set(got))
        return Cause("missing_block", missing) if missing else Cause("extra_block", sorted(set(got) - set(wanted)))
    return _shifted(got, wanted)


def _strangers(asked: Asked, strangers: Sequence[int]) -> Cause:
    """Blocks that this table does not have: another group's of the same request, or somebody else's."""
    for group, table in enumerate(asked.tables):
        if group != asked.group and all(block in table for block in strangers):
            return Cause("wrong_group", [list(table).index(block) for block in strangers], f" (group {group})")
    return Cause("foreign_block", [])


def _slice(asked: Asked, size: int) -> list[int]:
    """What a connector would choose that takes blocks for `size` tokens long."""
    entries = asked.table[asked.start // size : -(-asked.end // size)]  # from the first token's block, rounds up
    return [block for block in entries if block != NULL]


def _shifted(got: Sequence[int], wanted: Sequence[int]) -> Cause:
    """A run of positions that begins or ends at the wrong place; a wrong beginning counts first."""
    if got[0] < wanted[0]:
        return Cause("starts_early", [position for position in got if position < wanted[0]])
    if got[0] > wanted[0]:
        return Cause("starts_late", [position for position in wanted if position < got[0]])
    if got[-1] > wanted[-1]:
        return Cause("ends_late", [position for position in got if position > wanted[-1]])
    return Cause("ends_early", [position for position in wanted if position > got[-1]])


def are_swapped(right: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> bool:
    """Whether every group's blocks are there, each in its order, but in the places of other groups."""
    return list(right) != list(found) and sorted(map(list, right)) == sorted(map(list, found))


def routing_cause(sent: Sequence[int], received: Sequence[int]) -> str:
    """Why one group's blocks arrived otherwise than they were sent."""
    if set(sent) == set(received):
        return "wrong_order" if len(sent) == len(received) else "duplicate_block"
    return "extra_block" if set(sent) < set(received) else "missing_block"


class FillAsked(NamedTuple):
    """What the worker was to write: block IDs by group, and how many kernel blocks make a manager block, by group."""

    wanted: Sequence[Sequence[int]]
    rows_per_block: Sequence[int]

    def half_written(self, group: int) -> set[int]:
        """Blocks of a group that stay unwritten, at least in part, if block IDs are taken for rows of kernel blocks."""
        ids, ratio = self.wanted[group], self.rows_per_block[group]
        rows = set(ids)
        return {block for block in ids if not rows.issuperset(range(block * ratio, (block + 1) * ratio))}

    def written_as_rows(self, group: int) -> set[int]:
        """Blocks that a group with smaller kernel blocks writes into, if block IDs are taken for rows."""
        ratio = self.rows_per_block[group]
        return {row // ratio for row in self.wanted[group]} if ratio > 1 else set()  # floors: the block of the row


def unwritten_cause(fill: FillAsked, group: int, blocks: Iterable[int]) -> str:
    """Why blocks of one of the group's layers hold what they held before, though they were to be written. The layer is
    another group's business, or nobody's, if what was written of it is no more than other groups' blocks."""
    missed = set(blocks)
    if fill.rows_per_block[group] > 1 and missed <= fill.half_written(group):
        return "wrong_rows"
    others = {block for source, ids in enumerate(fill.wanted) if source != group for block in ids}
    return "wrong_layers" if set(fill.wanted[group]) - missed <= others else "missing_block"


def written_cause(fill: FillAsked, group: int, blocks: Iterable[int], otherwise: str) -> tuple[str, int]:
    """(cause, group that it comes from) of writes to blocks of one of the group's layers which nobody had asked for, or
    asked for with another value."""
    written = set(blocks)
    by_rows = [fill.written_as_rows(source) for source in range(len(fill.wanted))]
    if written <= set().union(*by_rows):
        return "wrong_rows", next(source for source, rows in enumerate(by_rows) if rows & written)
    for source, ids in enumerate(fill.wanted):
        if otherwise == "outside_selection" and source != group and written <= set(ids):
            return "wrong_layers", group
    return otherwise, group

"""Holds a list of block IDs that somebody pasted from a log against the tables: which is right, and what the others are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from diff_tests.explain.blocks import Place
from diff_tests.explain.story import Step, Story
from diff_tests.explain.words import count, names
from oracle.selection import NULL

IdKind = Literal["right", "shifted", "own", "foreign", "null", "unknown"]

_FORM = re.compile(r"(?P<request>.+):(?P<group>\d+)\s*=\s*(?P<ids>.*)", re.DOTALL)


class Pasted(NamedTuple):
    """`REQ:GROUP=[ids]`."""

    request: str
    group: int
    ids: list[int]


class Id(NamedTuple):
    """One pasted ID. shifted: it stands in the right list, `shift` places earlier. own: in the request's table, but not
    in this list. foreign: somebody else's, or nobody's. unknown: no block of this pool."""

    at: int
    block: int
    expected: int | None
    kind: IdKind
    words: str
    shift: int = 0


class Checked(NamedTuple):
    """A pasted list, held against `reference`, which `against` names. missing: right IDs that it lacks."""

    pasted: Pasted
    against: str
    reference: list[int]
    ids: list[Id]
    missing: list[int]
    headline: str

    @property
    def is_right(self) -> bool:
        """Whether it is the very list."""
        return self.pasted.ids == self.reference


def parse_pasted(text: str) -> Pasted:
    """Reads `REQ:GROUP=[1, 2, 3]`; brackets, commas and line breaks as they come. Raises ValueError that says what is
    wrong."""
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is not of the form REQUEST:GROUP=[1, 2, 3]")
    words = re.split(r"[\s,\[\]()]+", match["ids"].strip())
    ids = []
    for word in filter(None, words):
        if not re.fullmatch(r"-?\d+", word):
            raise ValueError(f"{word[:20]!r} is not a block ID")
        ids.append(int(word))
    return Pasted(match["request"], int(match["group"]), ids)


def check_pasted(story: Story, pasted: Pasted, step: int | None = None) -> Checked:
    """Holds a list against the block table and the blocks to be filled, after the step where it fits best, or `step`.

    Raises ValueError for a request, group or step that the history does not have.
    """
    if not 0 <= pasted.group < len(story.groups):
        raise ValueError(f"group {pasted.group}: there are groups 0 to {len(story.groups) - 1}")
    references = list(_references(story, pasted, step))
    if not references:
        when = f" after step {step}" if step is not None else ""
        raise ValueError(f"request {pasted.request}: holds no blocks{when}; there is {names(story.requests, 10) or 'none'}")
    against, reference, at = max(references, key=lambda candidate: _fit(pasted.ids, candidate[1]))
    ids = [_judge(story, pasted, at, reference, index) for index in range(len(pasted.ids))]
    missing = [block for block in reference if block not in pasted.ids]
    return Checked(pasted, against, reference, ids, missing, _headline(ids, reference, missing, against))


def _references(story: Story, pasted: Pasted, only: int | None) -> Iterator[tuple[str, list[int], Step]]:
    """Lists that the pasted one may stand for, the likeliest first."""
    request, group = pasted.request, pasted.group
    for number, step in story.steps.items():
        record = step.record
        if record is None or request not in step.tables or only not in (None, number):
            continue
        num_external = record.external.get(request, 0)
        if num_external and story.contract is not None:
            loads = story.contract.loads(step.tables[request], record.hits.get(request, 0), num_external)
            yield f"the blocks to be filled in step {number}", loads[group], step
        yield f"the block table after step {number}", step.tables[request][group], step


def _fit(ids: Sequence[int], reference: Sequence[int]) -> float:
    """1 for equal lists. Common IDs count for it and another length against it, so that a short list of wrong blocks is
    held against the few to be filled rather than against the table that they come from."""
    if list(ids) == list(reference):
        return 1.0
    longest = max(len(ids), len(reference))
    num_right = sum(one == other for one, other in zip(ids, reference, strict=False))
    num_common = len(set(ids) & set(reference))
    return (num_common + num_right) / (4 * longest) - abs(len(ids) - len(reference)) / (2 * longest)


def _judge(story: Story, pasted: Pasted, step: Step, reference: Sequence[int], index: int) -> Id:
    block = pasted.ids[index]
    expected = reference[index] if index < len(reference) else None
    if block == expected:
        return Id(index, block, expected, "right", "right")
    if block == NULL:
        return Id(index, block, expected, "null", "the null block")
    if block in reference:
        shift = index - reference.index(block)
        return Id(index, block, expected, "shifted", f"shifted by {shift:+d}: belongs at index {index - shift}", shift)
    if not 0 < block < story.num_blocks:
        return Id(index, block, expected, "unknown", f"no block of this pool of {story.num_blocks}")
    table = step.tables[pasted.request][pasted.group]
    if block in table:
        position = table.index(block)
        origin = story.origin(Place(pasted.request, pasted.group, position), step.number)
        words = f"{pasted.request}'s own, position {position}" + (f" ({origin.words})" if origin is not None else "")
        return Id(index, block, expected, "own", f"{words}, but not in this list")
    return Id(index, block, expected, "foreign", f"foreign: {_whose(story, block, step)}")


def _whose(story: Story, block: int, step: Step) -> str:
    holders = story.holders(block, step.number)
    if holders:
        return " and ".join(f"{h.request}'s, group {h.group}, position {h.position}" for h in holders[:3])
    owner = story.owner(block, step.number)
    return f"free, {owner}'s before" if owner is not None else "free, never used"


def _headline(ids: Sequence[Id], reference: Sequence[int], missing: Sequence[int], against: str) -> str:
    num_right = sum(item.kind == "right" for item in ids)
    if num_right == len(ids) == len(reference):
        return f"The list is right: {against}."
    shifts = {item.shift for item in ids if item.kind == "shifted"}
    words = f"{num_right} of {count(len(ids), 'ID')} right, held against {against}"
    if len(shifts) == 1:
        words += f"; shifted by {next(iter(shifts)):+d}"
    if missing:
        words += f"; missing: {', '.join(map(str, missing[:8]))}" + (", .." if len(missing) > 8 else "")
    return words + "."

"""An explanation as one self-contained page: the pool over time, the life of every block, the tables of every step.

The page asks for nothing over a network. All that comes from a scenario or a history reaches it as text: the head through
jinja2's escaping, the rest as JSON that the script shows as text only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from diff_tests.explain.actual import Checked
from diff_tests.explain.blocks import changes
from diff_tests.explain.explanation import Explanation
from diff_tests.explain.lookups import Lookup
from diff_tests.explain.story import Step, Story
from diff_tests.explain.tables import TableView, table_view
from sim.history import Tables

_FOLDER = Path(__file__).parent

STATES = ("unused", "free", "cached", "held", "shared", "deferred")
KINDS = ("taken", "hit", "copied", "computed", "selected", "written", "zeroed", "cached", "uncached", "left", "wrong")


def render(explanation: Explanation, checked: Sequence[Checked] = ()) -> str:
    """The page, as HTML text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html").render(
        explanation=explanation,
        checked=checked,
        data=page_data(explanation),
        style=Markup((_FOLDER / "page.css").read_text(encoding="utf-8")),
        script=Markup((_FOLDER / "page.js").read_text(encoding="utf-8")),
    )


def page_data(explanation: Explanation) -> dict[str, Any]:
    """What the script draws from. Requests and texts are given once, and by index from then on.

    cells: by block, [step, state, owner, ..]. lives: by block, [step, last step, kind, words]. changes: entries of block
    tables, [step, request, group, position, block, origin]; with block -1 the table ends before this position. marks: by
    "step request group", [position, block, marks, verdict, whether wrong, origin].
    """
    story = explanation.story
    requests = {name: index for index, name in enumerate(story.requests)}
    texts = _Texts()
    wrong = dict.fromkeys((t.step, row.block) for t in explanation.tables for row in t.rows if row.is_wrong and row.block)
    return {
        "numBlocks": story.num_blocks,
        "requests": list(requests),
        "groups": [{"kind": group.kind, "size": group.block_size} for group in story.groups],
        "steps": [number for number in story.steps if number],
        "timeline": {moment.step: moment.words for moment in explanation.timeline},
        "free": {number: step.num_free for number, step in story.steps.items() if step.num_free is not None},
        "cells": {block: _cells(story, block, requests) for block in range(1, story.num_blocks) if story.cells(block)},
        "lives": {block: _life(story, block) for block in range(1, story.num_blocks) if story.life(block)},
        "changes": list(_changes(story, requests, texts)),
        "texts": texts.all,
        "marks": {key: rows for step in story.steps.values() for key, rows in _marks(story, step, requests)},
        "lookups": {number: [_lookup(lookup) for lookup in step.lookups] for number, step in story.steps.items()},
        "focus": {
            "step": explanation.step,
            "requests": [requests[name] for name in explanation.requests],
            "wrong": list(wrong),
        },
    }


class _Texts:
    """Texts that many entries share, each once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._indexes: dict[str, int] = {}

    def index(self, text: str) -> int:
        if text not in self._indexes:
            self._indexes[text] = len(self.all)
            self.all.append(text)
        return self._indexes[text]


def _lookup(lookup: Lookup) -> list[Any]:
    return [lookup.request, lookup.words, [[p.group, p.alone, p.words, p.limits] for p in lookup.groups]]


def _cells(story: Story, block: int, requests: dict[str, int]) -> list[int]:
    flat: list[int] = []
    for cell in story.cells(block):
        flat += [cell.step, STATES.index(cell.state), requests.get(cell.owner or "", -1)]
    return flat


def _life(story: Story, block: int) -> list[list[Any]]:
    return [
        [
            event.step,
            event.last_step or event.step,
            KINDS.index(event.kind),
            event.words,
        ]
        for event in story.life(block)
    ]


def _changes(story: Story, requests: dict[str, int], texts: _Texts) -> Iterator[list[int]]:
    before: Tables = {}
    for number, step in story.steps.items():
        if step.record is None:
            continue
        yield from _shortened(before, step, requests)
        came, _ = changes(before, step.tables)
        for place, block, _ in came:
            origin = story.origin(place, number)
            text = texts.index(origin.words) if origin is not None else -1
            yield [number, requests[place.request], place.group, place.position, block, text]
        before = step.tables


def _shortened(before: Tables, step: Step, requests: dict[str, int]) -> Iterator[list[int]]:
    """Tables that end earlier now, or are gone: the first position that they have no more."""
    for request, tables in before.items():
        now = step.tables.get(request)
        for group, table in enumerate(tables):
            length = len(now[group]) if now is not None else 0
            if length < len(table):
                yield [step.number, requests[request], group, length, -1, -1]


def _marks(story: Story, step: Step, requests: dict[str, int]) -> Iterator[tuple[str, list[list[Any]]]]:
    record = step.record
    if record is None:
        return
    for request in dict.fromkeys([*record.external, *(record.selected or ())]):
        for group in range(len(story.groups)) if request in step.tables else ():
            view = table_view(story, step, request, group)
            if view.has_marks:
                yield f"{step.number} {requests[request]} {group}", _rows(view)


def _rows(view: TableView) -> list[list[Any]]:
    """Entries with something to say."""
    return [
        [row.position, row.block, list(row.marks), row.verdict, row.is_wrong, row.origin]
        for row in view.rows
        if row.verdict or any(row.marks)
    ]

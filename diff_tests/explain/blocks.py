"""The life of every block, and where every entry of a block table came from. Fed record by record, after the replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal, NamedTuple

from diff_tests.explain.lookups import Fate, Link, Lookups
from diff_tests.explain.words import names
from oracle.content import Content, Replay, Stay
from oracle.findings import token_range
from oracle.selection import NULL
from sim.history import Acted, CachedKey, Scheduled, State, StateRecord, Tables, Updated, Written

EventKind = Literal[
    "taken", "hit", "copied", "computed", "selected", "written", "zeroed", "cached", "uncached", "left", "wrong"
]


@dataclass(slots=True)
class Event:
    """One thing that happened to a block, in words. last_step: where it went on for several steps."""

    step: int
    kind: EventKind
    words: str
    request: str | None = None
    group: int | None = None
    last_step: int | None = None


CellState = Literal["unused", "free", "cached", "held", "shared", "deferred"]
"""unused: never held. free: no key. cached: free, and its key may still be hit. shared: held by several requests.
deferred: held by nobody, and not free before a step in flight is processed."""


class Cell(NamedTuple):
    """A block after scheduling, from one step on. owner: whose tokens it holds, or held last."""

    step: int
    state: CellState
    owner: str | None
    group: int | None


OriginKind = Literal["fresh", "reused", "evicted", "shared", "null", "copy", "moved"]


class Origin(NamedTuple):
    """Where the block of a table entry came from, from one step on."""

    step: int
    kind: OriginKind
    words: str


class Place(NamedTuple):
    """An entry of a block table."""

    request: str
    group: int
    position: int


class Change(NamedTuple):
    """An entry that came or went. other: what is there now, or was there before; -1 for nothing."""

    place: Place
    block: int
    other: int


class _Writing:
    """Tokens that one request computes into a block, step by step; one event as long as they follow each other."""

    __slots__ = ("end", "event", "start", "stay")

    def __init__(self, stay: Stay, start: int, end: int, event: Event) -> None:
        self.stay, self.start, self.end, self.event = stay, start, end, event


class BlockLives:
    """lives: by block ID, its events in order. cells: by block ID, its states. links: the prefix cache as it stands."""

    def __init__(self, replay: Replay, lookups: Lookups, is_hand_made: bool) -> None:
        """is_hand_made: block tables come from the scenario, not from an allocator."""
        self.num_blocks = replay.num_blocks
        self.lives: list[list[Event]] = [[] for _ in range(self.num_blocks)]
        self.cells: list[list[Cell]] = [[] for _ in range(self.num_blocks)]
        self.links: dict[Link, None] = {}
        self.tables: Tables = {}
        self._replay = replay
        self._lookups = lookups
        self._is_hand_made = is_hand_made
        self._origins: dict[Place, list[Origin]] = {}
        self._holders: list[dict[Place, None]] = [{} for _ in range(self.num_blocks)]
        self._last_holder: list[str | None] = [None] * self.num_blocks
        self._free_since: dict[int, int] = {}
        self._writing: dict[int, _Writing] = {}
        self._keys: list[CachedKey] = []
        self._links_of: list[dict[Link, None]] = [{} for _ in range(self.num_blocks)]
        self._deferred: frozenset[int] = frozenset()
        self._touched: set[int] = set()

    def origin(self, place: Place, step: int) -> Origin | None:
        """Where the block that stood at a place after this step came from; None where nothing is known."""
        known = [origin for origin in self._origins.get(place, ()) if origin.step <= step]
        return known[-1] if known else None

    def take(self, record: StateRecord, state: State) -> None:
        """Takes in one record, which the replay has taken in before."""
        self._take_tables(record, state.tables or {})
        if state.keys is not None and state.keys is not self._keys:
            self._take_keys(record, *self.key_changes(state.keys))
            self._keys = state.keys
        if isinstance(record, Scheduled):
            self._tell_worker(record)
            self._tell_computed(record)
        elif isinstance(record, Updated):
            for block in record.lost:
                self._add(block, "wrong", "its load failed", None, None)
        self._take_deferred(state)
        if isinstance(record, Scheduled):
            self.colour(record.step)

    # -- tables --------------------------------------------------------------------------------------------------------

    def _take_tables(self, record: StateRecord, now: Tables) -> None:
        came, left = changes(self.tables, now)
        self.tables = now
        gone = {(change.place.request, change.place.group, change.block) for change in left}
        moved = {key for p, block, _ in came if (key := (p.request, p.group, block)) in gone and block != NULL}
        for place, block, other in left:
            if 0 < block < self.num_blocks:
                self._holders[block].pop(place, None)
                if (place.request, place.group, block) not in moved:
                    self._tell_left(record, place, block, other)
        hits = {(e.stay.request, e.group, e.position): content for e, content in self._replay.hits}
        copies = {target: source for source, target in record.copies} if isinstance(record, Scheduled) else {}
        for place, block, _ in came:
            if (place.request, place.group, block) in moved:
                origin = Origin(self._replay.step, "moved", "moved here within the table")
            elif block in copies:
                origin = self._tell_copy(place, block, copies[block])
            elif self._is_hand_made and 0 < block < self.num_blocks:
                origin = self._tell_hand_made(place, block, is_local=place in hits)
            elif place in hits and 0 < block < self.num_blocks:
                origin = self._tell_hit(place, block, hits[place])
            else:
                origin = self._tell_taken(place, block)
            self._origins.setdefault(place, []).append(origin)
            if 0 < block < self.num_blocks:
                self._touched.add(block)
                self._holders[block][place] = None
                self._free_since.pop(block, None)

    def _tell_left(self, record: StateRecord, place: Place, block: int, other: int) -> None:
        self._touched.add(block)
        self._writing.pop(block, None)
        self._last_holder[block] = place.request
        rest = list(dict.fromkeys(p.request for p in self._holders[block]))
        if not rest:
            self._free_since[block] = self._replay.step
        still = f"; still held by {names(rest)}" if rest else ""
        words = f"{place.request} {_why_left(record, place, other)}{still}"
        self._add(block, "left", words, place.request, place.group)

    def _tell_copy(self, place: Place, block: int, source: int) -> Origin:
        self._add(block, "copied", f"{place.request} takes it as a copy of block {source}", place.request, place.group)
        return Origin(self._replay.step, "copy", f"copy of block {source}")

    def _tell_hand_made(self, place: Place, block: int, is_local: bool) -> Origin:
        words = "hand-made table, local tokens" if is_local else "hand-made table"
        self._add(block, "taken", f"{place.request} has it at position {place.position}: {words}", *place[:2])
        return Origin(self._replay.step, "shared" if is_local else "fresh", words)

    def _tell_hit(self, place: Place, block: int, content: Content | None) -> Origin:
        others = self._others(place, block)
        whose = content.stay.request if content is not None else "nobody"
        words = f"shared with {names(others)}" if others else f"hit, cached by {whose}"
        held = self._replay.what(content) if content is not None else "nothing that was written"
        shared = f"; {words}" if others else ""
        self._add(block, "hit", f"{place.request} hits it: {held}{shared}", place.request, place.group)
        return Origin(self._replay.step, "shared", words)

    def _tell_taken(self, place: Place, block: int) -> Origin:
        if block == NULL:
            return Origin(self._replay.step, "null", self._why_null(place))
        if block >= self.num_blocks:
            return Origin(self._replay.step, "fresh", "outside the pool")
        origin = Origin(self._replay.step, *self._whence(place, block))
        where = f"position {place.position}" + (f" of group {place.group}" if len(self._replay.groups) > 1 else "")
        self._add(block, "taken", f"{place.request} takes it for {where}: {origin.words}", place.request, place.group)
        return origin

    def _whence(self, place: Place, block: int) -> tuple[OriginKind, str]:
        others = self._others(place, block)
        if others:
            return "reused", f"also held by {names(others)}"
        lost = next(iter(self._links_of[block]), None)
        if lost is not None:
            return "evicted", f"evicted from {self._whose(lost)}"
        last = self._last_holder[block]
        if last is None:
            return "fresh", "fresh, never used"
        return "reused", f"{last}'s until step {self._free_since.get(block, 0)}, not cached"

    def _others(self, place: Place, block: int) -> list[str]:
        return list(dict.fromkeys(p.request for p in self._holders[block] if p.request != place.request))

    def _why_null(self, place: Place) -> str:
        kind = self._replay.groups[place.group].kind
        if kind.startswith("sliding_window") or kind == "rswa":
            return "null: outside the window"
        if kind == "chunked_local":
            return "null: an earlier chunk"
        return "null: only the last state is kept" if kind == "mamba" else "null"

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _whose(self, link: Link) -> str:
        prefixes, group = self._replay.prefixes, self._replay.groups[link.group]
        name = prefixes.name(link.request_index) if link.request_index >= 0 else "an unknown request"
        if group.holds_states:
            return f"{name}: the state after {link.num_tokens} tokens"
        start = (link.num_tokens - 1) // group.block_size * group.block_size  # floors: where the block begins
        return f"{name}: {token_range(start, link.num_tokens)}"

    def key_changes(self, keys: list[CachedKey]) -> tuple[list[Link], list[Link]]:
        """Links that have gone since the record before, and those that have come."""
        if keys is self._keys:
            return [], []
        gone, come = _differences(self._keys, keys)
        before, now = links_of(gone), links_of(come)
        return [link for link in before if link not in now], [link for link in now if link not in before]

    def _take_keys(self, record: StateRecord, gone: Iterable[Link], come: Iterable[Link]) -> None:
        fresh = {entry.block: entry.stay.request for entry in self._replay.fresh}
        for link in gone:
            del self.links[link]
            self._tell_uncached(record, link, fresh)
        for link in come:
            self.links[link] = None
            self._links_of[link.block][link] = None
            self._touched.add(link.block)
            self._add(link.block, "cached", f"can be hit for {self._whose(link)}", None, link.group)

    def _tell_uncached(self, record: StateRecord, link: Link, fresh: dict[int, str]) -> None:
        del self._links_of[link.block][link]
        self._touched.add(link.block)
        step = self._replay.step
        if isinstance(record, Acted) and record.action == "reset_prefix_cache":
            fate, why = Fate("reset", step), "the cache was reset"
        elif link.block in fresh:
            fate, why = Fate("evicted", step, fresh[link.block], link.block), f"{fresh[link.block]} took the block"
        else:
            fate, why = Fate("replaced", step, None, link.block), "the block got another key, or its key moved on"
        self._lookups.lost(link, fate)
        self._add(link.block, "uncached", f"no longer hit for {self._whose(link)}: {why}", fate.request, link.group)

    # -- worker --------------------------------------------------------------------------------------------------------

    def _tell_worker(self, record: Scheduled) -> None:
        for block in record.zeroed:
            self._add(block, "zeroed", "zeroed before use", None, None)
        for source, target in record.copies:
            self._add(source, "copied", f"copied to block {target}", None, None)
        for request, selection in (record.selected or {}).items():
            for group, blocks in enumerate(selection.groups):
                for block in blocks:
                    self._add(block, "selected", f"the connector selects it for {request}", request, group)
        for (block, group, state), layers in _by_block(record.written or ()).items():
            kind: EventKind = "written" if state == "filled" else "wrong"
            where = f" (layer{'s' if len(layers) > 1 else ''} {names(layers)})" if layers else ""
            self._add(block, kind, f"{_WRITTEN_WORDS[state]}{where}", None, group)

    def _tell_computed(self, record: Scheduled) -> None:
        """Tokens that the step's forward pass writes."""
        for request, num_tokens in record.scheduled.items():
            stay, tables = self._replay.stays.get(request), self._replay.tables.get(request)
            if stay is None or tables is None:
                continue
            end = stay.num_computed
            self._lookups.computed(request, stay.num_written, record.step)
            for group in self._replay.groups:
                table = tables[group.index]
                if group.kind == "mamba":
                    for block in table[group.last_position(end) :][:1]:
                        self._write(block, stay, group.index, end - num_tokens, end, "its state, now after {1} tokens")
                elif not group.holds_tokens:
                    for block in table[:1]:
                        self._write(block, stay, group.index, end - num_tokens, end, "its ring, now after {1} tokens")
                else:
                    self._write_tokens(stay, group.index, group.block_size, table, end - num_tokens, end)

    def _write_tokens(self, stay: Stay, group: int, size: int, table: Sequence[int], start: int, end: int) -> None:
        for position in range(start // size, min((end - 1) // size + 1, len(table))):  # floors: blocks of first and last
            first, last = max(start, position * size), min(end, (position + 1) * size)
            self._write(table[position], stay, group, first, last, "{0}")

    def _write(self, block: int, stay: Stay, group: int, start: int, end: int, what: str) -> None:
        if not 0 < block < self.num_blocks:
            return
        writing = self._writing.get(block)
        if writing is not None and writing.stay is stay and writing.end == start and writing.event.group == group:
            writing.end, writing.event.last_step = end, self._replay.step
        else:
            writing = _Writing(stay, start, end, Event(self._replay.step, "computed", "", stay.request, group))
            self._writing[block] = writing
            self.lives[block].append(writing.event)
        words = what.format(token_range(writing.start, end), end)
        writing.event.words = f"{stay.request} computes {words}"

    # -- states --------------------------------------------------------------------------------------------------------

    def _take_deferred(self, state: State) -> None:
        now = frozenset(block for blocks in state.deferred or () for block in blocks)
        self._touched |= now ^ self._deferred
        self._deferred = now

    def colour(self, step: int) -> None:
        """Notes the state, from this step on, of every block that something happened to."""
        for block in sorted(self._touched):
            if 0 < block < self.num_blocks:
                cell, cells = self._cell(block, step), self.cells[block]
                if not cells or cells[-1][1:] != cell[1:]:
                    cells.append(cell)
        self._touched.clear()

    def _cell(self, block: int, step: int) -> Cell:
        holders, content = self._holders[block], self._replay.contents[block]
        owner = content.stay.request if content is not None else self._last_holder[block]
        group = content.group if content is not None else None
        if holders:
            first = next(iter(holders))
            state: CellState = "shared" if len({place.request for place in holders}) > 1 else "held"
            return Cell(step, state, owner or first.request, first.group)
        if block in self._deferred:
            return Cell(step, "deferred", owner, group)
        return Cell(step, "cached" if self._links_of[block] else "free", owner, group)

    def _add(self, block: int, kind: EventKind, words: str, request: str | None, group: int | None) -> None:
        if 0 < block < self.num_blocks:
            self.lives[block].append(Event(self._replay.step, kind, words, request, group))


_WRITTEN_WORDS = {
    "filled": "filled by the connector, as the contract says",
    "unwritten": "was to be filled, but stayed as it was",
    "wrong_value": "filled with a wrong value",
    "outside": "written, though nobody asked for it",
    "padding": "bytes of its page that belong to no layer were written",
}


def links_of(keys: Iterable[CachedKey]) -> dict[Link, None]:
    """The links of a prefix cache, those of one key in their order."""
    return dict.fromkeys(Link(group, request, num, block) for group, request, num, blocks in keys for block in blocks)


def _differences(before: list[CachedKey], now: list[CachedKey]) -> tuple[list[CachedKey], list[CachedKey]]:
    """What only one of two lists has. Both are sorted, and mostly alike: one walk along both."""
    gone: list[CachedKey] = []
    come: list[CachedKey] = []
    i = j = 0
    while i < len(before) and j < len(now):
        one, other = before[i], now[j]
        if one == other:
            i += 1
            j += 1
        elif one < other:
            gone.append(one)
            i += 1
        else:
            come.append(other)
            j += 1
    return gone + before[i:], come + now[j:]


def _by_block(written: Iterable[Written]) -> dict[tuple[int, int, str], list[str]]:
    """(block, group, state) -> layers."""
    found: dict[tuple[int, int, str], list[str]] = {}
    for entry in written:
        for block in entry.blocks:
            found.setdefault((block, entry.group, entry.state), []).extend([entry.layer] if entry.layer else [])
    return found


def changes(before: Tables, now: Tables) -> tuple[list[Change], list[Change]]:
    """Entries that came, nulls included, and blocks that went."""
    came: list[Change] = []
    left: list[Change] = []
    none: list[list[int]] = []
    empty: list[int] = []
    for request in dict.fromkeys([*before, *now]):
        was, held = before.get(request, none), now.get(request, none)
        if was == held:
            continue
        for group, (old, new) in enumerate(zip_longest(was, held, fillvalue=empty)):
            for position, (out, block) in enumerate(zip_longest(old, new, fillvalue=-1)):
                if out != block:
                    place = Place(request, group, position)
                    if out > NULL:
                        left.append(Change(place, out, block))
                    if block >= NULL:
                        came.append(Change(place, block, out))
    return came, left


def _why_left(record: StateRecord, place: Place, other: int) -> str:
    request = place.request
    if isinstance(record, Updated) and request in record.finished:
        return "finished"
    if isinstance(record, Acted):
        return "aborted" if record.action == "abort" else "preempted by the reset"
    if isinstance(record, Scheduled) and request in record.preempted:
        return "was preempted"
    return f"needs position {place.position} no more" if other == NULL else "let go of it"

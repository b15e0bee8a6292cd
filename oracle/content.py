"""What every block holds, followed through a history: whose tokens, written when, and who reads them.

A value's identity is its prefix: the tokens up to and including it, with salt and adapter. Two requests that agree on
their first n tokens have equal values at the first n positions, so a block's content is told by one stay, one group and
one position in its table: "tokens [16, 32) of request A, written up to token 20". Nothing is kept per token.

Within a step things are written in the order in which the worker acts: zero, copy, fill, forward. What a connector
fills counts as those blocks' external tokens; whether it filled the right blocks is judged elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from oracle.findings import token_range
from oracle.selection import NULL
from sim.geometry import effective_block_size
from sim.history import Acted, CachedKey, Failure, Record, Refusal, Scheduled, Start, Table, Tables, Updated
from sim.releases import Rules
from sim.scenario import Add, AnyGroup, ChunkedLocal, Circular, Direct, Mamba, Run, Scenario, SlidingWindow

_ENDLESS = 1 << 40


class GroupView:
    """What the laws have to know about one group: which tokens a block holds and which ones it may drop.

    holds_tokens: entry i holds the tokens [i * block_size, (i + 1) * block_size), or the state after the last of them.
    A ring does not: its one block serves all of a request's tokens. Sizes in tokens.
    """

    def __init__(self, index: int, group: AnyGroup, block_size: int) -> None:
        self.index = index
        self.kind = group.kind
        self.block_size = block_size
        self.holds_tokens = not isinstance(group, Circular)
        self._group = group

    def num_droppable(self, num_computed: int) -> int:
        """Leading tokens that no later token needs once `num_computed` are computed."""
        group = self._group
        if isinstance(group, SlidingWindow):
            return max(0, num_computed - group.window + 1)
        if isinstance(group, ChunkedLocal):
            return num_computed // group.chunk * group.chunk  # floors: the chunk of the next token begins here
        if isinstance(group, Mamba):
            return max(0, num_computed - 1)  # only the last state is read
        return 0

    def may_be_null(self, position: int, num_computed: int) -> bool:
        """Whether the entry may be null: all it held is droppable."""
        return self.holds_tokens and (position + 1) * self.block_size <= self.num_droppable(num_computed)

    def num_hit_blocks(self, num_local: int) -> int:
        """Leading entries that local tokens fill or begin; rounds up."""
        return -(-num_local // self.block_size) if self.holds_tokens else 0

    def room(self, table: Table) -> int:
        """Tokens that have a slot."""
        if self.holds_tokens:
            return len(table) * self.block_size
        return _ENDLESS if table else 0


class Prefixes:
    """How many leading tokens two requests of a scenario have in common, outputs included."""

    def __init__(self, scenario: Scenario) -> None:
        self._adds = [step for step in scenario.steps if isinstance(step, (Add, Direct))]
        self._common: dict[tuple[int, int], int] = {}

    def name(self, request_index: int) -> str:
        """The ID of the request that the index-th `add` brought."""
        return self._adds[request_index].id

    def common(self, one: int, other: int) -> int:
        """Leading tokens with equal values; requests are given as indexes of their `add`."""
        if one == other:
            return _ENDLESS
        pair = (one, other) if one < other else (other, one)
        if pair not in self._common:
            self._common[pair] = _num_common_tokens(self._adds[one], self._adds[other])
        return self._common[pair]


def _num_common_tokens(one: Add | Direct, other: Add | Direct) -> int:
    if isinstance(one, Direct) or isinstance(other, Direct) or (one.salt, one.lora) != (other.salt, other.lora):
        return 0
    num_tokens = 0
    runs = [deque([*add.prompt, (add.id + ".out", 0, _ENDLESS)]) for add in (one, other)]
    while runs[0] and runs[1]:
        (stream, start, count), (other_stream, other_start, other_count) = (run.popleft() for run in runs)
        if (stream, start) != (other_stream, other_start):
            break
        step = min(count, other_count)
        num_tokens += step
        for run, left in zip(runs, (count - step, other_count - step), strict=True):
            if left:
                run.appendleft((stream, start + step, left))
        if step == _ENDLESS:
            break
    return min(num_tokens, _ENDLESS)


class Stay:
    """A request among the running, from one admission to its end or preemption.

    num_computed: leading tokens whose values its blocks hold; grows with each step and stays when it leaves. room: tokens
    that have slots in every group.
    """

    __slots__ = ("num_computed", "num_external", "num_local", "request", "request_index", "room")

    def __init__(self, request: str, request_index: int, num_local: int, num_external: int) -> None:
        self.request = request
        self.request_index = request_index
        self.num_local = num_local
        self.num_external = num_external
        self.num_computed = num_local + num_external
        self.room = 0


class Content(NamedTuple):
    """A block's content: the tokens of one table entry of a stay. `until` limits a copy to what it had when copied."""

    stay: Stay
    group: int
    position: int
    until: int = _ENDLESS

    @property
    def num_tokens(self) -> int:
        """Leading tokens of the request whose values are there, those of earlier entries counted in."""
        return min(self.stay.num_computed, self.until)


class Entry(NamedTuple):
    """A place in a block table, and the block there."""

    stay: Stay
    group: int
    position: int
    block: int


class Replay:
    """Follows a history record by record. After `advance` the event lists say what the record brought:

    fresh: blocks that entered a table to be written. hits: blocks that came in for their content, and that content.
    nulls: (stay, group, position, tokens computed so far) of new null entries. replaced: entries of a stay that now name
    another block. overwritten: held blocks that were zeroed or copied over. homeless: (stay, first token, number) of
    scheduled tokens without slots. new_keys: (group, add, tokens, block) of links of the prefix cache that are new, or
    whose block got new content.
    """

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.groups = [
            GroupView(i, group, effective_block_size(group, scenario.engine.dcp, rules))
            for i, group in enumerate(scenario.groups)
        ]
        self.prefixes = Prefixes(scenario)
        self.num_blocks = scenario.engine.blocks
        self.stays: dict[str, Stay] = {}
        self.tables: Tables = {}
        self.free: list[int] | None = None
        self.refs: list[int] | None = None
        self.deferred: list[list[int]] = []
        self.contents: list[Content | None] = [None] * self.num_blocks
        self.num_holders = [0] * self.num_blocks
        self.step = 0
        self.fresh: list[Entry] = []
        self.hits: list[tuple[Entry, Content | None]] = []
        self.nulls: list[tuple[Stay, int, int, int]] = []
        self.replaced: list[Entry] = []
        self.overwritten: list[int] = []
        self.homeless: list[tuple[Stay, int, int]] = []
        self.new_keys: list[tuple[int, int, int, int]] = []
        self._events: tuple[list[Any], ...] = (
            self.fresh, self.hits, self.nulls, self.replaced, self.overwritten, self.homeless, self.new_keys
        )
        self._keys: set[tuple[int, int, int, int]] = set()
        self._lives: dict[str, deque[int]] = {}
        self._num_adds_by_run: list[int] = []
        self._num_runs = 0
        num_adds = 0
        for step in scenario.steps:
            if isinstance(step, (Add, Direct)):
                self._lives.setdefault(step.id, deque()).append(num_adds)
                num_adds += 1
            elif isinstance(step, Run):
                self._num_adds_by_run.append(num_adds)

    def advance(self, record: Record) -> None:
        """Takes in one record."""
        for events in self._events:
            if events:
                events.clear()
        if isinstance(record, Scheduled):
            self._scheduled(record)
        elif isinstance(record, (Failure, Refusal)):
            return
        else:
            if record.tables is not None:
                self._follow(record.tables)
            if isinstance(record, Updated):
                for request in record.finished:
                    self._end_life(request)
            elif isinstance(record, Acted):
                self._acted(record)
        self._take_state(record)

    def _acted(self, record: Acted) -> None:
        if record.action == "abort" and record.result == "done":
            self._end_life(record.request or "")
        elif record.action == "run":
            self._num_runs += 1

    def _scheduled(self, record: Scheduled) -> None:
        """One step in the worker's order: zero, copy, (fill,) forward. Tables come before, since they say who writes."""
        self.step = record.step
        contents = self.contents
        for block in record.zeroed:
            contents[block] = None
        for source, target in record.copies:
            held = contents[source]
            contents[target] = held and held._replace(until=held.num_tokens)
        for request in (*record.resumed, *record.admitted):
            self._admit(request, record)
        if record.tables is not None:
            self._follow(record.tables)
        if record.zeroed or record.copies:
            self._find_overwritten(record)
        for request, num_tokens in record.scheduled.items():
            stay = self.stays.get(request)
            if stay is not None:
                if stay.num_computed + num_tokens > stay.room:
                    self.homeless.append((stay, stay.num_computed, num_tokens))
                stay.num_computed += num_tokens

    def _admit(self, request: str, record: Scheduled) -> None:
        """A new stay. Blocks it held before an earlier preemption are all let go first."""
        if request in self.tables:
            self._leave(request)
        lives = self._lives.get(request)
        self.stays[request] = Stay(
            request, lives[0] if lives else -1, record.hits.get(request, 0), record.external.get(request, 0)
        )

    def _end_life(self, request: str) -> None:
        """The request is gone; its ID may come again, as another `add`."""
        lives = self._lives.get(request)
        if lives:
            lives.popleft()

    def unfinished(self) -> list[str]:
        """IDs of requests that had come before the last `run` ended and have neither finished nor been aborted."""
        num_adds = self._num_adds_by_run[self._num_runs - 1] if self._num_runs else 0
        return [request for request, lives in self._lives.items() if lives and lives[0] < num_adds]

    # -- tables --------------------------------------------------------------------------------------------------------

    def _follow(self, tables: Tables) -> None:
        """Takes in all block tables, looking only at what changed."""
        before = self.tables
        if before.keys() != tables.keys():
            for request in before.keys() - tables.keys():
                self._leave(request)
        for request, now in tables.items():
            old = before.get(request)
            if old != now:
                self._change(self.stays.get(request) or self._unannounced(request), old, now)
        self.tables = dict(tables)

    def _unannounced(self, request: str) -> Stay:
        """A request that holds blocks though no record admitted it: all its blocks count as fresh."""
        lives = self._lives.get(request)
        stay = self.stays[request] = Stay(request, lives[0] if lives else -1, 0, 0)
        return stay

    def _leave(self, request: str) -> None:
        for table in self.tables.pop(request):
            for block in table:
                if block:
                    self.num_holders[block] -= 1
        self.stays.pop(request, None)

    def _change(self, stay: Stay, old: Sequence[Table] | None, now: Sequence[Table]) -> None:
        room = _ENDLESS
        for group in self.groups:
            table = now[group.index]
            if old is None:
                self._attach(stay, group, table, 0)
            elif old[group.index] != table:
                self._change_table(stay, group, old[group.index], table)
            room = min(room, group.room(table))
        stay.room = room

    def _change_table(self, stay: Stay, group: GroupView, old: Table, table: Table) -> None:
        if table[: len(old)] != old:
            for position, (was, block) in enumerate(zip(old, table, strict=False)):
                if was != block:
                    self._replace(stay, group, position, was, block)
            for block in old[len(table) :]:
                self._release(block)
        self._attach(stay, group, table, len(old))

    def _replace(self, stay: Stay, group: GroupView, position: int, was: int, block: int) -> None:
        self._release(was)
        if block == NULL:
            self.nulls.append((stay, group.index, position, stay.num_computed))
        else:
            self.num_holders[block] += 1
            self.replaced.append(Entry(stay, group.index, position, block))

    def _release(self, block: int) -> None:
        if block != NULL:
            self.num_holders[block] -= 1

    def _attach(self, stay: Stay, group: GroupView, table: Table, start: int) -> None:
        """Entries from position `start` on are new. Those that local tokens reach into came with their content."""
        contents, num_holders, index = self.contents, self.num_holders, group.index
        num_hits = group.num_hit_blocks(stay.num_local)
        for position in range(start, len(table)):
            block = table[position]
            if block == NULL:
                self.nulls.append((stay, index, position, stay.num_computed))
                continue
            num_holders[block] += 1
            entry = Entry(stay, index, position, block)
            if position < num_hits:
                self.hits.append((entry, contents[block]))
            if (position + 1) * group.block_size > stay.num_local or position >= num_hits:
                self.fresh.append(entry)  # a block that local tokens only begin is written on by this stay
                contents[block] = Content(stay, index, position)

    def _find_overwritten(self, record: Scheduled) -> None:
        """Blocks written over by zeroing or copying while somebody holds them from before."""
        new = {entry.block for entry in self.fresh}
        new.update(entry.block for entry, _ in self.hits)
        written = [*record.zeroed, *(target for _, target in record.copies)]
        self.overwritten.extend(block for block in dict.fromkeys(written) if self.num_holders[block] and block not in new)

    # -- pool ----------------------------------------------------------------------------------------------------------

    def _take_state(self, record: Start | Scheduled | Updated | Acted) -> None:
        if record.free is not None:
            self.free = record.free
        if record.refs is not None:
            self.refs = record.refs
        if record.deferred is not None:
            self.deferred = record.deferred
        if record.keys is not None:
            self._take_keys(record.keys)
        elif self.fresh and self._keys:
            written = {entry.block for entry in self.fresh}
            self.new_keys.extend(link for link in self._keys if link[3] in written)

    def _take_keys(self, keys: Sequence[CachedKey]) -> None:
        links = {(group, request, num, block) for group, request, num, blocks in keys for block in blocks}
        written = {entry.block for entry in self.fresh}
        self.new_keys.extend(links - self._keys)
        if written:
            self.new_keys.extend(link for link in links & self._keys if link[3] in written)
        self._keys = links

    # -- words ---------------------------------------------------------------------------------------------------------

    def holders(self, block: int) -> list[tuple[str, int, int]]:
        """(request, group, position) of every table entry that names the block."""
        return [
            (request, group, position)
            for request, tables in self.tables.items()
            for group, table in enumerate(tables)
            for position, held in enumerate(table)
            if held == block
        ]

    def describe(self, block: int, content: Content | None = None) -> str:
        """What a block holds and whose it is: "holds tokens [0, 16) of request A, shared by A and B"."""
        if block == NULL:
            return "is the null block"
        if not 0 < block < self.num_blocks:
            return f"is outside the pool of {self.num_blocks} blocks"
        content = content or self.contents[block]
        names = list(dict.fromkeys(request for request, _, _ in self.holders(block)))
        held = {0: ", held by nobody", 1: f", held by {names[0] if names else ''}"}.get(
            len(names), f", shared by {' and '.join(names)}"
        )
        if content is None:
            return f"holds nothing that was written{held}"
        stay, group = content.stay, self.groups[content.group]
        if not group.holds_tokens:
            return f"holds the ring of request {stay.request}" + ("" if names == [stay.request] else held)
        start = content.position * group.block_size
        end = min(start + group.block_size, max(content.num_tokens, start))
        what = token_range(start, end) if end > start else f"no token yet from {start} on"
        if names == [stay.request]:
            held = ""
        return f"holds {what} of request {stay.request}{held}"

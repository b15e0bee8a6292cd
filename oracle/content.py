"""What every block holds, followed through a history: whose tokens, written when, and who reads them.

A value's identity is its prefix: the tokens up to and including it, with salt and adapter. Two requests that agree on
their first n tokens have equal values at the first n positions, so a block's content is told by one stay, one group and
one position in its table: "tokens [16, 32) of request A, written up to token 20". Nothing is kept per token. A block of a
Mamba group in mode `align` holds the state after an exact number of tokens instead, wherever it stands in the table.

Drafted tokens may turn out wrong, so a position counts as written only as far as the request's tokens are known; what
was computed beyond falls back when the output arrives. An output always leaves all tokens but the newest computed.

Within a step things are written in the order in which the worker acts: zero, copy, fill, forward. What a connector
fills counts as those blocks' external tokens; whether it filled the right blocks is judged elsewhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from oracle.findings import token_range
from oracle.selection import NULL
from sim.geometry import effective_block_size
from sim.history import Acted, CachedKey, Failure, Record, Refusal, Scheduled, Start, Table, Tables, Updated
from sim.releases import Rules
from sim.scenario import (
    RSWA,
    Add,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Cross,
    Direct,
    Mamba,
    Pause,
    Run,
    Scenario,
    SlidingWindow,
    SlidingWindowMLA,
)

_ENDLESS = 1 << 40
_NO_STATE = -1


class GroupView:
    """What the laws have to know about one group: which tokens a block holds and which ones it may drop.

    holds_tokens: entry i holds the tokens [i * block_size, (i + 1) * block_size), or the state after the last of them.
    A ring does not: its one block serves all of a request's tokens; nor do encoder tokens count. holds_states: a block
    holds one state and may stand anywhere. num_scratch: entries at a table's end for the states of drafted tokens.
    has_checkpoints: a prefill's step may leave a state before its last one, a multiple of checkpoint_step after its start.
    replay_window: that many tokens before the end of a hit are computed again, the group being not cached. In tokens.
    """

    def __init__(self, index: int, group: AnyGroup, block_size: int, checkpoints_are_aligned: bool = True) -> None:
        self.index = index
        self.kind = group.kind
        self.block_size = block_size
        self.holds_tokens = not isinstance(group, (Circular, Cross))
        self.holds_states = isinstance(group, Mamba) and group.mode == "align"
        self.num_scratch = group.speculative_blocks if isinstance(group, Mamba) else 0
        self.has_checkpoints = isinstance(group, Mamba) and group.checkpoint_blocks > 0
        self.checkpoint_step = (isinstance(group, Mamba) and checkpoints_are_aligned and group.checkpoint_alignment) or 1
        is_replayed = isinstance(group, SlidingWindowMLA) and group.bounded_replay
        self.replay_window = group.window if isinstance(group, SlidingWindowMLA) and is_replayed else 0
        self._group = group

    def droppable(self, num_computed: int, num_prompt: int) -> tuple[int, int]:
        """Tokens [start, end) that no later token needs once `num_computed` are computed."""
        group = self._group
        if isinstance(group, (SlidingWindow, SlidingWindowMLA)):
            return 0, num_computed - group.window + 1
        if isinstance(group, RSWA):
            return num_prompt, num_computed - group.window + 1
        if isinstance(group, ChunkedLocal):
            return 0, num_computed // group.chunk * group.chunk  # floors: the chunk of the next token begins here
        if isinstance(group, Mamba):
            return 0, num_computed - 1  # only the last state is read
        return 0, 0

    def may_be_null(self, position: int, num_computed: int, num_prompt: int = 0) -> bool:
        """Whether the entry may be null: all it held is droppable."""
        start, end = self.droppable(num_computed, num_prompt)
        return self.holds_tokens and start <= position * self.block_size and (position + 1) * self.block_size <= end

    def num_hit_blocks(self, num_local: int) -> int:
        """Leading entries that local tokens fill or begin, of which the group keeps what it had; rounds up."""
        return -(-num_local // self.block_size) if self.holds_tokens and not self.replay_window else 0

    def last_position(self, num_tokens: int) -> int:
        """The entry that the last of these tokens is in, -1 for none."""
        return (num_tokens - 1) // self.block_size  # floors

    def room(self, table: Table, num_encoder: int = 0) -> int:
        """Tokens that have a slot. Beside an encoder any number, if its input has."""
        if self.holds_tokens:
            return (len(table) - self.num_scratch) * self.block_size
        if isinstance(self._group, Cross):
            return _ENDLESS if len(table) * self.block_size >= num_encoder else 0
        return _ENDLESS if table else 0


class Prefixes:
    """How many leading tokens two requests of a scenario have in common, outputs included."""

    def __init__(self, scenario: Scenario) -> None:
        self._adds = [step for step in scenario.steps if isinstance(step, (Add, Direct))]
        self._common: dict[tuple[int, int], int] = {}

    def num_prompt(self, request_index: int) -> int:
        """Tokens in the prompt that the index-th `add` brought."""
        add = self._adds[request_index]
        return add.num_prompt_tokens if isinstance(add, Add) else add.num_tokens

    def num_encoder(self, request_index: int) -> int:
        """Tokens of the encoder's input that the index-th `add` brought."""
        add = self._adds[request_index]
        return add.encoder if isinstance(add, Add) and request_index >= 0 else 0

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


def _all_tokens(add: Add) -> list[tuple[str, int, int]]:
    """Prompt, given outputs, and then its own stream without end."""
    num_given = sum(span.count for span in add.output)
    return [*add.prompt, *add.output, (add.id + ".out", num_given, _ENDLESS)]


def _num_common_tokens(one: Add | Direct, other: Add | Direct) -> int:
    if isinstance(one, Direct) or isinstance(other, Direct):
        return 0
    if (one.salt, one.lora, one.embeds) != (other.salt, other.lora, other.embeds):
        return 0
    num_tokens = 0
    runs = [deque(_all_tokens(add)) for add in (one, other)]
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

    num_local, num_external: tokens that were there at the admission. loads: the external ones are still under way; such a
    stay begins with the grant of its blocks, before the request is among the running. num_computed: leading tokens
    computed once all steps so far have run, drafts taken as right until the output says otherwise; stays when the request
    leaves.
    num_known: tokens known for certain (without drafts: no limit). num_in_flight: scheduled in steps whose output has not
    been processed; followed with drafts only. num_prefill: tokens that were known for certain when it began. room: tokens
    that have slots in every group. sources: by group of states, the block with the state to go on from. num_given: tokens
    of those there at the admission that are not computed again. num_tried: most leading tokens that a step was to compute,
    wrong drafts included; followed with drafts only. num_lost: leading tokens that were there, or so it seemed,
    when a load turned out to have failed; 0 if none did. replays: tokens that it found are computed again, though its
    states are those after them.
    """

    __slots__ = (
        "is_admitted",
        "loads",
        "num_computed",
        "num_external",
        "num_found",
        "num_given",
        "num_in_flight",
        "num_known",
        "num_local",
        "num_lost",
        "num_prefill",
        "num_prompt",
        "num_tried",
        "replays",
        "request",
        "request_index",
        "room",
        "sources",
    )

    def __init__(
        self, request: str, request_index: int, num_prompt: int, num_local: int, num_external: int, num_replayed: int
    ) -> None:
        self.request = request
        self.request_index = request_index
        self.num_prompt = num_prompt
        self.num_local = num_local
        self.num_external = num_external
        self.num_found = num_local + num_external
        self.is_admitted = True
        self.loads = False
        self.num_lost = 0
        self.num_given = self.num_computed = max(0, self.num_found - num_replayed)
        self.replays = num_replayed > 0
        self.num_known = _ENDLESS
        self.num_prefill = _ENDLESS
        self.num_in_flight = self.num_tried = 0
        self.room = 0
        self.sources: dict[int, int] = {}

    def fall_back(self, num_tokens: int) -> None:
        """No more than the first `num_tokens` tokens are there."""
        self.num_lost = max(self.num_lost, self.num_reached)
        self.num_local = min(self.num_local, num_tokens)
        self.num_found = min(self.num_found, num_tokens)
        self.num_given = self.num_computed = min(self.num_computed, num_tokens)
        self.loads = False

    def load_again(self, num_found: int, num_external: int) -> None:
        """Of its first `num_found` tokens the last `num_external` are under way once more."""
        self.num_local = num_found if self.num_found == num_found else num_found - num_external
        self.num_external = num_external
        self.num_found = self.num_given = self.num_computed = num_found
        self.loads = True
        self.num_lost = 0

    @property
    def num_written(self) -> int:
        """Leading tokens whose right values its blocks hold."""
        return self.num_local if self.loads else self.num_reached

    @property
    def num_reached(self) -> int:
        """Leading tokens that are written or under way: those before them that are skipped need no block."""
        return max(self.num_found, min(self.num_computed, self.num_known))


class Content(NamedTuple):
    """A block's content: the tokens of one table entry of a stay. `until` limits a copy to what it had when copied.

    In a group of states: the state after `until` tokens, 0 while the output that tells is awaited, negative where no step
    ever wrote one; with `since`, a checkpoint: the one after some number of tokens in between that only its key tells, see
    GroupView.has_checkpoints, and once that did the one after `until` tokens again.
    """

    stay: Stay
    group: int
    position: int
    until: int = _ENDLESS
    since: int | None = None

    @property
    def is_untold(self) -> bool:
        """Whether it is a checkpoint whose key is awaited."""
        return self.since is not None and self.since != self.until

    def told(self, num_tokens: int) -> Content:
        """The checkpoint after `num_tokens` tokens."""
        return self._replace(until=num_tokens, since=num_tokens)

    @property
    def num_tokens(self) -> int:
        """Leading tokens of the request whose values are there, those of earlier entries counted in."""
        return min(self.stay.num_written, self.until)


class Entry(NamedTuple):
    """A place in a block table, and the block there."""

    stay: Stay
    group: int
    position: int
    block: int


class Target(NamedTuple):
    """Where a step writes the state after its last token: the entry, in the table as it was."""

    group: GroupView
    table: Table
    position: int


class Sent(NamedTuple):
    """A step whose output has not been processed: (stay, tokens, where its states go) of each request."""

    step: int
    parts: list[tuple[Stay, int, tuple[Target, ...]]]


class Replay:
    """Follows a history record by record. After `advance` the event lists say what the record brought:

    fresh: blocks that entered a table to be written. hits: blocks that came in for their content, and that content.
    nulls: (stay, group, position, tokens computed so far) of new null entries. replaced: entries of a stay that now name
    another block. advanced: entries of states that the step writes. stateless: those whose state to go on from has left the
    table. missing: entries without what a stay whose load failed needs to go on, null or with another state, and how many
    tokens it goes on behind. overwritten: held blocks that were zeroed or copied over. unloaded: stays admitted before
    their load arrived.
    homeless: (stay, first token, number) of scheduled tokens without slots. preempted: the stays that a preemption ended.
    new_keys: (group, add, tokens, block) of links of the prefix cache that are new, or whose block got new content.

    unbalanced: (group, add, tokens) -> links that KV events have told of, less those that are there. is_told: all events
    so far have been told; they come with the next update.
    """

    def __init__(self, scenario: Scenario, rules: Rules, restores_windows: bool = False) -> None:
        """restores_windows: with external tokens comes what else would be computed again, see `replay_window`."""
        self.groups = [
            GroupView(
                i,
                group,
                effective_block_size(group, scenario.engine.dcp, rules),
                checkpoints_are_aligned=rules.checkpoints_at_positions,
            )
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
        self._state_groups = [group for group in self.groups if group.holds_states]
        self._replay_window = max(group.replay_window for group in self.groups)
        self._restores_windows = restores_windows and rules.loads_may_restore_windows
        self._has_drafts = scenario.engine.speculative is not None
        self._num_tokens: dict[str, int] = {}
        self._in_flight: deque[Sent] = deque()
        self._last_steps: deque[Scheduled] = deque(maxlen=2)  # no more are in flight
        self._watches_events = scenario.engine.kv_events
        self.is_told = False
        self.unbalanced: Counter[tuple[int, int, int]] = Counter()
        self.step = 0
        self.fresh: list[Entry] = []
        self.hits: list[tuple[Entry, Content | None]] = []
        self.nulls: list[tuple[Stay, int, int, int]] = []
        self.replaced: list[Entry] = []
        self.advanced: list[Entry] = []
        self.stateless: list[Entry] = []
        self.missing: list[tuple[Entry, int]] = []
        self.overwritten: list[int] = []
        self.unloaded: list[Stay] = []
        self.homeless: list[tuple[Stay, int, int]] = []
        self.preempted: list[Stay] = []
        self.new_keys: list[tuple[int, int, int, int]] = []
        self._events: tuple[list[Any], ...] = (
            self.fresh,
            self.hits,
            self.nulls,
            self.replaced,
            self.advanced,
            self.stateless,
            self.missing,
            self.overwritten,
            self.unloaded,
            self.homeless,
            self.preempted,
            self.new_keys,
        )
        self._doubted: dict[str, list[Entry]] = {}
        self._fallen: dict[str, Stay] = {}
        self._keys: set[tuple[int, int, int, int]] = set()
        self._rewritten: set[int] = set()
        self._lives: dict[str, deque[int]] = {}
        self._num_adds_by_run: list[int] = []
        self._paused_by_run: list[bool] = []
        self._num_runs = 0
        num_adds, is_paused = 0, False
        for step in scenario.steps:
            if isinstance(step, (Add, Direct)):
                self._lives.setdefault(step.id, deque()).append(num_adds)
                num_adds += 1
            elif isinstance(step, Pause):
                is_paused = step.what != "none"
            elif isinstance(step, Run):
                self._num_adds_by_run.append(num_adds)
                self._paused_by_run.append(is_paused)

    def advance(self, record: Record) -> None:
        """Takes in one record."""
        for events in self._events:
            if events:
                events.clear()
        if self._rewritten:
            self._rewritten.clear()
        if isinstance(record, Scheduled):
            self._scheduled(record)
        elif isinstance(record, (Failure, Refusal)):
            self.step = getattr(record, "step", self.step)
            return
        else:
            if record.tables is not None:
                self._follow(record.tables)
            if isinstance(record, Updated):
                for request in record.arrived:
                    self._arrive(request)
                if record.lost:
                    self._lose(set(record.lost), record.step)
                if self._in_flight:
                    self._take_output(record)
                for request in record.finished:
                    self._end_life(request)
            elif isinstance(record, Acted):
                self._acted(record)
        self._take_state(record)
        if isinstance(record, Updated) and record.events is not None:
            self._take_events(record.events)

    def _acted(self, record: Acted) -> None:
        if record.action == "abort" and record.result in ("done", "delayed"):
            self._end_life(record.request or "")
        elif record.action == "run":
            self._num_runs += 1
        elif record.action == "reset_prefix_cache":
            self.is_told = False  # until the next update

    def _scheduled(self, record: Scheduled) -> None:
        """One step in the worker's order: zero, copy, (fill,) forward. Tables come before, since they say who writes."""
        self.step = record.step
        self._last_steps.append(record)
        self.preempted += [self.stays[request] for request in record.preempted if request in self.stays]
        contents = self.contents
        for block in record.zeroed:
            contents[block] = None
        for source, target in record.copies:
            held = contents[source]
            self._rewritten.add(target)
            contents[target] = held and held._replace(until=held.num_tokens if held.until == _ENDLESS else held.until)
        tables = record.tables
        before = dict(self.tables) if record.hits and tables is None else self.tables
        for request in dict.fromkeys((*record.hits, *record.resumed, *record.admitted)):
            self._admit(request, record)
        if before.keys() != self.tables.keys():
            tables = before  # somebody let its blocks go, and got the same ones
        if tables is not None:
            if record.hits:  # who is admitted, or loads, may hit what one before it in this step computes
                tables = {request: tables[request] for request in record.scheduled if request in tables} | tables
            self._follow(tables)
        if record.zeroed or record.copies:
            self._find_overwritten(record)
        sent = Sent(record.step, []) if self._has_drafts else None
        for request, num_tokens in record.scheduled.items():
            stay = self.stays.get(request)
            if stay is not None:
                if stay.num_computed + num_tokens > stay.room:
                    self.homeless.append((stay, stay.num_computed, num_tokens))
                if self._fallen and self._fallen.pop(request, None) is stay:
                    self._find_missing(stay)
                targets = self._advance_states(stay, num_tokens) if self._state_groups else ()
                stay.num_computed += num_tokens
                if sent is not None:
                    stay.num_in_flight += num_tokens
                    stay.num_tried = max(stay.num_tried, stay.num_computed)
                    sent.parts.append((stay, num_tokens, targets))
        if self._doubted:
            self._look_again(record)
        if sent is not None:
            self._in_flight.append(sent)

    def _lose(self, lost: set[int], step: int) -> None:
        """Loads wrote nothing into these blocks. Who was to find it there has to compute it, from the first such block on,
        unless it has done so anyway. What a step in flight behind this one computes counts as loaded, also where it is
        computed again. Who shares the blocks computes this step again, and looks at them when it is scheduled next; the
        first such takes the place of a request that is gone."""
        void = next((last.scheduled for last in self._last_steps if last.step == step), {})
        ahead = self._last_steps[-1].scheduled if self._last_steps and self._last_steps[-1].step > step else {}
        gone = self._fall_back_gone(lost)
        for request, tables in self.tables.items():
            stay = self.stays[request]
            shares = False
            for group in self.groups:
                for position, block in enumerate(tables[group.index]):
                    if block not in lost:
                        continue
                    content = self.contents[block]
                    start = position * group.block_size
                    if content is not None and content.stay in gone:
                        self._inherit(stay, tables, content.stay)
                    if content is not None and content.stay in (stay, *gone):
                        if start < stay.num_given + ahead.get(request, 0):
                            stay.fall_back(start)
                            self._fallen[request] = stay
                            self._void_states(stay, start)
                    else:
                        self._doubted.setdefault(request, []).append(Entry(stay, group.index, position, block))
                        shares = True
            if shares and self._fallen.get(request) is not stay:
                self._go_back(stay, tables, void.get(request, 0))

    def _fall_back_gone(self, lost: Iterable[int]) -> list[Stay]:
        """Stays that are over, and whose loads wrote nothing into these blocks."""
        gone = []
        for block in lost:
            content = self.contents[block]
            if content is not None and self.stays.get(content.stay.request) is not content.stay:
                start = content.position * self.groups[content.group].block_size
                content.stay.fall_back(start)
                self._void_states(content.stay, start)
                gone.append(content.stay)
        return gone

    def _inherit(self, stay: Stay, tables: Sequence[Table], gone: Stay) -> None:
        """What a stay shares with one that is over counts as its own."""
        for table in tables:
            for block in table:
                content = self.contents[block]
                if content is not None and content.stay is gone:
                    self.contents[block] = content._replace(stay=stay)

    def _go_back(self, stay: Stay, tables: Sequence[Table], num_tokens: int) -> None:
        """The last `num_tokens` tokens of a stay count as not computed."""
        stay.num_computed -= num_tokens
        self._void_states(stay, stay.num_computed)
        for group in self._state_groups:
            table, position = tables[group.index], group.last_position(stay.num_computed)
            stay.sources[group.index] = table[position] if position < len(table) else NULL

    # -- states and outputs --------------------------------------------------------------------------------------------

    def _advance_states(self, stay: Stay, num_tokens: int) -> tuple[Target, ...]:
        """The step reads the state after the tokens computed so far and writes the one after its last token, and perhaps
        a checkpoint in between."""
        start, end = stay.num_computed, stay.num_computed + num_tokens
        targets = []
        for group in self._state_groups:
            table = self.tables[stay.request][group.index]
            source = stay.sources.get(group.index)
            position = group.last_position(end)
            if source is not None and source not in table:
                self.stateless.append(Entry(stay, group.index, position, source))
            block = table[position] if position < len(table) else NULL
            self.advanced.append(Entry(stay, group.index, position, block))
            self._put(block, Content(stay, group.index, position, 0))  # which state is settled below, or by the output
            is_prefill = end <= stay.num_prefill
            if group.has_checkpoints and is_prefill and group.last_position(start) < position - 1 < len(table):
                self._put(table[position - 1], Content(stay, group.index, position - 1, end, start))
            target = Target(group, table, position)
            if start < stay.num_known:
                num_known = min(end, stay.num_known)
                self._settle(stay, target, num_known, num_known)
            stay.sources[group.index] = block
            targets.append(target)
        return tuple(targets)

    def _settle(self, stay: Stay, target: Target, num_running: int, num_computed: int) -> None:
        """A step has processed `num_running` known tokens and then right drafts up to `num_computed`: the states of drafts
        lie in the scratch entries; the last one that ends a block belongs at that block's own entry."""
        block_size = target.group.block_size
        self._write(stay, target, target.position + num_computed - num_running, num_computed)
        whole = num_computed // block_size * block_size  # floors
        if whole and whole >= num_running:
            self._write(stay, target, whole // block_size - 1, whole)

    def _write(self, stay: Stay, target: Target, position: int, num_tokens: int) -> None:
        """The state after `num_tokens` tokens gets into an entry, unless the block is somebody else's by now."""
        block = target.table[position] if position < len(target.table) else NULL
        content = self.contents[block]
        if content is not None and content.stay is stay:
            self._put(block, Content(stay, target.group.index, position, num_tokens))

    def _put(self, block: int, content: Content) -> None:
        if block != NULL:
            self.contents[block] = content
            self._rewritten.add(block)

    def _take_output(self, record: Updated) -> None:
        """The output of the oldest step in flight: which drafts were right."""
        while self._in_flight and self._in_flight[0].step <= record.step:
            for stay, num_tokens, targets in self._in_flight.popleft().parts:
                stay.num_in_flight -= num_tokens
                num_new = record.new_tokens.get(stay.request, 0)
                if num_new and stay.num_known < _ENDLESS:
                    self._accept(stay, num_new, targets)

    def _accept(self, stay: Stay, num_new: int, targets: Sequence[Target]) -> None:
        num_running = stay.num_known
        stay.num_known += num_new
        self._num_tokens[stay.request] = stay.num_known
        num_computed = stay.num_known - 1
        stay.num_computed = num_computed + stay.num_in_flight
        for target in targets:
            self._settle(stay, target, num_running, num_computed)
            if not stay.num_in_flight:
                position = target.position + num_new - 1
                stay.sources[target.group.index] = target.table[position] if position < len(target.table) else NULL
        for sent in self._in_flight if stay.num_in_flight else ():
            for later, _, later_targets in sent.parts:
                if later is stay:
                    for target in later_targets:
                        self._settle(stay, target, stay.num_known, stay.num_known)
                    return

    def _admit(self, request: str, record: Scheduled) -> None:
        """A new stay, or the rest of one that began with a load. Blocks held before an earlier preemption are all let go
        first."""
        is_admitted = request in record.admitted or request in record.resumed
        stay = self.stays.get(request)
        num_external = record.external.get(request, 0)
        start = record.hits.get(request, 0) + num_external
        num_replayed = self._replay_window if start > 0 and is_admitted else 0
        is_asked_about = any(asked == request for asked, _, _ in record.asked or ())
        nothing_came = stay is not None and stay.num_lost > 0 and (not stay.num_found or is_asked_about)  # it was let go
        waits = stay is not None and not stay.is_admitted and not nothing_came
        goes_on = waits and is_admitted and start > 0 and not num_external
        if stay is not None and goes_on:
            stay.is_admitted = True
            stay.num_given = stay.num_computed = start - num_replayed  # the last token loaded may be computed again, too
            stay.replays = num_replayed > 0
            if stay.loads:
                self.unloaded.append(stay)
            return
        keeps_blocks = record.tables is None or record.tables.get(request) == self.tables.get(request)
        loads_again = stay is not None and waits and not (is_admitted or stay.loads)
        if stay is not None and loads_again and keeps_blocks:
            # A prompt of one token that came whole counts as not computed at all, nor does a load that failed: it is asked
            # about and loaded again, into the blocks that it has, where what came before stays.
            stay.load_again(start, num_external)
            return
        if request in self.tables:
            self._leave(request)
        if self._restores_windows and num_external:
            num_replayed = 0
        stay = self._new_stay(request, start - num_external, num_external, num_replayed)
        stay.is_admitted = is_admitted
        stay.loads = not is_admitted

    def _arrive(self, request: str) -> None:
        """All that a load brings is there."""
        stay = self.stays.get(request)
        if stay is None or not stay.loads:
            return
        stay.loads = False
        for group in self._state_groups:
            block = stay.sources.get(group.index, NULL)
            self._put(block, Content(stay, group.index, group.last_position(stay.num_found), stay.num_found))

    def _new_stay(self, request: str, num_local: int, num_external: int, num_replayed: int) -> Stay:
        lives = self._lives.get(request)
        index = lives[0] if lives else -1
        num_prompt = self.prefixes.num_prompt(index) if index >= 0 else 0
        stay = self.stays[request] = Stay(request, index, num_prompt, num_local, num_external, num_replayed)
        if self._has_drafts:
            stay.num_known = stay.num_prefill = self._num_tokens.setdefault(request, num_prompt)
        return stay

    def _end_life(self, request: str) -> None:
        """The request is gone; its ID may come again, as another `add`."""
        lives = self._lives.get(request)
        if lives:
            lives.popleft()
        self._num_tokens.pop(request, None)

    def num_prompt(self, request: str) -> int:
        """Tokens in the prompt of the request that has this ID now; 0 if none has."""
        lives = self._lives.get(request)
        return self.prefixes.num_prompt(lives[0]) if lives else 0

    def unfinished(self) -> list[str]:
        """IDs of requests that had come before the last `run` ended and have neither finished nor been aborted."""
        num_adds = self._num_adds_by_run[self._num_runs - 1] if self._num_runs else 0
        return [request for request, lives in self._lives.items() if lives and lives[0] < num_adds]

    @property
    def waits_for_outside(self) -> bool:
        """Whether the last `run` ended with the engine paused, or with a load under way: nobody has to get on then."""
        is_paused = self._num_runs > 0 and self._paused_by_run[self._num_runs - 1]
        return is_paused or self.loads_under_way

    @property
    def loads_under_way(self) -> bool:
        """Whether somebody holds blocks for a load that has not arrived."""
        return any(stay.loads for stay in self.stays.values())

    def _look_again(self, record: Scheduled) -> None:
        """Blocks whose load failed for somebody else must hold their content by the time they are read."""
        for request in record.scheduled:
            for entry in self._doubted.pop(request, ()):
                if entry.stay is self.stays.get(request):
                    self.hits.append((entry, self.contents[entry.block]))

    def _void_states(self, stay: Stay, num_tokens: int) -> None:
        """States after more than the first `num_tokens` tokens were computed from what was not there."""
        groups = {group.index for group in self._state_groups}
        for block, content in enumerate(self.contents):
            if content is not None and content.stay is stay and content.until > num_tokens and content.group in groups:
                self.contents[block] = content._replace(until=_NO_STATE, since=None)

    def _find_missing(self, stay: Stay) -> None:
        """What a stay goes on from after its load failed: tokens that the next one attends to, or the state before it."""
        for group in self.groups:
            table = self.tables[stay.request][group.index]
            if group.holds_states:
                source = stay.sources.get(group.index, NULL)
                content = self.contents[source]
                is_there = content is not None and content.stay is stay and content.until == stay.num_computed
                if stay.num_computed and not is_there:
                    position = group.last_position(stay.num_computed)
                    self.missing.append((Entry(stay, group.index, position, source), stay.num_computed))
            elif not group.replay_window:
                for position in range(group.last_position(stay.num_computed) + 1):
                    if table[position] == NULL and not group.may_be_null(position, stay.num_computed, stay.num_prompt):
                        self.missing.append((Entry(stay, group.index, position, NULL), stay.num_computed))

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
        return self._new_stay(request, 0, 0, 0)

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
            if group.holds_states:
                self._change_states(stay, group, None if old is None else old[group.index], table)
            elif old is None:
                self._attach(stay, group, table, 0)
            elif old[group.index] != table:
                self._change_table(stay, group, old[group.index], table)
            room = min(room, group.room(table, self.prefixes.num_encoder(stay.request_index)))
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
            self.nulls.append((stay, group.index, position, stay.num_reached))
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
                self.nulls.append((stay, index, position, stay.num_reached))
                continue
            num_holders[block] += 1
            entry = Entry(stay, index, position, block)
            if position < num_hits:
                self.hits.append((entry, contents[block]))
            if (position + 1) * group.block_size > stay.num_local or position >= num_hits:
                self.fresh.append(entry)  # a block that local tokens only begin is written on by this stay
                contents[block] = Content(stay, index, position)

    def _change_states(self, stay: Stay, group: GroupView, old: Table | None, table: Table) -> None:
        """Blocks of states may move within the table. Of what was there at the admission, the last state must be held."""
        before = old or []
        found = group.last_position(stay.num_found) if old is None else -1
        for block in before:
            self._release(block)
        for position, block in enumerate(table):
            if block == NULL:
                continue
            self.num_holders[block] += 1
            if block in before and (before[position : position + 1] == [block] or self._is_own(stay, block)):
                continue
            entry = Entry(stay, group.index, position, block)
            if position == found and not stay.num_external:
                self.hits.append((entry, self.contents[block]))
                if stay.num_local % group.block_size == 0:
                    continue  # a whole block is shared; one that local tokens only begin is the stay's own copy
            self.fresh.append(entry)
            is_there = position == found and not stay.loads
            self.contents[block] = Content(stay, group.index, position, stay.num_found if is_there else _NO_STATE)
        if found >= 0:
            stay.sources[group.index] = table[found] if found < len(table) else NULL

    def _is_own(self, stay: Stay, block: int) -> bool:
        """Whether a block that has moved in a stay's table moved with what it holds. One that was hit does not move: it was
        let go and taken anew."""
        content = self.contents[block]
        return content is not None and content.stay is stay

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
        elif (self.fresh or self._rewritten) and self._keys:
            written = {entry.block for entry in self.fresh} | self._rewritten
            self.new_keys.extend(link for link in self._keys if link[3] in written)

    def _take_events(self, events: Sequence[tuple[str, int, int, int]]) -> None:
        """Each stored entry is one link, each removed one a link less. Where all were cleared in between, the order within
        the batch is unknown, so the links that are there now are taken as they are."""
        self.is_told = True
        for kind, *key in events:
            if kind == "cleared":
                self.unbalanced.clear()
                return
            self._count(key[0], key[1], key[2], 1 if kind == "stored" else -1)

    def _count(self, group: int, request: int, num_tokens: int, change: int) -> None:
        key = (group, request, num_tokens)
        self.unbalanced[key] += change
        if not self.unbalanced[key]:
            del self.unbalanced[key]

    def _take_keys(self, keys: Sequence[CachedKey]) -> None:
        links = {(group, request, num, block) for group, request, num, blocks in keys for block in blocks}
        written = {entry.block for entry in self.fresh} | self._rewritten
        self.new_keys.extend(links - self._keys)
        if written:
            self.new_keys.extend(link for link in links & self._keys if link[3] in written)
        if self._watches_events:
            for group, request, num, _ in links - self._keys:
                self._count(group, request, num, -1)
            for group, request, num, _ in self._keys - links:
                self._count(group, request, num, 1)
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
        return f"holds {self.what(content)}" + ("" if names == [content.stay.request] else held)

    def what(self, content: Content) -> str:
        """What a content is, and whose: "tokens [0, 16) of request A"."""
        stay, group = content.stay, self.groups[content.group]
        if group.holds_states:
            state = f"the state after {content.until} tokens" if content.until > 0 else "no state yet"
            return f"{state} of request {stay.request}"
        if not group.holds_tokens:
            return f"the ring of request {stay.request}"
        start = content.position * group.block_size
        end = min(start + group.block_size, max(content.num_tokens, start))
        tokens = token_range(start, end) if end > start else f"no token yet from {start} on"
        return f"{tokens} of request {stay.request}"

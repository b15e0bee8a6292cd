"""A trace becomes a scenario and a history: what was done to the engine, and what it did, in our own schemas.

The scenario has an `add` for each request and the two halves of each step as they came; the history has what the probe
saw of each. So a recorded server goes through the same laws, the same comparison and the same reports as any other run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from diff_tests.live.children import Child
from diff_tests.live.geometry import Geometry, GeometryError, connector_of, geometry_of
from diff_tests.live.prompts import prompts
from diff_tests.live.trace import (
    AddRecord,
    AllocRecord,
    AskRecord,
    BoundRecord,
    Connector,
    ConnectorRecord,
    EndRecord,
    Line,
    LiveRequest,
    LoadedRecord,
    MetaRecord,
    Pairs,
    RaisedRecord,
    ResetRecord,
    Selected,
    StateRecord,
    StepRecord,
    Trace,
    TraceError,
    UpdateRecord,
    printable,
)
from diff_tests.live.workers import Worker
from oracle.contracts import Contract, contract_for, keeps_content, restores_windows
from sim.geometry import block_sizes, effective_block_size, replay_window
from sim.history import Act, Acted, GroupInfo, History, Scheduled, Selection, Selections, Start, Tables, Updated
from sim.scenario import Abort, Add, AnyStep, LoadDone, ResetPrefixCache, Scenario, Schedule, Update

_ABORTED = "FINISHED_ABORTED"
_ERROR = "FINISHED_ERROR"


@dataclass
class Rebuilt:
    """A recorded run in our words.

    places: for each record of the history, the line of the trace that it comes from. gaps: why the model cannot follow,
    from which step on (0: at all). others: what workers besides the first received, by rank and step; other_acts: the order
    in which they loaded and computed, where it was seen. computed_at_end: tokens by request. ids: vLLM's request IDs by
    name; names: by number and by ID. children: the connectors within a MultiConnector, if several are probed.
    """

    scenario: Scenario
    history: History
    places: list[str]
    geometry: Geometry
    contract: Contract | None
    gaps: list[tuple[int, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    others: dict[int, dict[int, Selections | None]] = field(default_factory=dict)
    other_acts: dict[int, dict[int, list[Act]]] = field(default_factory=dict)
    computed_at_end: dict[str, int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    has_beginning: bool = True
    children: list[Child] = field(default_factory=list)
    requires_kv_delivery: bool = True

    @property
    def is_alone(self) -> bool:
        """Whether no other child of a MultiConnector is probed."""
        return not self.children

    @property
    def restores_windows(self) -> bool:
        """Whether loads bring the last window of groups that are not cached; see ConnectorRule."""
        contracts = [child.contract for child in self.children] or [self.contract]
        return all(restores_windows(contract) for contract in contracts)

    def by_name(self, selected: dict[str, Any]) -> dict[str, Any]:
        """Metadata with requests by name, whichever side it is from."""
        return {self.names.get(key, key): value for key, value in selected.items()}


def rebuild(trace: Trace) -> Rebuilt:
    """Raises TraceError where a line does not go with those before."""
    return _Rebuilder(trace).run()


@dataclass
class _Life:
    """A request while it lives. known: tokens; digests: of its whole hash blocks."""

    name: str
    add: AddRecord | LiveRequest
    known: int
    digests: list[str]
    num_outputs: int = 0
    ended: bool = False
    has_stopped: bool = False
    was_admitted: bool = False


class _Rebuilder:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._lives: dict[int, _Life] = {}
        self._order: list[int] = []
        self._names_by_id: dict[str, str] = {}
        self._taken: set[str] = set()
        self._tables: dict[int, list[list[int]]] = {}
        self._num_blocks = trace.start.num_blocks
        self._hash_block_size: int | None = None
        self._steps: list[AnyStep | int] = []  # a number stands for the `add` of that request
        self._history: History = []
        self._places: list[str] = []
        self._gaps: list[tuple[int, str]] = []
        self._computed_at_end: dict[str, int] = {}
        self._notes: list[str] = []
        self._asked: list[tuple[int, int, int | None]] = []
        self._external: dict[int, int] = {}
        self._loaded_now: list[int] = []
        self._finished: list[tuple[int, int]] = []
        self._scheduled_now: Pairs = []
        self._new_now: Pairs = []
        self._step = 0
        self._updates = 0
        self._has_beginning = True
        self._is_alone = True
        self._workers = [Worker(stream) for stream in trace.workers]
        self._children: dict[int, Child] = {}

    def run(self) -> Rebuilt:
        self._look_ahead()
        geometry = self._geometry()
        # The contract depends on groups and connector alone. Of several connectors none answers for the engine.
        bare = Scenario(engine=geometry.engine, connector=geometry.connector, groups=geometry.groups, steps=())
        contract = _contract(bare, geometry) if self._is_alone else None
        if not self._is_alone:
            self._children = {
                c: Child(c, about.name, _contract(replace(bare, connector=connector_of(about)), geometry))
                for c, about in self._connectors.items()
            }
        contracts = [child.contract for child in self._children.values()] or [contract]
        self._restores_windows = geometry.rules.loads_may_restore_windows and all(map(restores_windows, contracts))
        self._replay_window = replay_window(geometry.groups)
        self._begin(bare, geometry)
        for line in self._trace.scheduler.lines[1:]:
            self._take(line, contract)
        scenario = replace(bare, steps=self._scenario_steps())
        for child in self._children.values():
            self._join_workers(child)
        gaps = [(0, gap) for gap in geometry.gaps] + self._gaps
        # Of several connectors each looks at its own part of every rank.
        other_workers = [] if self._children else self._workers[1:]
        return Rebuilt(
            scenario=scenario,
            history=self._history,
            places=self._places,
            geometry=geometry,
            contract=contract,
            gaps=gaps,
            notes=self._notes,
            others={worker.rank: self._received_by(worker) for worker in other_workers},
            other_acts={worker.rank: worker.acts for worker in other_workers},
            computed_at_end=self._computed_at_end,
            ids={life.name: life.add.id for life in self._lives.values()},
            names={
                **{str(n): life.name for n, life in self._lives.items()},
                **{life.add.id: life.name for life in self._lives.values()},
            },
            has_beginning=self._has_beginning,
            children=list(self._children.values()),
            requires_kv_delivery=self._trace.start.connector.requires_kv_delivery,
        )

    def _geometry(self) -> Geometry:
        rows = {layer: rows for worker in self._workers for layer, rows in worker.rows_per_block.items()}
        try:
            return geometry_of(self._trace.start, self._num_blocks, rows)
        except GeometryError as error:
            raise TraceError(self._trace.scheduler.lines[0].path, 1, str(error)) from None

    # -- the beginning -------------------------------------------------------------------------------------------------

    def _look_ahead(self) -> None:
        """The size of the pool and of a hash block are told after the start."""
        for line in self._trace.scheduler.lines:
            record = line.record
            if isinstance(record, (BoundRecord, StateRecord)):
                self._num_blocks = record.num_blocks or self._num_blocks
                self._hash_block_size = record.hash_block_size or self._hash_block_size
        self._connectors: dict[int, Connector | ConnectorRecord] = {0: self._trace.start.connector}
        others = [line.record for line in self._trace.scheduler.lines if isinstance(line.record, ConnectorRecord)]
        self._connectors.update((record.c, record) for record in others)
        holders = [about.name for about in self._connectors.values() if about.holds_blocks]
        self._gaps += [(0, f"{name} may hold blocks of the pool itself") for name in holders]
        self._is_alone = not any(isinstance(line.record, MetaRecord) for line in self._trace.scheduler.lines)
        first = self._trace.scheduler.start
        if first.part > 0:
            self._has_beginning = False
            self._notes.append("the first parts of the trace are gone: only selection, routing and fills are judged")
            self._gaps.append((0, "the beginning of the trace is gone"))

    def _begin(self, scenario: Scenario, geometry: Geometry) -> None:
        start = self._trace.start
        workers = [Worker(stream, c) for stream in self._trace.workers for c in self._connectors]
        looked_at = {layer for worker in workers for layer in worker.looked_at}
        scheduler_block_size, hash_block_size = block_sizes(scenario, geometry.rules)
        groups = [
            GroupInfo(
                kind=group.kind,
                block_size=effective_block_size(group, geometry.engine.dcp, geometry.rules),
                layers=[layer for layer in traced.layers if layer in looked_at],
            )
            for group, traced in zip(geometry.groups, start.groups, strict=True)
        ]
        record = Start(
            source="trace",
            release=start.vllm,
            connector=start.connector.name,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=self._hash_block_size or hash_block_size,
            groups=groups,
            sees=("tables",),
            tables={},
        )
        self._hash_block_size = self._hash_block_size or hash_block_size
        self._note(record, self._trace.scheduler.lines[0])

    def _note(self, record: Any, line: Line) -> None:
        self._history.append(record)
        self._places.append(line.place)

    # -- record by record ----------------------------------------------------------------------------------------------

    def _take(self, line: Line, contract: Contract | None) -> None:
        record = line.record
        if isinstance(record, AddRecord):
            self._add(record, line)
        elif isinstance(record, StateRecord):
            self._state(record, line)
        elif isinstance(record, AskRecord):
            self._ask(record, line)
        elif isinstance(record, AllocRecord):
            name = self._life(record.n, line).name
            if self._children:
                self._child(record.c, line).external[name] = record.external
            self._external[record.n] = max(record.external, self._external.get(record.n, 0))
        elif isinstance(record, StepRecord):
            self._scheduled(record, line, contract)
        elif isinstance(record, MetaRecord):
            self._meta(record, line)
        elif isinstance(record, LoadedRecord):
            self._loaded(record, line)
        elif isinstance(record, EndRecord):
            self._end(record, line)
        elif isinstance(record, UpdateRecord):
            self._updated(record, line)
        elif isinstance(record, ResetRecord):
            # It succeeds only when no block is held: whoever ran was sent back.
            self._steps.append(ResetPrefixCache(running=bool(self._tables)))
            self._tables.clear()
            self._note(Acted(step=self._step, action="reset_prefix_cache", tables=self._named_tables()), line)
        elif isinstance(record, RaisedRecord):
            self._gap(f"the connector raised {record.type} in {record.hook}", line)

    def _gap(self, reason: str, line: Line) -> None:
        self._gaps.append((self._step, f"{reason} ({line.place})"))

    def _life(self, n: int, line: Line) -> _Life:
        life = self._lives.get(n)
        if life is None or life.ended:
            what = "has ended already" if life else "was never added"
            raise TraceError(line.path, line.number, f"request {n} {what}")
        return life

    def _add(self, record: AddRecord, line: Line) -> None:
        if record.n in self._lives:
            raise TraceError(line.path, line.number, f"request {record.n} was added before")
        self._enter(record, record.prompt)
        if record.parts != ["text"]:
            self._gap(f"request {record.id} has {' and '.join(record.parts)}, which are not modelled", line)

    def _enter(self, record: AddRecord | LiveRequest, known: int) -> _Life:
        name = f"r{record.n}" if record.id.startswith("~") else printable(record.id)
        if name in self._taken:
            name = f"{name}#{record.n}"  # an ID may come again
        self._taken.add(name)
        self._names_by_id[record.id] = name
        life = self._lives[record.n] = _Life(name, record, known, list(record.prefix))
        self._order.append(record.n)
        self._steps.append(record.n)
        return life

    def _state(self, record: StateRecord, line: Line) -> None:
        """A later part begins. It tells nothing new unless it is the first that is left."""
        if self._step == 0:
            self._step, self._updates = record.k, record.updates
            for live in record.requests:
                life = self._enter(live, live.tokens)
                life.was_admitted = True
                if live.tables is not None:
                    self._tables[live.n] = [list(table) for table in live.tables]
            return
        if (record.k, record.updates) != (self._step, self._updates):
            raise TraceError(line.path, line.number, f"goes on at step {record.k}, but step {self._step} came before")

    def _ask(self, record: AskRecord, line: Line) -> None:
        self._life(record.n, line)
        answer, _ = record.answer
        if self._children:
            self._child(record.c, line).asked.append((self._lives[record.n].name, record.local, answer))
        if record.c and self._asked and self._asked[-1][0] == record.n:
            # MultiConnector asks one child after the other and takes the first that has tokens.
            n, local, before = self._asked[-1]
            unknown = before is None or answer is None
            self._asked[-1] = (n, local, None if unknown else before or answer)
            return
        self._asked.append((record.n, record.local, answer))

    def _child(self, c: int, line: Line) -> Child:
        child = self._children.get(c)
        if child is None:
            raise TraceError(line.path, line.number, f"of connector {c}, which the trace does not name")
        return child

    def _meta(self, record: MetaRecord, line: Line) -> None:
        part = self._child(record.c, line).parts.get(record.k)
        if part is None:
            raise TraceError(line.path, line.number, f"metadata of step {record.k}, which is step {self._step}'s place")
        part.selected = self._named(record.selected, line)

    def _loaded(self, record: LoadedRecord, line: Line) -> None:
        self._loaded_now += record.recving
        if record.failed or record.invalid:
            self._gap("a load failed", line)
        for n in record.sending:
            self._tables.pop(n, None)  # the connector held its blocks until now

    def _num_replayed(self, start: int, num_external: int) -> int:
        """Tokens of what was found that are computed again, so that the request starts before its end. A hit no longer
        than these is not taken."""
        is_restored = self._restores_windows and num_external > 0
        return 0 if start == 0 or is_restored else self._replay_window

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _scheduled(self, record: StepRecord, line: Line, contract: Contract | None) -> None:
        if record.k != self._step + 1:
            raise TraceError(line.path, line.number, f"step {record.k} follows step {self._step}; a line is missing")
        self._step = record.k
        lives = self._lives
        if record.scheduled is not None:
            self._scheduled_now = record.scheduled
        for n, _ in self._scheduled_now:
            self._life(n, line)
        for n in record.preempted:
            self._tables.pop(n, None)
        self._patch(record, line)
        starts = dict(record.start)
        fresh = [n for n in record.new if not lives[n].was_admitted]
        resumed = [n for n in (*record.new, *record.resumed) if lives[n].was_admitted]
        for n in fresh:
            lives[n].was_admitted = True
        admissions = dict.fromkeys(starts, 0)
        external = {**self._external, **{n: 0 for n in admissions if n not in self._external}}
        asked = {n: local for n, local, _ in self._asked}
        hits = {n: starts[n] + self._num_replayed(starts[n], external[n]) - external[n] for n in external if n in starts}
        hits.update((n, asked[n]) for n in external if n not in starts and n in asked)
        selected = self._named(record.selected, line) if self._is_alone else None
        step = Scheduled(
            step=self._step,
            scheduled=self._by_name(dict(self._scheduled_now)),
            admitted=[lives[n].name for n in fresh],
            resumed=[lives[n].name for n in resumed],
            preempted=sorted(lives[n].name for n in record.preempted if n in lives),
            hits=self._by_name(hits),
            external=self._by_name(external),
            zeroed=list(record.zeroed),
            copies=[(source, target) for source, target in record.copies],
            asked=[(lives[n].name, local, answer) for n, local, answer in self._asked],
            selected=selected,
            tables=self._named_tables(),
        )
        for child in self._children.values():
            child.schedule(self._step, dict.fromkeys(step.external, 0))
        if self._children:
            self._children[0].parts[self._step].selected = self._named(record.selected, line)
        elif self._workers:
            step.received = self._received(self._workers[0], self._step, selected)
            step.acts = self._workers[0].acts.get(self._step)
            step.written = self._workers[0].written(self._step, contract)
        self._asked, self._external = [], {}
        self._steps.append(Schedule(count=1))
        self._note(step, line)

    def _patch(self, record: StepRecord, line: Line) -> None:
        num_groups = len(self._trace.start.groups)
        for n, by_group in record.tables:
            self._life(n, line)
            old = self._tables.get(n) or [[] for _ in range(num_groups)]
            if len(by_group) != num_groups:
                reason = f"request {n} has tables of {len(by_group)} groups, the engine has {num_groups}"
                raise TraceError(line.path, line.number, reason)
            tables = [_patched(table, patches, line) for table, patches in zip(old, by_group, strict=True)]
            if any(tables):
                self._tables[n] = tables
            else:
                self._tables.pop(n, None)

    def _updated(self, record: UpdateRecord, line: Line) -> None:
        if record.k != self._updates + 1:
            reason = f"the output of step {record.k} follows that of step {self._updates}; a line is missing"
            raise TraceError(line.path, line.number, reason)
        if record.k > self._step:
            raise TraceError(line.path, line.number, f"the output of step {record.k} comes before the step")
        self._updates = record.k
        new_tokens = dict(self._finished)
        if record.new is not None:
            self._new_now = record.new
        for n, count in self._new_now:
            life = self._life(n, line)
            life.known += count
            life.num_outputs += count
            new_tokens[n] = count
        for n, digests in record.prefix:
            self._life(n, line).digests += digests
        finished = [self._lives[n].name for n, _ in self._finished]
        for n in self._loaded_now:
            if n in self._lives:
                self._steps.append(LoadDone(id=self._lives[n].name))
        update = Updated(
            step=record.k,
            finished=finished,
            new_tokens=self._by_name({n: count for n, count in new_tokens.items() if count}),
            tables=self._named_tables(),
        )
        self._finished, self._loaded_now = [], []
        self._steps.append(Update(count=1))
        self._note(update, line)

    def _end(self, record: EndRecord, line: Line) -> None:
        if record.c:
            self._gap("a connector keeps blocks of requests that have ended", line)
            return
        life = self._life(record.n, line)
        num_new = record.tokens - life.known
        if num_new < 0:
            raise TraceError(line.path, line.number, f"request {record.n} ends with {record.tokens} of {life.known} tokens")
        life.ended = True
        if record.computed is not None:
            self._computed_at_end[life.name] = record.computed
        life.known = record.tokens
        life.num_outputs += num_new
        life.digests += record.prefix
        if record.delayed:
            self._gap("a connector keeps blocks of requests that have ended", line)
        else:
            self._tables.pop(record.n, None)
        if record.status == _ABORTED:
            self._steps.append(Abort(id=life.name))
            self._note(Acted(step=self._step, action="abort", request=life.name, tables=self._named_tables()), line)
            return
        if record.status == _ERROR:
            self._gap(f"request {life.name} ended with an error", line)
        life.has_stopped = True
        self._finished.append((record.n, num_new))

    # -- the workers ---------------------------------------------------------------------------------------------------

    def _received(self, worker: Worker, step: int, selected: Selections | None) -> Selections | None:
        """What a rank was told in a step. Nothing at all, though it was told of later ones, is a loss."""
        line = worker.received.get(step)
        if line is None:
            return {} if step < worker.last_step and worker.first_step < step and selected else None
        return self._named(line.record.selected, line)

    def _join_workers(self, child: Child) -> None:
        """What each rank was told for one child, and did."""
        for stream in self._trace.workers:
            worker = Worker(stream, child.c)
            received = {step: self._received(worker, step, part.selected) for step, part in child.parts.items()}
            child.workers.append((worker, received))

    def _received_by(self, worker: Worker) -> dict[int, Selections | None]:
        scheduled = (record for record in self._history if isinstance(record, Scheduled))
        return {record.step: self._received(worker, record.step, record.selected) for record in scheduled}

    # -- names ---------------------------------------------------------------------------------------------------------

    def _by_name(self, values: dict[int, int]) -> dict[str, int]:
        return {self._lives[n].name: value for n, value in values.items()}

    def _named_tables(self) -> Tables:
        return {self._lives[n].name: tables for n, tables in self._tables.items()}

    def _named(self, selected: dict[str, Any], line: Line) -> Selections | None:
        """None for metadata of a form that says nothing of blocks."""
        if "form" in selected:
            return None
        named: Selections = {}
        for key, value in selected.items():
            try:
                entry = msgspec.convert(value, Selected)
            except msgspec.ValidationError as error:
                raise TraceError(line.path, line.number, f"selected.{key}: {error}") from None
            named[self._name_of(key)] = Selection(entry.groups, entry.tokens)
        return named

    def _name_of(self, key: str) -> str:
        """A request by number, as the scheduler has it, or by the ID, as a worker has it."""
        if key.isdecimal() and int(key) in self._lives:
            return self._lives[int(key)].name
        return self._names_by_id.get(key) or printable(key)

    # -- the scenario --------------------------------------------------------------------------------------------------

    def _scenario_steps(self) -> tuple[AnyStep, ...]:
        assert self._hash_block_size is not None
        lives = [self._lives[n] for n in self._order]
        tokens = prompts([(life.name, life.add.prompt, life.digests) for life in lives], self._hash_block_size)
        adds = {}
        for n in self._order:
            life = self._lives[n]
            known = tokens[life.name]
            adds[n] = Add(
                id=life.name,
                prompt=known.prompt,
                output=known.output,
                # Who stopped at a stop token ends there again.
                max_tokens=max(life.num_outputs, 1) if life.has_stopped else life.add.max_tokens,
                priority=life.add.priority,
                salt=life.add.salt,
                lora=life.add.lora,
                skip_cache=life.add.skip_cache,
            )
        return tuple(adds[step] if isinstance(step, int) else step for step in self._steps)


def _contract(scenario: Scenario, geometry: Geometry) -> Contract | None:
    """The connector's contract, unless it wants to know what is stored, which a trace does not tell."""
    contract = contract_for(scenario, geometry.rules)
    return None if keeps_content(contract) else contract


def _patched(table: Sequence[int], patches: Sequence[tuple[int, list[int]]], line: Line) -> list[int]:
    if not patches:
        return table  # type: ignore[return-value]  # shared with the record before, never changed in place
    ids = list(table)
    for position, blocks in patches:
        if position == -1:
            ids = list(blocks)
        elif 0 <= position <= len(ids):
            ids[position : position + len(blocks)] = blocks
        else:
            raise TraceError(line.path, line.number, f"a patch at position {position} of a table of {len(ids)} blocks")
    return ids

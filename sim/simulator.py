"""Runs a scenario through the model and writes its history."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from sim.connector import ConnectorRule
from sim.follow import FollowingScheduler, Observed
from sim.geometry import effective_block_size
from sim.history import (
    Acted,
    CachedKey,
    Failure,
    GroupInfo,
    History,
    Record,
    Scheduled,
    Start,
    StateRecord,
    Tables,
    Updated,
    is_pool_read,
)
from sim.pool import PredictedError
from sim.refusals import refusal
from sim.releases import NEWEST, Rules, rules_of
from sim.scenario import (
    STALL_STEPS,
    Abort,
    Add,
    AnyStep,
    LoadDone,
    LoadFailed,
    Pause,
    ResetPrefixCache,
    Run,
    Scenario,
    ScenarioError,
    Schedule,
    Step,
    Update,
)
from sim.scheduler import Plan, Scheduler

SEES = ("tables", "free", "refs", "keys", "deferred")


class Simulator:
    """The model of one scenario. `step` gives the next record of the history; `history` all of them.

    connector: how the scenario's connector answers, see `oracle.contracts`; without it nothing is external.
    Raises ScenarioError where the scenario asks for something that is not modelled.
    """

    def __init__(
        self,
        scenario: Scenario,
        rules: Rules | None = None,
        connector: ConnectorRule | None = None,
        observed: Observed | None = None,
        arrived: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        """observed: follow these decisions instead of making them; the connector's answers are among them. arrived:
        requests whose load is reported with the output of a step, by its number, beside those that the scenario names."""
        self.scenario = scenario
        self.rules = rules or rules_of(NEWEST)
        self.refusal = refusal(scenario, self.rules)
        if self.refusal is None:
            if observed is None:
                self.scheduler = Scheduler(scenario, self.rules, connector)
            else:
                self.scheduler = FollowingScheduler(scenario, self.rules, observed)
            self.pool = self.scheduler.kv.pool
        self._step_number = 0
        self._phase = "add"
        self._in_flight: deque[tuple[int, Plan]] = deque()
        self._max_left_in_flight = 1 if scenario.engine.async_scheduling else 0
        self._sent_version = -1
        self._sent_keys_version = -1
        self._sent_deferred: list[list[int]] | None = None
        self._arrived = arrived or {}
        self._records = self._run()

    def step(self) -> Record | None:
        """The next record, or None after the last."""
        return next(self._records, None)

    def history(self) -> History:
        """All records that are left."""
        return list(self._records)

    # -- the scenario's steps ------------------------------------------------------------------------------------------

    def _run(self) -> Iterator[Record]:
        if self.refusal is not None:
            yield self.refusal
            return
        yield self._start()
        try:
            for step in self.scenario.steps:
                self._phase = "add" if isinstance(step, Add) else "action"
                yield from self._do(step)
        except PredictedError as error:
            yield Failure(step=self._step_number, type=error.vllm_type, phase=self._phase, message=str(error))

    def _do(self, step: AnyStep) -> Iterator[Record]:
        match step:
            case Add():
                self.scheduler.add(step)
            case Step(count=count):
                for _ in range(count):
                    yield from self._engine_step()
            case Schedule(count=count):
                for _ in range(count):
                    yield self._schedule()
            case Update(count=count):
                for _ in range(min(count, len(self._in_flight))):
                    yield self._update()
            case Run(limit=limit):
                yield from self._run_until_idle(limit)
            case Abort(id=request_id):
                yield self._acted("abort", request_id, "done" if self.scheduler.abort(request_id) else "gone")
            case ResetPrefixCache(running=running):
                done = self.scheduler.reset_prefix_cache(running)
                yield self._acted("reset_prefix_cache", None, "done" if done else "refused")
            case Pause(what=what):
                self.scheduler.paused = what
            case LoadDone(id=request_id):
                self.scheduler.load_arrived(request_id)
            case LoadFailed(id=request_id, from_block=from_block):
                self.scheduler.load_failed(request_id, from_block, [plan for _, plan in self._in_flight])
            case _:
                raise ScenarioError("$.steps", f"steps of type {type(step).__name__} are not modelled")

    def _engine_step(self) -> Iterator[Scheduled | Updated]:
        """A synchronous engine processes a step's output at once, an asynchronous one after scheduling the next."""
        yield self._schedule()
        while len(self._in_flight) > self._max_left_in_flight:
            yield self._update()

    def _run_until_idle(self, limit: int) -> Iterator[Record]:
        num_empty = 0
        result = "idle"
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            for record in self._engine_step():
                yield record
                if isinstance(record, Scheduled):
                    num_empty = 0 if record.scheduled else num_empty + 1
            if num_empty == STALL_STEPS:
                result = "stalled"
                break
        else:
            if self.scheduler.has_unfinished:
                result = "limit"
        while self._in_flight:
            yield self._update()
        yield self._acted("run", None, result)

    def _schedule(self) -> Scheduled:
        self._step_number += 1
        self._phase = "schedule"
        plan = self.scheduler.schedule()
        self._in_flight.append((self._step_number, plan))
        return self._scheduled_record(plan)

    def _update(self) -> Updated:
        number, plan = self._in_flight.popleft()
        self._phase = "update"
        for request_id in self._arrived.get(number, ()):
            self.scheduler.load_arrived(request_id)
        num_ended_loads = len(self.scheduler.ended_loads)
        arrived = list(self.scheduler.reported_loads)
        lost = sorted(self.scheduler.blocks_lost_with(plan))
        finished, new_tokens = self.scheduler.update(plan)
        record = Updated(
            step=number, finished=finished, new_tokens=new_tokens, arrived=arrived, lost=lost, events=self._events()
        )
        if finished or len(self.scheduler.ended_loads) < num_ended_loads:
            record.tables = self._tables()
        self._add_state(record)
        return record

    def _acted(self, action: str, request_id: str | None, result: str) -> Acted:
        record = Acted(step=self._step_number, action=action, request=request_id, result=result)
        if action != "run":
            record.tables = self._tables()
        self._add_state(record)
        return record

    # -- records -------------------------------------------------------------------------------------------------------

    def _start(self) -> Start:
        kv = self.scheduler.kv
        record = Start(
            source="model",
            release=self.rules.release,
            connector=self.scenario.connector.name if self.scenario.connector else None,
            scheduler_block_size=kv.scheduler_block_size,
            hash_block_size=kv.prefixes.hash_block_size,
            groups=[
                GroupInfo(
                    kind=group.kind,
                    block_size=effective_block_size(group, self.scenario.engine.dcp, self.rules),
                    layers=[f"g{index}.l{layer}" for layer in range(group.num_layers)],
                )
                for index, group in enumerate(self.scenario.groups)
            ],
            sees=SEES,
            tables={},
        )
        self._add_state(record)
        return record

    def _scheduled_record(self, plan: Plan) -> Scheduled:
        record = Scheduled(
            step=self._step_number,
            scheduled={request.id: num_tokens for request, num_tokens in plan.scheduled.items()},
            admitted=plan.admitted,
            resumed=plan.resumed,
            preempted=sorted(plan.preempted),
            hits=plan.hits,
            external=plan.external,
            zeroed=plan.zeroed,
            copies=plan.copies,
            asked=plan.asked if self.scenario.connector else None,
            tables=self._tables(),
        )
        self._add_state(record)
        return record

    def _tables(self) -> Tables:
        return {request.id: [table.copy() for table in request.tables] for request in self.scheduler.holders()}

    def _add_state(self, record: StateRecord) -> None:
        if not is_pool_read(self.pool.num_blocks, record):
            return
        deferred = [blocks.copy() for _, blocks in self.scheduler.deferred]
        if deferred != self._sent_deferred:
            self._sent_deferred = record.deferred = deferred
        if self.pool.version == self._sent_version:
            return
        self._sent_version = self.pool.version
        record.free = self.pool.free_order()
        record.refs = self.pool.refs.copy()
        if self.pool.keys_version != self._sent_keys_version:
            self._sent_keys_version = self.pool.keys_version
            record.keys = self._cached_keys()

    def _events(self) -> list[tuple[str, int, int, int]] | None:
        """KV events since the last call, as (kind, group, request index, tokens), in no particular order."""
        if self.pool.events is None:
            return None
        num_groups = len(self.scenario.groups)
        owners = self.scheduler.kv.prefixes.first_owners
        events = [
            (kind, -1, -1, -1) if kind == "cleared" else (kind, key % num_groups, *owners[key // num_groups])
            for kind, key in self.pool.events
        ]
        self.pool.events.clear()
        return sorted(events)

    def _cached_keys(self) -> list[CachedKey]:
        num_groups = len(self.scenario.groups)
        owners = self.scheduler.kv.prefixes.first_owners
        keys = []
        for key, holders in self.pool.links():
            prefix, group_index = divmod(key, num_groups)
            keys.append(CachedKey(group_index, *owners[prefix], holders))
        keys.sort()
        return keys

"""Runs a scenario through the model and writes its history."""

from __future__ import annotations

from collections.abc import Iterator

from sim.connector import ConnectorRule
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
from sim.pool import OutOfBlocksError
from sim.refusals import refusal
from sim.releases import NEWEST, Rules, rules_of
from sim.scenario import STALL_STEPS, Abort, Add, ResetPrefixCache, Run, Scenario, ScenarioError, Step
from sim.scheduler import Plan, Scheduler

SEES = ("tables", "free", "refs", "keys")


# Engine settings that the model knows one value of.
_ONLY = {"policy": "fcfs", "async_scheduling": False, "speculative": None}


def _check_modelled(scenario: Scenario) -> None:
    """Raises ScenarioError for a setting that the model would otherwise silently ignore."""
    for name, value in _ONLY.items():
        if getattr(scenario.engine, name) != value:
            raise ScenarioError(f"$.engine.{name}", f"only {value!r} is modelled")


class Simulator:
    """The model of one scenario. `step` gives the next record of the history; `history` all of them.

    connector: how the scenario's connector answers, see `oracle.contracts`; without it nothing is external.
    Raises ScenarioError where the scenario asks for something that is not modelled.
    """

    def __init__(self, scenario: Scenario, rules: Rules | None = None, connector: ConnectorRule | None = None) -> None:
        self.scenario = scenario
        self.rules = rules or rules_of(NEWEST)
        _check_modelled(scenario)
        self.refusal = refusal(scenario, self.rules)
        if self.refusal is None:
            self.scheduler = Scheduler(scenario, self.rules, connector)
            self.pool = self.scheduler.kv.pool
        self._step_number = 0
        self._sent_version = -1
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
                if isinstance(step, Add):
                    self.scheduler.add(step)
                elif isinstance(step, Step):
                    for _ in range(step.count):
                        yield from self._engine_step()
                elif isinstance(step, Run):
                    yield from self._run_until_idle(step.limit)
                else:
                    yield self._act(step)
        except OutOfBlocksError as error:
            yield Failure(step=self._step_number, type="ValueError", phase="schedule", message=str(error))

    def _run_until_idle(self, limit: int) -> Iterator[Record]:
        num_empty = 0
        result = "idle"
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            scheduled, updated = self._engine_step()
            yield scheduled
            yield updated
            num_empty = 0 if scheduled.scheduled else num_empty + 1
            if num_empty == STALL_STEPS:
                result = "stalled"
                break
        else:
            if self.scheduler.has_unfinished:
                result = "limit"
        yield Acted(step=self._step_number, action="run", result=result)

    def _engine_step(self) -> tuple[Scheduled, Updated]:
        self._step_number += 1
        plan = self.scheduler.schedule()
        scheduled = self._scheduled_record(plan)
        finished, new_tokens = self.scheduler.update(plan)
        updated = Updated(step=self._step_number, finished=finished, new_tokens=new_tokens)
        if finished:
            updated.tables = self._tables()
        self._add_state(updated)
        return scheduled, updated

    def _act(self, step: object) -> Acted:
        if isinstance(step, Abort):
            done = self.scheduler.abort(step.id)
            record = Acted(step=self._step_number, action="abort", request=step.id, result="done" if done else "gone")
        elif isinstance(step, ResetPrefixCache):
            done = self.scheduler.reset_prefix_cache(step.running)
            record = Acted(step=self._step_number, action="reset_prefix_cache", result="done" if done else "refused")
        else:
            raise ScenarioError("$.steps", f"steps of type {type(step).__name__} are not modelled")
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
                    layers=[f"g{index}.l{layer}" for layer in range(group.layers)],
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
            zeroed=self.scheduler.kv.drain_zeroed(),
            asked=plan.asked if self.scenario.connector else None,
            tables=self._tables(),
        )
        self._add_state(record)
        return record

    def _tables(self) -> Tables:
        return {request.id: [table.copy() for table in request.tables] for request in self.scheduler.running}

    def _add_state(self, record: StateRecord) -> None:
        if self.pool.version == self._sent_version or not is_pool_read(self.pool.num_blocks, record):
            return
        self._sent_version = self.pool.version
        record.free = self.pool.free_order()
        record.refs = self.pool.refs.copy()
        record.keys = self._cached_keys()

    def _cached_keys(self) -> list[CachedKey]:
        num_groups = len(self.scenario.groups)
        owners = self.scheduler.kv.prefixes.first_owners
        keys = []
        for key, holders in self.pool.links.items():
            prefix, group_index = divmod(key, num_groups)
            keys.append(CachedKey(group_index, *owners[prefix], holders.copy()))
        keys.sort()
        return keys

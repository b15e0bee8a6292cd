"""What a campaign exercised: behaviours counted from scenarios and observed histories.

A behaviour that stays at zero is a part of vLLM that the campaign has not tested; the table at the end says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sim.geometry import effective_block_size
from sim.history import Acted, CachedKey, Failure, History, Refusal, Scheduled, Tables, Updated
from sim.releases import Rules
from sim.scenario import Add, AnyGroup, Direct, Scenario

KINDS = ("full", "mla", "sliding_window", "circular", "mamba")

BEHAVIOURS: tuple[str, ...] = (
    "cases of the scheduler driver",
    "cases of the direct driver",
    "cases with a connector",
    *(f"group: {kind}" for kind in KINDS),
    "several groups",
    "mixed block sizes",
    "decode context parallelism",
    "several layers",
    "fp8",
    "mixed element types",
    "kernel blocks smaller than blocks",
    "prefix caching off",
    "retention: dense",
    "retention: interval",
    "steps",
    "admissions",
    *(f"local hit: {kind}" for kind in ("full", "mla", "sliding_window")),
    "local hit: part of the full blocks",
    "external tokens",
    "external tokens after a local hit",
    "evictions",
    "preemptions",
    "resumptions",
    "resumptions with a local hit",
    "nulls in a table",
    "prefill in chunks",
    "admissions refused for now",
    "blocks zeroed",
    "aborts: running",
    "aborts: waiting",
    "aborts: already ended",
    "resets: done",
    "resets: refused",
    "request IDs used again",
    "direct: local tokens end inside a block",
    "direct: nulls in a table",
    "fills judged",
    "runs that stalled",
    "refusals",
    "exceptions",
)


class Coverage:
    """Counts behaviours over many cases. `counts` has an entry for each of BEHAVIOURS."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(BEHAVIOURS, 0))

    def add(self, scenario: Scenario, history: History, rules: Rules) -> None:
        """Counts what one case showed."""
        if isinstance(history[0], Refusal):
            self.counts["refusals"] += 1
            return
        self.counts.update(_settings(scenario))
        if scenario.driver == "direct":
            self._count_direct(scenario)
        _HistoryCounter(self.counts, scenario, rules).count(history)

    @property
    def at_zero(self) -> list[str]:
        """What was never seen."""
        return [name for name in BEHAVIOURS if not self.counts[name]]

    def _count_direct(self, scenario: Scenario) -> None:
        for step in scenario.steps:
            if isinstance(step, Direct):
                sizes = [group.block for group in scenario.groups]
                self.counts["direct: local tokens end inside a block"] += any(step.local % size for size in sizes)
                self.counts["direct: nulls in a table"] += any(0 in table for table in step.tables)


def _settings(scenario: Scenario) -> Iterable[str]:
    """What the scenario alone says."""
    engine, groups = scenario.engine, scenario.groups
    yield f"cases of the {scenario.driver} driver"
    for kind in {group.kind for group in groups}:
        yield f"group: {kind}"
    settings = (
        ("cases with a connector", scenario.connector is not None),
        ("several groups", len(groups) > 1),
        ("mixed block sizes", len({group.block for group in groups}) > 1),
        ("decode context parallelism", engine.dcp > 1),
        ("several layers", any(group.layers > 1 for group in groups)),
        ("fp8", any(group.dtype.startswith("fp8") for group in groups)),
        ("mixed element types", len({group.dtype for group in groups}) > 1),
        ("kernel blocks smaller than blocks", any(group.kernel_block not in (None, group.block) for group in groups)),
        ("prefix caching off", not engine.prefix_caching),
        ("retention: dense", engine.retention_interval is None),
        ("retention: interval", bool(engine.retention_interval)),
    )
    yield from (name for name, holds in settings if holds)
    ids = [step.id for step in scenario.steps if isinstance(step, Add)]
    if len(set(ids)) < len(ids):
        yield "request IDs used again"


class _HistoryCounter:
    """Walks one history."""

    def __init__(self, counts: Counter[str], scenario: Scenario, rules: Rules) -> None:
        self.counts = counts
        self.groups: list[tuple[AnyGroup, int]] = [
            (group, effective_block_size(group, scenario.engine.dcp, rules)) for group in scenario.groups
        ]
        self.num_prompt_tokens = {step.id: step.num_prompt_tokens for step in scenario.steps if isinstance(step, Add)}
        self.tables: Tables = {}
        self.keys: list[CachedKey] = []
        self.partial: dict[str, int] = {}
        self.waiting: set[str] = set()

    def count(self, history: History) -> None:
        for record in history:
            if isinstance(record, Scheduled):
                self._count_scheduled(record)
            elif isinstance(record, Updated):
                self._count_updated(record)
            elif isinstance(record, Acted):
                self._count_acted(record)
            elif isinstance(record, Failure):
                self.counts["exceptions"] += 1

    def _count_scheduled(self, record: Scheduled) -> None:
        counts = self.counts
        if record.tables is not None:
            self.tables = record.tables
            counts["nulls in a table"] += any(0 in table for tables in record.tables.values() for table in tables)
        counts["steps"] += 1
        counts["admissions"] += len(record.admitted)
        counts["resumptions"] += len(record.resumed)
        counts["preemptions"] += len(record.preempted)
        counts["blocks zeroed"] += len(record.zeroed)
        self._count_waiting(record)
        counts["fills judged"] += len(record.written or ())
        for request_id, num_local in record.hits.items():
            if num_local:
                self._count_hit(record, request_id, num_local)
        for request_id, num_external in record.external.items():
            if num_external:
                counts["external tokens"] += 1
                counts["external tokens after a local hit"] += bool(record.hits.get(request_id))
        self._count_evictions(record.keys)
        self.partial = record.scheduled

    def _count_waiting(self, record: Scheduled) -> None:
        """Steps in which somebody known to wait was not let in: preempted before, or asked about and then refused."""
        admitted = {*record.admitted, *record.resumed}
        refused = {request_id for request_id, _, _ in record.asked or () if request_id not in admitted}
        self.counts["admissions refused for now"] += bool(refused or self.waiting - admitted)
        self.waiting = (self.waiting - admitted) | set(record.preempted)

    def _count_hit(self, record: Scheduled, request_id: str, num_local: int) -> None:
        self.counts["resumptions with a local hit"] += request_id in record.resumed
        num_prompt_tokens = self.num_prompt_tokens.get(request_id, 0)
        largest = max(size for _, size in self.groups)
        self.counts["local hit: part of the full blocks"] += num_local + largest < num_prompt_tokens
        tables = self.tables.get(request_id)
        if tables is None:
            return
        for (group, size), table in zip(self.groups, tables, strict=True):
            behaviour = f"local hit: {group.kind}"
            if behaviour in self.counts and any(table[: num_local // size]):  # floor: whole blocks of the hit
                self.counts[behaviour] += 1

    def _count_evictions(self, keys: list[CachedKey] | None) -> None:
        """A key that is gone after scheduling: its free block was taken for something else."""
        if keys is None:
            return
        if self.keys:
            now = {key[:3] for key in keys}
            self.counts["evictions"] += sum(key[:3] not in now for key in self.keys)
        self.keys = keys

    def _count_updated(self, record: Updated) -> None:
        self.counts["prefill in chunks"] += sum(name not in record.new_tokens for name in self.partial)
        if record.tables is not None:
            self.tables = record.tables
        if record.keys is not None:
            self.keys = record.keys

    def _count_acted(self, record: Acted) -> None:
        counts = self.counts
        if record.action == "abort":
            self.waiting.discard(record.request or "")
            gone = record.result == "gone"
            where = "already ended" if gone else "running" if record.request in self.tables else "waiting"
            counts[f"aborts: {where}"] += 1
        elif record.action == "reset_prefix_cache":
            counts[f"resets: {record.result}"] += 1
        elif record.action == "run" and record.result == "stalled":
            counts["runs that stalled"] += 1
        if record.tables is not None:
            self.tables = record.tables
        if record.keys is not None:
            self.keys = record.keys

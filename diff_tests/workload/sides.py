"""What a trace can be played to, under one interface: the model, and in `vllm_target` the real scheduler."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from diff_tests.workload.prompts import TracePrefixes
from diff_tests.workload.trace import Row
from sim.groups.full import FullManager
from sim.releases import Rules
from sim.request import Request
from sim.scenario import Add, Scenario
from sim.scheduler import Scheduler

FULL_EVERY_STEPS = 16
"""How often all tables and the whole free queue go into the digest, instead of what a step changed."""


class Lookup(NamedTuple):
    """What one admission found. request: index of the row. Counts in tokens; preempted: it had been admitted before."""

    request: int
    num_tokens: int
    num_local: int
    num_external: int
    preempted: bool


class StepFacts(msgspec.Struct, frozen=True, array_like=True):
    """One engine step, or in order mode one request. scheduled: (row index, tokens) in order; finished: row indexes.

    num_free: blocks in the free queue after scheduling; digest: of the block IDs that the requests of this step got, now
    and then of every table and the whole free queue.
    """

    scheduled: list[tuple[int, int]]
    lookups: list[Lookup]
    preempted: list[int]
    finished: list[int]
    num_free: int
    digest: int


class Side(Protocol):
    """Somebody who plays a trace. Row indexes name requests."""

    def add(self, index: int, row: Row, chain: list[int]) -> None:
        """A request arrives. chain: its chained hashes."""

    def step(self) -> StepFacts:
        """One engine step: schedule, and process the output."""

    def look_up(self, index: int, row: Row, chain: list[int]) -> StepFacts:
        """Order mode: one request is looked up, gets its blocks, and gives them back."""


def digest_of(tables: Iterable[Sequence[Sequence[int]]], free: Sequence[int] = ()) -> int:
    """A checksum over block IDs: tables by request and group, then the free queue. The same on every machine."""
    value = 0
    for table in tables:
        for block_ids in table:
            value = zlib.crc32(array("q", [len(block_ids), *block_ids]).tobytes(), value)
    return zlib.crc32(array("q", free).tobytes(), value) if free else value


def recent(tables: Sequence[Sequence[int]], num_scheduled: int) -> list[Sequence[int]]:
    """The part of a request's tables that a step can have changed: all of it in a prefill, else length and last block."""
    if num_scheduled > 1:
        return list(tables)
    return [(len(table), *table[-1:]) for table in tables]


class _TraceTokens:
    """Stands in for `sim.scenario.Tokens`. The model only counts tokens; their values are the prefix numbers' matter."""

    def __init__(self) -> None:
        self.num_prompt_tokens = 0

    def prompt(self, add: Add) -> list[int]:
        return [0] * self.num_prompt_tokens

    def output(self, request_id: str, index: int) -> int:
        return 0


class ModelSide:
    """The model. scenario: engine and groups, no steps; trace_block_size: tokens that one hash stands for; with_digests:
    for a comparison, else the digests are 0."""

    def __init__(self, scenario: Scenario, rules: Rules, trace_block_size: int, with_digests: bool = False) -> None:
        self._with_digests = with_digests
        self._scheduler = scheduler = Scheduler(scenario, rules)
        self._kv = scheduler.kv
        self.pool = self._kv.pool
        self._tokens = _TraceTokens()
        self._prefixes = TracePrefixes(self._kv.prefixes.hash_block_size, trace_block_size)
        scheduler.tokens = self._tokens  # type: ignore[assignment]
        self._kv.prefixes = self._prefixes  # type: ignore[assignment]
        self._num_groups = len(scenario.groups)
        self._num_steps = 0
        self._rows: dict[str, int] = {}
        groups, setting = self._kv.groups, self._kv.setting
        # One group of full attention, whose hits end with whole blocks: a prompt's blocks are all there is.
        self.is_plain = (
            len(groups) == 1
            and type(groups[0]) is FullManager
            and groups[0].block_size == setting.hash_block_size == setting.hit_alignment
        )

    def add(self, index: int, row: Row, chain: list[int]) -> None:
        add = _add(index, max(1, row.output_length))
        self._tokens.num_prompt_tokens = row.input_length
        # The model numbers requests as they arrive, and rows may be left out.
        self._prefixes.add(self._scheduler.num_added, chain, row.input_length)
        self._rows[add.id] = self._scheduler.num_added
        self._scheduler.add(add)

    def step(self) -> StepFacts:
        scheduler, pool = self._scheduler, self.pool
        plan = scheduler.schedule()
        self._num_steps += 1
        lookups = [
            Lookup(int(r.id), len(r.tokens), plan.hits[r.id], plan.external[r.id], r.num_preemptions > 0)
            for r in plan.scheduled
            if r.id in plan.hits
        ]
        digest = 0
        if self._with_digests and self._num_steps % FULL_EVERY_STEPS == 0:
            digest = digest_of((r.tables for r in scheduler.running), pool.free_order())
        elif self._with_digests:
            digest = digest_of(recent(r.tables, num_tokens) for r, num_tokens in plan.scheduled.items())
        num_free = pool.num_free
        finished, _ = scheduler.update(plan)
        for request_id in finished:
            self._prefixes.remove(self._rows.pop(request_id))
        return StepFacts(
            scheduled=[(int(r.id), num_tokens) for r, num_tokens in plan.scheduled.items()],
            lookups=lookups,
            preempted=sorted(int(request_id) for request_id in plan.preempted),
            finished=[int(request_id) for request_id in finished],
            num_free=num_free,
            digest=digest,
        )

    def look_up(self, index: int, row: Row, chain: list[int]) -> StepFacts:
        if self.is_plain:
            num_found, tables = self._allocate_plainly(row, chain)
        else:
            stepwise = self._scheduler.mamba_split is not None
            num_found, tables = (self._prefill if stepwise else self._allocate)(index, row, chain)
        lookup = Lookup(index, row.input_length, num_found, 0, False)
        digest = digest_of([tables], self.pool.free_order()) if self._with_digests else 0
        return StepFacts([], [lookup], [], [index], self.pool.num_free, digest)

    def _prefill(self, index: int, row: Row, chain: list[int]) -> tuple[int, list[list[int]]]:
        """Where states are kept inside a prompt, a prefill stops there. (Tokens found in the cache, tables at the end.)"""
        scheduler = self._scheduler
        self.add(index, row._replace(output_length=1), chain)
        num_found: int | None = None
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            (request,) = plan.scheduled
            if num_found is None:
                num_found = plan.hits[request.id]
            tables = list(request.tables)
            for request_id in scheduler.update(plan)[0]:
                self._prefixes.remove(self._rows.pop(request_id))
        assert num_found is not None
        return num_found, tables

    def _allocate_plainly(self, row: Row, chain: list[int]) -> tuple[int, list[list[int]]]:
        """`_allocate` where the cache `is_plain`, written out: all that a run of full blocks does to the pool."""
        pool, size, num_tokens = self.pool, self._prefixes.hash_block_size, row.input_length
        num_full = num_tokens // size  # whole blocks only
        keys = self._prefixes.prompt_numbers(chain, 0, num_full)
        # The last token is always computed anew.
        table = pool.lookup_run(keys if num_tokens % size else keys[:-1])
        num_found = len(table)
        pool.touch(table)
        table += pool.take(-(-num_tokens // size) - num_found)  # rounded up: the last block may be partial
        pool.link_run(keys[num_found:], table[num_found:num_full])
        pool.release(reversed(table))
        return num_found * size, [table]

    def _allocate(self, index: int, row: Row, chain: list[int]) -> tuple[int, list[list[int]]]:
        """A request that gets its blocks at once: no scheduler is needed. (Tokens found in the cache, its tables.)"""
        kv = self._kv
        # Nothing is generated, so the tokens need a length only.
        request = Request(_ALONE, index, range(row.input_length), self._num_groups)  # type: ignore[arg-type]
        self._prefixes.add(index, chain, row.input_length)
        kv.extend_prefixes(request)
        self._prefixes.remove(index)
        kv.new_step()
        hits = kv.computed_blocks(request)
        fits = kv.allocate_slots(request, row.input_length - hits.num_tokens, hits)
        assert fits, "a request that is alone fits in what the start-up check admits"
        tables = list(request.tables)
        kv.free(request)
        for copy in kv.drain_copies():
            self.pool.release(copy)
        kv.drain_zeroed()
        return hits.num_tokens, tables


def _add(index: int, max_tokens: int) -> Add:
    return Add(id=str(index), prompt=(), max_tokens=max_tokens)


_ALONE = _add(0, 1)

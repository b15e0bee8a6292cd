"""Plays the rows of a trace to a side, by an explicit clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from diff_tests.workload.sides import Lookup, Side, StepFacts
from diff_tests.workload.trace import Chains, Row


class Arrivals(NamedTuple):
    """When requests arrive. closed: `value` requests in flight, the next arrives when one ends; step: at their time in
    the trace, an engine step taking `value` milliseconds; order: one at a time, looked up and allocated, no decoding."""

    clock: Literal["closed", "step", "order"]
    value: float = 0.0

    def __str__(self) -> str:
        return self.clock if self.clock == "order" else f"{self.clock}:{self.value:g}"


def parse_arrivals(text: str) -> Arrivals:
    """`closed:N`, `step:MS` or `order`. Raises ValueError."""
    clock, _, value = text.partition(":")
    if clock == "order" and not value:
        return Arrivals("order")
    try:
        if clock == "closed" and int(value) >= 1:
            return Arrivals("closed", int(value))
        if clock == "step" and float(value) > 0:
            return Arrivals("step", float(value))
    except ValueError:
        pass
    raise ValueError(
        f"arrivals {text!r}: give closed:N with N requests in flight, step:MS with milliseconds a step, or order"
    )


@dataclass
class RequestLife:
    """What became of one row. Steps count from 1; local and external tokens are those of its last admission."""

    line: int
    timestamp: float
    num_prompt: int
    num_output: int
    first_step: int = 0
    last_step: int = 0
    num_local: int = 0
    num_external: int = 0
    num_preemptions: int = 0


@dataclass
class Totals:
    """Sums over a replay, by vLLM's definitions: an admission queries all tokens of its request and hits the local
    ones; requests that had been preempted before are counted apart. block_queries and block_hits count the same in
    blocks of the cache, as the literature does, the partial last one included; trace_blocks in those of the trace."""

    requests: int = 0
    too_long: int = 0
    queries: int = 0
    hits: int = 0
    block_queries: int = 0
    block_hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    external: int = 0
    preemptions: int = 0
    steps: int = 0
    trace_blocks: int = 0
    trace_blocks_seen: int = 0
    peak_occupied: int = 0
    sum_occupied: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens over queried ones, preempted requests left out, as vLLM's metrics do."""
        return self.hits / self.queries if self.queries else 0.0

    @property
    def endless_rate(self) -> float:
        """The share of trace blocks that an endless cache would have: the bound of the literature."""
        return self.trace_blocks_seen / self.trace_blocks if self.trace_blocks else 0.0

    @property
    def block_rate(self) -> float:
        """Hit blocks over all blocks of the prompts."""
        return self.block_hits / self.block_queries if self.block_queries else 0.0

    def count_lookup(self, lookup: Lookup, block_size: int) -> None:
        """An admission."""
        if lookup.preempted:
            self.preempted_requests += 1
            self.preempted_queries += lookup.num_tokens
            self.preempted_hits += lookup.num_local
        else:
            self.queries += lookup.num_tokens
            self.hits += lookup.num_local
            self.block_queries += -(-lookup.num_tokens // block_size)  # rounded up: the last one may be partial
            self.block_hits += lookup.num_local // block_size  # whole blocks only
        self.external += lookup.num_external


class Event(NamedTuple):
    """A step, and the lives that ended with it."""

    number: int
    time_ms: float
    facts: StepFacts
    num_waiting: int
    ended: list[RequestLife]


@dataclass
class Replay:
    """Plays rows to a side. num_usable: blocks of the pool without the null block; max_model_len and block_size (in which
    the literature's share is counted) in tokens."""

    side: Side
    arrivals: Arrivals
    num_usable: int
    max_model_len: int
    block_size: int
    chains: Chains = field(default_factory=Chains)
    totals: Totals = field(default_factory=Totals)

    def events(self, rows: Iterable[Row]) -> Iterator[Event]:
        """All steps in order; in order mode, one a request."""
        admissible = self._admissible(rows)
        return self._in_order(admissible) if self.arrivals.clock == "order" else self._by_steps(admissible)

    def _admissible(self, rows: Iterable[Row]) -> Iterator[tuple[int, Row, list[int]]]:
        """(index, row, chained hashes) of the rows that fit under max_model_len."""
        totals = self.totals
        for index, row in enumerate(rows):
            if row.input_length >= self.max_model_len:
                totals.too_long += 1
                continue
            num_prefixes = self.chains.num_prefixes
            chain = self.chains.number(row.hash_ids)
            totals.requests += 1
            totals.trace_blocks += len(chain)
            totals.trace_blocks_seen += len(chain) - (self.chains.num_prefixes - num_prefixes)
            yield index, row, chain

    def _in_order(self, rows: Iterator[tuple[int, Row, list[int]]]) -> Iterator[Event]:
        for number, (index, row, chain) in enumerate(rows, start=1):
            facts = self.side.look_up(index, row, chain)
            self.totals.steps = number
            for lookup in facts.lookups:
                self.totals.count_lookup(lookup, self.block_size)
            num_local = facts.lookups[0].num_local
            life = RequestLife(row.line, row.timestamp, row.input_length, 0, number, number, num_local)
            yield Event(number, row.timestamp, facts, 0, [life])

    def _by_steps(self, rows: Iterator[tuple[int, Row, list[int]]]) -> Iterator[Event]:
        totals = self.totals
        lives: dict[int, RequestLife] = {}
        admitted: set[int] = set()
        coming = next(rows, None)
        now = coming[1].timestamp if coming else 0.0
        while coming or lives:
            if coming and not lives:
                now = max(now, coming[1].timestamp)
            while coming and self._has_arrived(coming[1], now, len(lives)):
                index, row, chain = coming
                lives[index] = RequestLife(row.line, row.timestamp, row.input_length, row.output_length)
                self.side.add(index, row, chain)
                coming = next(rows, None)
            facts = self.side.step()
            totals.steps += 1
            self._count(facts, lives, admitted)
            ended = [lives.pop(index) for index in facts.finished]
            for life in ended:
                life.last_step = totals.steps
            admitted.difference_update(facts.finished)
            yield Event(totals.steps, now, facts, len(lives) - len(admitted), ended)
            if self.arrivals.clock == "step":
                now += self.arrivals.value

    def _has_arrived(self, row: Row, now: float, num_in_flight: int) -> bool:
        if self.arrivals.clock == "closed":
            return num_in_flight < self.arrivals.value
        return row.timestamp <= now

    def _count(self, facts: StepFacts, lives: dict[int, RequestLife], admitted: set[int]) -> None:
        totals = self.totals
        for lookup in facts.lookups:
            totals.count_lookup(lookup, self.block_size)
            life = lives[lookup.request]
            life.first_step = life.first_step or totals.steps
            life.num_local, life.num_external = lookup.num_local, lookup.num_external
            admitted.add(lookup.request)
        for index in facts.preempted:
            lives[index].num_preemptions += 1
            admitted.discard(index)
        totals.preemptions += len(facts.preempted)
        occupied = self.num_usable - facts.num_free
        totals.sum_occupied += occupied
        totals.peak_occupied = max(totals.peak_occupied, occupied)

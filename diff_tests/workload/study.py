"""One replay of a trace on one cache: the settings, put together and checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from diff_tests.workload.replay import Arrivals, Event, Replay, Totals
from diff_tests.workload.sides import ModelSide
from diff_tests.workload.trace import Chains, Labels, Row, read
from sim.refusals import refusal
from sim.releases import Rules
from sim.scenario import AnyGroup, Engine, Scenario
from sim.startup import smallest_pool

_LONGEST = 1 << 20


class StudyError(ValueError):
    """Settings that cannot be used; one sentence."""


@dataclass
class Study:
    """A trace, a cache and a clock. Call `events` once; then `totals`, `chains` and `num_evicted` hold the sums."""

    path: Path
    labels: Labels
    hash_block_size: int
    arrivals: Arrivals
    limit: int | None
    scenario: Scenario
    rules: Rules
    with_digests: bool = False

    def __post_init__(self) -> None:
        self.side = ModelSide(self.scenario, self.rules, self.hash_block_size, self.with_digests)
        engine = self.scenario.engine
        self._replay = Replay(self.side, self.arrivals, engine.blocks - 1, engine.max_model_len, self.block_size)

    @property
    def block_size(self) -> int:
        """The smallest block of the cache, in tokens."""
        return min(group.block for group in self.scenario.groups)

    def rows(self) -> Iterator[Row]:
        """The trace's rows, as many as were asked for. Raises TraceError."""
        return islice(read(self.path, self.hash_block_size, self.labels), self.limit)

    def events(self) -> Iterator[Event]:
        """Everything that happens, in order."""
        return self._replay.events(self.rows())

    @property
    def totals(self) -> Totals:
        return self._replay.totals

    @property
    def chains(self) -> Chains:
        return self._replay.chains

    @property
    def num_evicted(self) -> int:
        """Blocks taken although they could still have been hit."""
        return self.side.pool.num_evicted


def cache_of(engine: Engine, groups: tuple[AnyGroup, ...], clock: str, rules: Rules, max_model_len: int | None) -> Scenario:
    """The engine with these groups. max_model_len in tokens, None: the longest that the pool admits. In order mode a step
    takes a whole prompt. Raises StudyError."""
    scenario = Scenario(engine=engine, groups=groups, steps=())
    longest = max_model_len if max_model_len is not None else _longest_admitted(scenario, rules)
    scenario = _with_engine(scenario, max_model_len=longest)
    if (needed := smallest_pool(scenario, rules)) > engine.blocks:
        raise StudyError(
            f"{engine.blocks} blocks do not hold one request of {scenario.engine.max_model_len} tokens, which takes "
            f"{needed}; give more --blocks or a smaller --max-model-len"
        )
    if clock == "order":
        scenario = _with_engine(scenario, max_num_batched_tokens=scenario.engine.max_model_len, max_num_seqs=1)
    if (refused := refusal(scenario, rules)) is not None:
        raise StudyError(f"vLLM {rules.release} refuses this cache: {refused.type}: {refused.message}")
    return scenario


def _with_engine(scenario: Scenario, **settings: int) -> Scenario:
    return msgspec.structs.replace(scenario, engine=msgspec.structs.replace(scenario.engine, **settings))


def _longest_admitted(scenario: Scenario, rules: Rules) -> int:
    """The largest max_model_len for which the pool passes vLLM's start-up check, in tokens."""
    low, high = 2, _LONGEST
    while low < high:
        middle = (low + high + 1) // 2  # rounded up, so that the range shrinks
        fits = smallest_pool(_with_engine(scenario, max_model_len=middle), rules) <= scenario.engine.blocks
        low, high = (middle, high) if fits else (low, middle - 1)
    return low

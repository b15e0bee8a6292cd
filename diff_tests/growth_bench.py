"""How the cost of a case grows with its size: doubling series, and the exponent that fits them best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from diff_tests.run import judge_run
from diff_tests.vllm_target.target import Target
from sim.scenario import Add, Engine, Full, Run, Scenario, SlidingWindow, Span

_NUM_ROUNDS = 3


class Series(NamedTuple):
    """Scenarios that differ in one size, which doubles."""

    name: str
    sizes: tuple[int, ...]
    scenario: Callable[[int], Scenario]


def _prompts(num_tokens: int) -> Scenario:
    """Two requests with one prompt, which the first computes in chunks and the second finds."""
    engine = Engine(blocks=2 + 2 * (num_tokens // 16 + 2), max_model_len=num_tokens + 16, max_num_batched_tokens=1024)
    first, second = (Add(id=name, prompt=(Span("s", 0, num_tokens),), max_tokens=4) for name in "AB")
    return _running_to_the_end(engine, first, Run(limit=10_000), second)


def _requests(num_requests: int) -> Scenario:
    """Requests that decode together for 20 steps."""
    engine = Engine(blocks=8192, max_num_seqs=num_requests, max_num_batched_tokens=100 * num_requests)
    return _running_to_the_end(engine, *_many(num_requests))


def _pool(num_blocks: int) -> Scenario:
    """Four requests in a pool that is larger than what they need."""
    return _running_to_the_end(Engine(blocks=num_blocks), *_many(4))


def _groups(num_groups: int) -> Scenario:
    """Four requests whose layers are in so many groups of two kinds."""
    groups = tuple(Full(block=16) if i % 2 == 0 else SlidingWindow(block=16, window=48) for i in range(num_groups))
    return _running_to_the_end(Engine(blocks=2048), *_many(4), groups=groups)


def _many(num_requests: int) -> list[Add]:
    return [Add(id=f"R{i}", prompt=(Span(f"s{i}", 0, 90),), max_tokens=20) for i in range(num_requests)]


def _running_to_the_end(
    engine: Engine, *steps: Add | Run, groups: tuple[Full | SlidingWindow, ...] = (Full(block=16),)
) -> Scenario:
    return Scenario(engine=engine, groups=groups, steps=(*steps, Run(limit=10_000)))


SERIES = (
    Series("prompt length", (1024, 2048, 4096, 8192, 16_384, 32_768), _prompts),
    Series("running requests", (8, 16, 32, 64, 128, 256), _requests),
    Series("pool size", (1024, 2048, 4096, 8192, 16_384, 32_768), _pool),
    Series("groups", (1, 2, 4, 8, 16), _groups),
)


class Growth(NamedTuple):
    """Seconds of processor time by size, of judging (predict, compare, laws) and of the real side; medians of rounds that
    take all sizes in turn."""

    series: Series
    judging: list[float]
    real: list[float]


def measure_growth(target: Target, series: Series, num_rounds: int = _NUM_ROUNDS) -> Growth:
    """Runs and judges each scenario of the series once a round, after one that warms both sides up. Raises
    AssertionError where a case has a finding."""
    _costs(target, series.scenario(series.sizes[0]))
    judging: list[list[float]] = [[] for _ in series.sizes]
    real: list[list[float]] = [[] for _ in series.sizes]
    for _ in range(num_rounds):
        for index, size in enumerate(series.sizes):
            seconds = _costs(target, series.scenario(size))
            judging[index].append(seconds[0])
            real[index].append(seconds[1])
    return Growth(series, [median(times) for times in judging], [median(times) for times in real])


def _costs(target: Target, scenario: Scenario) -> tuple[float, float]:
    """Processor seconds of judging a scenario's run, and of the real side."""
    before = target.cpu_seconds()
    history = target.run(scenario)
    real = target.cpu_seconds() - before
    started = time.process_time()
    outcome = judge_run(scenario, history, target.info.rules)
    judging = time.process_time() - started
    assert outcome.verdict == "same", outcome.findings
    return judging, real


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The slope of the line that fits the logarithms best, over the larger half of the sizes, where what every case costs
    weighs least."""
    start = len(sizes) // 2 - 1  # floor: of an odd number of sizes one more
    xs = [math.log(size) for size in sizes[start:]]
    ys = [math.log(cost) for cost in costs[start:]]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum((x - mean_x) ** 2 for x in xs)

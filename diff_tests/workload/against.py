"""Model and real scheduler play the same trace; every step is compared."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from diff_tests.vllm_target.target import Target
from diff_tests.workload.replay import Event
from diff_tests.workload.sides import StepFacts
from diff_tests.workload.study import Study


class Difference(Exception):
    """Model and vLLM part; the message names step, what differs, and both values."""


def compared(study: Study, target: Target) -> Iterator[Event]:
    """The study's events, each equal to what the real scheduler did; last, vLLM's own prefix cache statistics are held
    against the totals. Raises Difference at the first difference."""
    statistics: list[int] = []
    observed = _observed(study, target, statistics)
    number = 0
    for event in study.events():
        number = event.number
        seen = next(observed, None)
        if seen is None:
            raise Difference(f"step {number}: vLLM has come to its end, the model has not")
        if seen != event.facts:
            raise Difference(f"step {number}: {describe(event.facts, seen)}")
        yield event
    if next(observed, None) is not None:
        raise Difference(f"step {number + 1}: the model has come to its end, vLLM has not")
    totals = study.totals
    foreseen = [totals.queries, totals.hits, totals.preempted_queries, totals.preempted_hits]
    if statistics != foreseen:
        raise Difference(f"prefix cache statistics: vLLM {statistics}, model {foreseen}")


def _observed(study: Study, target: Target, statistics: list[int]) -> Iterator[StepFacts]:
    """The real scheduler's steps; when they are through, `statistics` holds vLLM's own: queries, hits, and those of
    preempted requests, in tokens."""
    for message in target.play_trace(
        study.scenario, study.path, study.labels, study.hash_block_size, str(study.arrivals), study.limit
    ):
        yield from message.steps
        if message.error is not None:
            raise Difference(f"vLLM raised {message.error}")
        if message.last:
            statistics += message.statistics


def describe(expected: StepFacts, observed: StepFacts) -> str:
    """What differs first, in the order of a step."""
    for name in expected.__struct_fields__:
        ours, theirs = getattr(expected, name), getattr(observed, name)
        if ours != theirs:
            what = "block IDs of the step's requests" if name == "digest" else name
            return f"{what}: vLLM {msgspec.to_builtins(theirs)}, model {msgspec.to_builtins(ours)}"
    raise AssertionError("equal facts")

"""The request matrix: what is asked of every engine, as steps of a scenario, with sizes in blocks of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sim.scenario import Add, AnyStep, Run, Span, Step

NUM_BLOCKS = 200
"""Blocks of every engine: hardly more than one request of maximum length needs in all groups, so that 16 requests together
run out."""

MAX_BATCHED_TOKENS = 512
"""Tokens of a step. Groups with a window need room for so many more."""

_NUM_TOGETHER = 16
_RUN = Run(limit=20_000)


class Act(NamedTuple):
    """One part of the matrix. It starts and ends with an idle engine; the prefix cache stays from act to act."""

    name: str
    about: str
    steps: tuple[AnyStep, ...]


def matrix(block: int) -> list[Act]:
    """All acts, for an engine in which an entry of a block table stands for `block` tokens."""
    return [
        Act("table", "1,616 of 1,621 tokens shared, while the first lives; then an exact replay", tuple(_table())),
        Act("seed", "a prompt that nobody had before", (_add("seed", ("seed", 4 * block + 3)), _RUN)),
        Act(
            "reuse",
            "three blocks of it, then something else",
            (_add("reuse", ("seed", 3 * block), ("new", block + 5)), _RUN),
        ),
        Act("replay", "the very same prompt again", (_add("replay", ("seed", 4 * block + 3)), _RUN)),
        Act("forward", "prefixes, shorter ones first", tuple(_prefixes("forward", (2, 4, 6), block))),
        Act("reverse", "prefixes, longer ones first", tuple(_prefixes("reverse", (6, 4, 2), block))),
        Act("overlap", "a long producer, and a shorter consumer while it runs", tuple(_overlap(block))),
        Act("together", f"{_NUM_TOGETHER} requests at a time over one prefix", tuple(_together(block))),
        Act("preemption", f"{_NUM_TOGETHER} requests that outgrow the pool", tuple(_preemption(block))),
    ]


def steps_of(acts: list[Act]) -> tuple[AnyStep, ...]:
    """The steps of all acts, one after another."""
    return tuple(step for act in acts for step in act.steps)


def act_of(acts: list[Act]) -> dict[str, str]:
    """The act of each request."""
    return {step.id: act.name for act in acts for step in act.steps if isinstance(step, Add)}


def _add(name: str, *prompt: tuple[str, int], max_tokens: int = 4) -> Add:
    spans = tuple(Span(stream, 0, num_tokens) for stream, num_tokens in prompt)
    return Add(id=name, prompt=spans, max_tokens=max_tokens)


def _table() -> Iterator[AnyStep]:
    for name, own in (("A", "a"), ("B", "b")):
        yield _add(name, ("sys", 1616), (own, 5), max_tokens=8)
        yield Step(count=2)
    yield _RUN
    yield _add("A-again", ("sys", 1616), ("a", 5), max_tokens=8)
    yield _RUN


def _prefixes(name: str, num_blocks: tuple[int, ...], block: int) -> Iterator[AnyStep]:
    for count in num_blocks:
        yield _add(f"{name}-{count}", (name, count * block + 1))
        yield _RUN


def _overlap(block: int) -> Iterator[AnyStep]:
    yield _add("producer", ("long", 8 * block + 2), max_tokens=24)
    yield Step(count=3)
    yield _add("consumer", ("long", 5 * block), ("short", 3))
    yield _RUN


def _together(block: int) -> Iterator[AnyStep]:
    for i in range(_NUM_TOGETHER):
        yield _add(f"together-{i}", ("shared", 2 * block + 7), (f"own-{i}", 1 + i), max_tokens=3 + i % 5)
    yield _RUN


def _preemption(block: int) -> Iterator[AnyStep]:
    """Twelve blocks each, the last one almost full, and growing by two."""
    for i in range(_NUM_TOGETHER):
        yield _add(f"growing-{i}", (f"grow-{i}", 12 * block - 1), max_tokens=block + 8)
    yield _RUN

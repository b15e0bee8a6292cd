"""Every case of a small scope: one to three requests around the boundaries of tiny blocks, in the smallest pools, for each
kind of group alone and each pair of kinds that a release accepts.

The scope is a product of short lists, so its size is known before anything runs, and a case is made from its number. Cases
are taken in a fixed order that jumps evenly through the scope: a run that is cut short has seen a part of everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from diff_tests.behaviours import KINDS
from diff_tests.coverage import KindSet, accepted_kind_sets, can_cache, sample_groups
from sim.refusals import refusal
from sim.releases import Rules
from sim.scenario import Add, AnyGroup, AnyStep, Connector, Engine, Run, Scenario, Span, Step
from sim.startup import smallest_pool

BLOCK = 2
RUN_LIMIT = 200
ROOMY_BUDGET = 64

# What may vary, in tokens or blocks. Prompts end at a block boundary, or beside one.
LENGTHS = (BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1)
LONG_LENGTHS = (2 * BLOCK, 2 * BLOCK + 1)
OUTPUTS = (1, BLOCK + 2)
SPARE_BLOCKS = (0, 1, 2)
BUDGETS = (BLOCK + 1, ROOMY_BUDGET)
CONNECTORS = (None, "DecodeBenchConnector")
SHARING = ("own", "same", "fork")
ARRIVALS = ("together", "a step later", "after the end")


@dataclass(frozen=True)
class Part:
    """The cases of one geometry and one number of requests. blocks: block size in tokens of each group."""

    kinds: KindSet
    blocks: tuple[int, ...]
    num_requests: int

    @property
    def choices(self) -> tuple[Sequence[Any], ...]:
        """What varies: outputs, spare blocks, budget, connector, arrival, then per request length and sharing."""
        if self.num_requests == 1:
            return OUTPUTS, SPARE_BLOCKS, BUDGETS, CONNECTORS, ARRIVALS[:1], (1, *LENGTHS), SHARING[:1]
        lengths = LENGTHS if self.num_requests == 2 else LONG_LENGTHS
        first: tuple[Sequence[Any], ...] = (lengths, SHARING[:1])
        others: tuple[Sequence[Any], ...] = (lengths, SHARING) * (self.num_requests - 1)
        if self.num_requests == 2:
            return OUTPUTS[1:], SPARE_BLOCKS, BUDGETS, CONNECTORS, ARRIVALS, *first, *others
        return OUTPUTS[1:], SPARE_BLOCKS[:2], BUDGETS, CONNECTORS[:1], ARRIVALS[:2], *first, *others

    def __len__(self) -> int:
        return math.prod(len(options) for options in self.choices)

    def case(self, index: int, rules: Rules) -> Scenario:
        """The index-th case, from 0."""
        chosen = []
        for options in self.choices:
            index, which = divmod(index, len(options))
            chosen.append(options[which])
        outputs, spare, budget, connector, arrival, *shapes = chosen
        prompts = [_prompt(i, *shapes[2 * i : 2 * i + 2]) for i in range(self.num_requests)]
        longest = max(sum(span.count for span in prompt) for prompt in prompts)
        engine = Engine(
            blocks=2,
            prefix_caching=can_cache(self.kinds),
            max_model_len=longest + outputs,
            max_num_seqs=self.num_requests,
            max_num_batched_tokens=budget,
        )
        scenario = Scenario(
            engine=engine,
            connector=Connector(name=connector) if connector else None,
            groups=_groups(self.kinds, self.blocks, longest + outputs),
            steps=_steps(prompts, outputs, arrival),
        )
        pool = replace(engine, blocks=smallest_pool(scenario, rules) + spare)
        return replace(scenario, engine=pool)


def _groups(kinds: KindSet, blocks: Sequence[int], max_model_len: int) -> tuple[AnyGroup, ...]:
    """One group of each kind. vLLM gives a state that is kept nowhere one block for the whole request."""
    sizes = [max_model_len if kind == "mamba none" else block for kind, block in zip(kinds, blocks, strict=True)]
    return tuple(sample_groups((kind,), size)[0] for kind, size in zip(kinds, sizes, strict=True))


def _prompt(request_index: int, num_tokens: int, sharing: str) -> tuple[Span, ...]:
    """Tokens of the request's own stream, of the first request's, or of that one for at most a block and then its own."""
    own = f"s{request_index}"
    if sharing == "same":
        return (Span("s0", 0, num_tokens),)
    if sharing == "fork":
        num_shared = min(BLOCK, num_tokens - 1)
        return Span("s0", 0, num_shared), Span(own, 0, num_tokens - num_shared)
    return (Span(own, 0, num_tokens),)


def _steps(prompts: Sequence[tuple[Span, ...]], outputs: int, arrival: str) -> tuple[AnyStep, ...]:
    steps: list[AnyStep] = []
    for request_index, prompt in enumerate(prompts):
        if request_index and arrival != "together":
            steps.append(Step(count=1) if arrival == "a step later" else Run(limit=RUN_LIMIT))
        steps.append(Add(id="ABC"[request_index], prompt=prompt, max_tokens=outputs))
    return (*steps, Run(limit=RUN_LIMIT))


class Scope:
    """All cases of a release, or those of some kinds only. Its length is their number."""

    def __init__(self, rules: Rules, kinds: Sequence[str] = KINDS) -> None:
        """kinds: those to take alone and in pairs, names out of KINDS."""
        self.rules = rules
        self.kind_sets = [chosen for chosen in accepted_kind_sets(rules) if set(chosen) <= set(kinds)]
        parts = [
            Part(chosen, blocks, num_requests)
            for chosen in self.kind_sets
            for blocks in _geometries(chosen)
            for num_requests in (1, 2, 3)
        ]
        self.parts = [part for part in parts if _is_accepted(part, rules)]
        self._length = sum(len(part) for part in self.parts)
        self._stride = _stride(self._length)

    def __len__(self) -> int:
        return self._length

    def case(self, number: int) -> Scenario:
        """The case that a run takes as its number-th, from 0."""
        index = number * self._stride % self._length
        for part in self.parts:
            if index < len(part):
                return part.case(index, self.rules)
            index -= len(part)
        raise AssertionError("a number below the scope's length is in some part")


def _geometries(kinds: KindSet) -> list[tuple[int, ...]]:
    """Block sizes: equal ones, and for pairs either twice the other; but for chunks, which vLLM only looks up beside
    groups of their own block size, and for states of whole requests."""
    if len(kinds) == 1:
        return [(BLOCK,)]
    if "chunked_local" in kinds or "mamba none" in kinds:
        return [(BLOCK, BLOCK)]
    return [(BLOCK, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, BLOCK)]


def _is_accepted(part: Part, rules: Rules) -> bool:
    """Whether the release takes these block sizes together, with the first of all choices and with the last."""
    return all(refusal(part.case(index, rules), rules) is None for index in (0, len(part) - 1))


def _stride(length: int) -> int:
    """A step through [0, length) that meets every number once and spreads the first ones evenly."""
    stride = max(1, int(length * 0.618))  # rounded down
    while math.gcd(stride, length) != 1:
        stride += 1
    return stride

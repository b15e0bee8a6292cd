"""The steps of a case: requests that arrive, with engine steps and interventions between them; or hand-made tables."""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import replace

from diff_tests.generate.draft import Draft, RequestDraft
from diff_tests.generate.engine import with_engine, with_pool
from diff_tests.generate.kinds import KINDS, label
from diff_tests.generate.requests import request_id
from sim.geometry import effective_block_size
from sim.scenario import (
    Abort,
    Add,
    AnyGroup,
    AnyStep,
    Circular,
    Cross,
    Direct,
    LoadDone,
    LoadFailed,
    Mamba,
    Pause,
    ResetPrefixCache,
    Run,
    Scenario,
    Schedule,
    Step,
    Update,
)
from sim.startup import smallest_pool

RUN_LIMIT = 150
"""Engine steps of one run. Those that end take less than 100; the others repeat a few steps without end."""


def scheduler_scenario(draft: Draft, scenario: Scenario) -> Scenario:
    """With steps for the scheduler, and a pool."""
    return with_pool(draft, replace(scenario, steps=tuple(_Timeline(draft).steps())))


class _Timeline:
    """The steps of one case. live: IDs that may still run; ending: aborted ones whose output may be in flight; ended: IDs
    that may be used again; loading: those whose load somebody has to report; brought: those whose tokens come with their
    step; num_in_flight: steps whose output is not processed yet."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.chooser = draft.chooser
        self.on = draft.on
        self.live: list[str] = []
        self.ending: list[str] = []
        self.ended: list[str] = []
        self.loading: list[str] = []
        self.brought: list[str] = []
        self.is_paused = False
        self.num_in_flight = 0
        self.takes_encoder = any(isinstance(group, Cross) for group in draft.groups)
        self.most_left_in_flight = 1 if "async_scheduling" in draft.on else 0
        self._steps: list[AnyStep] = []

    def steps(self) -> list[AnyStep]:
        """The requests in order, with steps and interventions between them, and a run to the end."""
        in_burst = "bursts" in self.on and self.chooser.flag(0.5)
        for request_index, request in enumerate(self.draft.requests):
            self._add(request_index, request)
            if in_burst and self.chooser.flag(0.6):
                continue
            self._go_on()
            self._intervene()
        self._finish()
        return self._steps

    def _add(self, request_index: int, request: RequestDraft) -> None:
        name = request_id(request_index)
        if self.ended and "reused_ids" in self.on and self.chooser.flag(0.5):
            name = self.ended.pop(self.chooser.integer(0, len(self.ended) - 1))
            # Where vLLM stalls, the run before has not ended it, and output of it may be on its way.
            self._steps += [Abort(id=name), Update(count=2)]
            self.num_in_flight = 0
        load: Literal["sync", "async"] | None = None
        if request.external is not None:
            load = "async" if request.loads_later else "sync"
        self._steps.append(
            Add(
                id=name,
                prompt=request.prompt,
                max_tokens=request.max_tokens,
                priority=request.priority,
                salt=request.salt,
                lora=request.lora,
                skip_cache=request.skip_cache,
                embeds=request.embeds,
                encoder=request.encoder if self.takes_encoder else 0,
                external=request.external,
                load=load,
            )
        )
        self.live.append(name)
        if request.loads_later:
            self.loading.append(name)
        elif request.external and name not in self.brought:
            self.brought.append(name)

    def _go_on(self) -> None:
        """Some steps, the two halves of some, or all until the engine is idle."""
        if "phases" in self.on and self.chooser.flag(0.4) and "pool_below_smallest" not in self.on:
            self._run()
        elif "halves" in self.on and self.chooser.flag(0.6):
            self._halves()
        else:
            self._steps.append(Step(count=self.chooser.one_of((1, 2, 3, 1, 5, 8))))
            self.num_in_flight = self.most_left_in_flight

    def _run(self) -> None:
        self._resume()
        self._steps.append(Run(limit=RUN_LIMIT))
        self.num_in_flight = 0
        if not self.loading:
            self.ended += self.ending + self.live
            self.ending.clear()
            self.live.clear()

    def _halves(self) -> None:
        """Steps taken apart, so that something happens between scheduling and the output of it; at most two in flight, or
        one where the engine waits for its output."""
        for _ in range(self.chooser.integer(1, 4)):
            if self.num_in_flight <= self.most_left_in_flight:
                self._steps.append(Schedule(count=1))
                self.num_in_flight += 1
                self._report_load()
                self._fail_step()
                self._abort(0.2)
            if self.num_in_flight > self.most_left_in_flight or self.chooser.flag(0.3):
                self._steps.append(Update(count=1))
                self.num_in_flight = max(0, self.num_in_flight - 1)

    def _intervene(self) -> None:
        """What comes from outside between two steps."""
        self._abort(0.4)
        # While loads are under way, vLLM cannot reset beside running requests, and says so.
        if "resets" in self.on and self.chooser.flag(0.35):
            self._steps.append(ResetPrefixCache(running=not self.loading and self.chooser.flag(0.35)))
        self._report_load()
        if "pauses" in self.on:
            self._pause_or_resume()

    def _abort(self, probability: float) -> None:
        if self.live and "aborts" in self.on and self.chooser.flag(probability):
            victim = self.live.pop(self.chooser.integer(0, len(self.live) - 1))
            self._steps.append(Abort(id=victim))
            if victim not in self.loading:
                (self.ending if self.num_in_flight else self.ended).append(victim)

    def _report_load(self) -> None:
        if self.loading and self.chooser.flag(0.5):
            name = self.chooser.one_of(self.loading)
            self._steps.append(self._failure(name) if self._may_fail(0.4) else LoadDone(id=name))

    def _fail_step(self) -> None:
        """What a step was to load did not come. With several groups a worker cannot say so."""
        if self.brought and len(self.draft.groups) == 1 and self._may_fail(0.6):
            self._steps.append(self._failure(self.brought[-1]))

    def _may_fail(self, probability: float) -> bool:
        return "failed_loads" in self.on and self.chooser.flag(probability)

    def _failure(self, name: str) -> LoadFailed:
        return LoadFailed(id=name, from_block=self.chooser.one_of((0, 0, 1, 2)))

    def _pause_or_resume(self) -> None:
        if self.is_paused:
            self._resume()
        elif self.chooser.flag(0.5):
            self._steps.append(Pause(what=self.chooser.one_of(("new", "all"))))
            self.is_paused = True

    def _resume(self) -> None:
        if self.is_paused:
            self._steps.append(Pause(what="none"))
            self.is_paused = False

    def _finish(self) -> None:
        """A run to the end. Whoever loads stops it until the load is reported."""
        for _ in range(2 * len(self.loading)):
            self._run()
            self._steps += [LoadDone(id=name) for name in self.loading]
        self._run()


# ---------------------------------------------------------------------------------------------------------------- direct


def direct_scenario(draft: Draft, scenario: Scenario) -> Scenario:
    """Requests with hand-made tables, as an allocator would leave them, and any local length."""
    shapes = [_direct_shape(draft, request) for request in draft.requests]
    num_blocks = 1 + sum(num_held for _, _, tables in shapes for _, num_held in tables)
    free = list(range(1, num_blocks + draft.chooser.integer(0, 5)))
    if draft.chooser.flag(0.5):
        free.sort(key=lambda block_id: (block_id * 7919) % 104729)
    steps: list[AnyStep] = []
    for request_index, (num_tokens, num_local, tables) in enumerate(shapes):
        filled = tuple(tuple([0] * nulls + [free.pop() for _ in range(held)]) for nulls, held in tables)
        name = request_id(request_index)
        steps.append(Direct(id=name, num_tokens=num_tokens, local=num_local, tables=filled))
        if draft.chooser.flag(0.6):
            steps.append(Step(count=1))
        if "aborts" in draft.on and draft.chooser.flag(0.3):
            steps.append(Abort(id=name))
    steps.append(Step(count=1))
    scenario = replace(scenario, steps=tuple(steps))
    blocks = max(smallest_pool(scenario, draft.rules), num_blocks + 5)
    return with_engine(scenario, blocks=blocks)


def _direct_shape(draft: Draft, request: RequestDraft) -> tuple[int, int, list[tuple[int, int]]]:
    """(tokens, local tokens, per group how many null blocks lead and how many real ones follow)."""
    num_tokens = request.num_prompt_tokens
    num_local = min(draft.near_multiple(draft.base_block, 4) - 1, num_tokens - 1) if draft.chooser.flag(0.7) else 0
    return num_tokens, num_local, [_direct_extent(draft, group, num_tokens) for group in draft.groups]


def _direct_extent(draft: Draft, group: AnyGroup, num_tokens: int) -> tuple[int, int]:
    """Null and real blocks of a request whose last token is to be computed: the others are local or external."""
    if isinstance(group, Circular):
        return 0, 1
    size = effective_block_size(group, draft.dcp, draft.rules)
    num_positions = math.ceil(num_tokens / size) + (group.speculative_blocks if isinstance(group, Mamba) else 0)
    num_nulls = max(0, KINDS[label(group)].skipped(group, num_tokens - 1)) // size  # floor: a block partly needed is kept
    return num_nulls, num_positions - num_nulls

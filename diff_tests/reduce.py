"""Makes a failing scenario small, whatever it came from.

Works on scenario values: each pass proposes smaller ones, the first that still fails is kept, until no pass proposes one
that does. A proposal that is not a valid scenario is never tried. What "still fails" means is the caller's predicate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from sim.scenario import (
    Abort,
    Add,
    AnyGroup,
    AnyStep,
    Direct,
    Engine,
    Full,
    LoadDone,
    LoadFailed,
    ResetPrefixCache,
    Run,
    Scenario,
    ScenarioError,
    Schedule,
    Span,
    Step,
    Update,
    check,
    encode,
)

Predicate = Callable[[Scenario], bool]
Pass = Callable[[Scenario], Iterator[Scenario]]

MAX_TRIES = 3000
MAX_SECONDS = 30.0
FEW = 8


@dataclass
class Reduction:
    """The smallest scenario found, after how many tries, and whether a fixed point was reached within the bounds."""

    scenario: Scenario
    tries: int = 0
    complete: bool = True


@dataclass
class _Search:
    """The state of one reduction: the best so far, what was tried, and when to stop."""

    still_fails: Predicate
    best: Scenario
    deadline: float
    max_tries: int
    tried: set[bytes] = field(default_factory=set)

    @property
    def exhausted(self) -> bool:
        return len(self.tried) >= self.max_tries or time.monotonic() >= self.deadline

    def accepts(self, candidate: Scenario) -> bool:
        """Whether the candidate is new, valid, and fails the same way."""
        key = encode(candidate)
        if key in self.tried:
            return False
        try:
            check(candidate)
        except ScenarioError:
            return False
        self.tried.add(key)
        try:
            return self.still_fails(candidate)
        except ScenarioError:  # valid, but not for the model
            return False

    def improve(self, propose: Pass) -> bool:
        """Takes the first proposal that still fails, again and again. Returns whether there was one."""
        improved = False
        while candidate := self._first_accepted(propose):
            self.best = candidate
            improved = True
        return improved

    def _first_accepted(self, propose: Pass) -> Scenario | None:
        for candidate in propose(self.best):
            if self.exhausted:
                return None
            if self.accepts(candidate):
                return candidate
        return None


def reduce(
    scenario: Scenario,
    still_fails: Predicate,
    *,
    max_seconds: float = MAX_SECONDS,
    max_tries: int = MAX_TRIES,
) -> Reduction:
    """The smallest scenario reachable by greedy steps for which `still_fails` holds; `scenario` itself must fail."""
    search = _Search(still_fails, scenario, time.monotonic() + max_seconds, max_tries)
    search.tried.add(encode(scenario))
    while not search.exhausted:
        improvements = [search.improve(propose) for propose in PASSES]
        if not any(improvements):
            break
    return Reduction(search.best, tries=len(search.tried) - 1, complete=not search.exhausted)


# ---------------------------------------------------------------------------------------------------------------- steps


def _drop_steps(scenario: Scenario) -> Iterator[Scenario]:
    """Without a run of steps: first half of them, down to single ones. What speaks of a request goes with it."""
    num_steps = len(scenario.steps)
    width = num_steps // 2  # floor: at least one step stays
    while width:
        for first in range(num_steps - width, -1, -1):
            kept = scenario.steps[:first] + scenario.steps[first + width :]
            yield replace(scenario, steps=_without_orphans(kept))
        width //= 2  # floor: ends at 0


def _drop_requests(scenario: Scenario) -> Iterator[Scenario]:
    """Without one request and all that is done to it."""
    for i in range(len(scenario.steps) - 1, -1, -1):
        if isinstance(scenario.steps[i], (Add, Direct)):
            yield replace(scenario, steps=_without_orphans(scenario.steps[:i] + scenario.steps[i + 1 :]))


def _without_orphans(steps: tuple[AnyStep, ...]) -> tuple[AnyStep, ...]:
    """Leaves out what is done to requests that were never added."""
    known: set[str] = set()
    kept: list[AnyStep] = []
    for step in steps:
        if isinstance(step, (Add, Direct)):
            known.add(step.id)
        elif isinstance(step, (Abort, LoadDone, LoadFailed)) and step.id not in known:
            continue
        kept.append(step)
    return tuple(kept)


def _shrink_counts(scenario: Scenario) -> Iterator[Scenario]:
    """Fewer engine steps, fewer generated tokens, plain resets."""
    for i, step in enumerate(scenario.steps):
        if isinstance(step, (Step, Schedule, Update)):
            for count in _smaller(step.count, 1):
                yield _with_step(scenario, i, replace(step, count=count))
        elif isinstance(step, Run):
            yield _with_step(scenario, i, Step(count=1))
        elif isinstance(step, Add):
            for max_tokens in _smaller(step.max_tokens, 1):
                yield _with_step(scenario, i, replace(step, max_tokens=max_tokens))
        elif isinstance(step, ResetPrefixCache) and step.running:
            yield _with_step(scenario, i, ResetPrefixCache())


def _reset_add_fields(scenario: Scenario) -> Iterator[Scenario]:
    """Without salt, priority and the like."""
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Add):
            for name, value in (
                ("salt", None),
                ("lora", None),
                ("priority", 0),
                ("external", None),
                ("load", None),
                ("output", ()),
            ):
                if getattr(step, name) != value:
                    yield _with_step(scenario, i, replace(step, **{name: value}))


def _with_step(scenario: Scenario, index: int, step: AnyStep) -> Scenario:
    return replace(scenario, steps=(*scenario.steps[:index], step, *scenario.steps[index + 1 :]))


# -------------------------------------------------------------------------------------------------------------- prompts


def _drop_spans(scenario: Scenario) -> Iterator[Scenario]:
    """Prompts without one of their parts, or with a stream of their own instead of several parts."""
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Add) and len(step.prompt) > 1:
            for j in range(len(step.prompt) - 1, -1, -1):
                yield _with_step(scenario, i, replace(step, prompt=step.prompt[:j] + step.prompt[j + 1 :]))


def _shrink_spans(scenario: Scenario) -> Iterator[Scenario]:
    """Shorter parts: the same part in every prompt together, then in one prompt alone."""
    spans = dict.fromkeys(span for step in scenario.steps if isinstance(step, Add) for span in step.prompt)
    for span in spans:
        for count in _smaller(span.count, 1):
            yield _map_spans(scenario, partial(_swap, old=span, new=span._replace(count=count)))
        if span.start:
            yield _map_spans(scenario, partial(_swap, old=span, new=span._replace(start=0)))
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Add):
            for j, span in enumerate(step.prompt):
                for count in _smaller(span.count, 1):
                    prompt = (*step.prompt[:j], span._replace(count=count), *step.prompt[j + 1 :])
                    yield _with_step(scenario, i, replace(step, prompt=prompt))


def _swap(span: Span, old: Span, new: Span) -> Span:
    return new if span == old else span


def _map_spans(scenario: Scenario, change: Callable[[Span], Span]) -> Scenario:
    return replace(scenario, steps=tuple(_mapped(step, change) for step in scenario.steps))


def _mapped(step: AnyStep, change: Callable[[Span], Span]) -> AnyStep:
    if not isinstance(step, Add):
        return step
    prompt, output = (tuple(change(span) for span in spans) for spans in (step.prompt, step.output))
    return replace(step, prompt=prompt, output=output)


def _shrink_direct(scenario: Scenario) -> Iterator[Scenario]:
    """Hand-made requests: fewer local tokens, fewer tokens, shorter tables."""
    for i, step in enumerate(scenario.steps):
        if not isinstance(step, Direct):
            continue
        for local in _smaller(step.local, 0):
            yield _with_step(scenario, i, replace(step, local=local))
        for num_tokens in _smaller(step.num_tokens, step.local + 1):
            yield _with_step(scenario, i, replace(step, num_tokens=num_tokens))
        for g, table in enumerate(step.tables):
            if len(table) > 1:
                tables = (*step.tables[:g], table[:-1], *step.tables[g + 1 :])
                yield _with_step(scenario, i, replace(step, tables=tables))
    renumbered = _renumber_blocks(scenario)
    if renumbered != scenario:
        yield renumbered


def _renumber_blocks(scenario: Scenario) -> Scenario:
    """Block IDs 1, 2, 3, ... in the order in which the tables name them."""
    numbers = {0: 0}
    steps: list[AnyStep] = []
    for step in scenario.steps:
        if isinstance(step, Direct):
            tables = tuple(tuple(numbers.setdefault(b, len(numbers)) for b in table) for table in step.tables)
            step = replace(step, tables=tables)
        steps.append(step)
    return replace(scenario, steps=tuple(steps))


# ---------------------------------------------------------------------------------------------------- groups and engine


def _drop_groups(scenario: Scenario) -> Iterator[Scenario]:
    """Without one group, and then also without its share of the pool, which keeps shortage as it was."""
    for g in range(len(scenario.groups) - 1, -1, -1):
        groups = scenario.groups[:g] + scenario.groups[g + 1 :]
        steps = tuple(
            replace(step, tables=step.tables[:g] + step.tables[g + 1 :]) if isinstance(step, Direct) else step
            for step in scenario.steps
        )
        smaller = replace(scenario, groups=groups, steps=steps)
        yield smaller
        num_usable = (scenario.engine.blocks - 1) * len(groups) // len(scenario.groups)  # floor: shortage stays
        if num_usable:
            yield _with_engine(smaller, blocks=1 + num_usable)


def _simplify_kinds(scenario: Scenario) -> Iterator[Scenario]:
    """Full attention instead of another kind."""
    shared = msgspec.structs.fields(Full)
    for g, group in enumerate(scenario.groups):
        if not isinstance(group, Full):
            yield _with_group(scenario, g, Full(**{f.name: getattr(group, f.name) for f in shared}))


def _reset_group_fields(scenario: Scenario) -> Iterator[Scenario]:
    """Group settings back to their defaults, for all groups together and then for one."""
    for name, default in _defaults(type(scenario.groups[0])).items():
        yield _map_groups(scenario, partial(_with_field, name=name, default=default))
    for g, group in enumerate(scenario.groups):
        for name, default in _defaults(type(group)).items():
            yield _with_group(scenario, g, _with_field(group, name, default))


def _with_field(value: Any, name: str, default: object) -> Any:
    return replace(value, **{name: default}) if name in value.__struct_fields__ else value


def _defaults(struct: type[msgspec.Struct]) -> dict[str, object]:
    """Fields that have a default, and it."""
    return {f.name: f.default for f in msgspec.structs.fields(struct) if f.default is not msgspec.NODEFAULT}


def _reset_engine_fields(scenario: Scenario) -> Iterator[Scenario]:
    """Engine settings back to their defaults."""
    for name, default in _defaults(Engine).items():
        if getattr(scenario.engine, name) != default:
            yield _with_engine(scenario, **{name: default})


def _drop_connector(scenario: Scenario) -> Iterator[Scenario]:
    """No connector, or one with fewer settings."""
    if scenario.connector is None:
        return
    if scenario.driver == "scheduler":
        yield replace(scenario, connector=None)
    if scenario.connector.load_failure != "fail":
        yield replace(scenario, connector=replace(scenario.connector, load_failure="fail"))
    for key in scenario.connector.extra:
        extra = {k: v for k, v in scenario.connector.extra.items() if k != key}
        yield replace(scenario, connector=replace(scenario.connector, extra=extra))


def _shrink_sizes(scenario: Scenario) -> Iterator[Scenario]:
    """A smaller pool, smaller windows, smaller blocks; all blocks halved together with the prompts."""
    for blocks in _smaller(scenario.engine.blocks, 2):
        yield _with_engine(scenario, blocks=blocks)
    yield _scaled_down(scenario)
    for g, group in enumerate(scenario.groups):
        for name in ("window", "chunk", "block"):
            for value in _smaller(getattr(group, name, 1), 1):
                yield _with_group(scenario, g, replace(group, **{name: value}))
    for dcp in _smaller(scenario.engine.dcp, 1):
        yield _with_engine(scenario, dcp=dcp)


def _scaled_down(scenario: Scenario) -> Scenario:
    """Every size in tokens halved: the same picture with smaller blocks. Rounds up, so that nothing becomes 0."""

    def half(size: int) -> int:
        return (size + 1) // 2  # rounds up

    def half_group(group: AnyGroup) -> AnyGroup:
        sizes = {name: half(getattr(group, name)) for name in ("block", "window", "chunk") if hasattr(group, name)}
        return replace(group, **sizes, kernel_block=group.kernel_block and half(group.kernel_block))

    return _map_groups(_map_spans(scenario, lambda span: span._replace(count=half(span.count))), half_group)


def _smaller(value: int, low: int) -> Iterator[int]:
    """Values below `value`, the smallest first, then ever closer to it; all of them where they are few."""
    if value - low <= FEW:
        yield from range(low, value)
        return
    distance = value - low
    while distance > 0:
        yield value - distance
        distance //= 2  # floor: ends at 0


def _with_engine(scenario: Scenario, **settings: Any) -> Scenario:
    return replace(scenario, engine=replace(scenario.engine, **settings))


def _with_group(scenario: Scenario, index: int, group: AnyGroup) -> Scenario:
    return replace(scenario, groups=(*scenario.groups[:index], group, *scenario.groups[index + 1 :]))


def _map_groups(scenario: Scenario, change: Callable[[AnyGroup], AnyGroup]) -> Scenario:
    return replace(scenario, groups=tuple(change(group) for group in scenario.groups))


# --------------------------------------------------------------------------------------------------------------- naming


def _rename(scenario: Scenario) -> Iterator[Scenario]:
    """Requests A, B, C and streams a, b, c in order of appearance, so that a person reads it easily."""
    ids: dict[str, str] = {}
    for step in scenario.steps:
        if isinstance(step, (Add, Direct)):
            ids.setdefault(step.id, chr(ord("A") + len(ids)) if len(ids) < 26 else f"R{len(ids)}")
    outputs = {f"{old}.out": f"{new}.out" for old, new in ids.items()}
    streams = dict(outputs)
    for span in (span for step in scenario.steps if isinstance(step, Add) for span in (*step.prompt, *step.output)):
        streams.setdefault(span.stream, f"p{len(streams) - len(outputs)}")
    renamed = _map_spans(scenario, lambda span: span._replace(stream=streams[span.stream]))
    steps = tuple(
        replace(step, id=ids[step.id]) if isinstance(step, (Add, Direct, Abort, LoadDone, LoadFailed)) else step
        for step in renamed.steps
    )
    if steps != scenario.steps:
        yield replace(scenario, steps=steps)


PASSES: tuple[Pass, ...] = (
    _drop_steps,
    _drop_requests,
    _drop_groups,
    _drop_connector,
    _simplify_kinds,
    _reset_engine_fields,
    _reset_group_fields,
    _drop_spans,
    _shrink_counts,
    _reset_add_fields,
    _shrink_sizes,
    _shrink_spans,
    _shrink_direct,
    _rename,
)

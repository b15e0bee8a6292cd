"""Makes valid scenarios: one generator, written against a tiny chooser.

A seeded chooser drives campaigns at full speed, a Hypothesis chooser the pytest suites, so that both explore the same
space. It is a swarm: each case switches a random subset of FEATURES on; sizes sit at and beside block boundaries; pools
are tight often enough that eviction, refusal and preemption are common. A new kind of group is one entry of KINDS, a new
setting one entry of FEATURES and the line that reads it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from sim.geometry import effective_block_size, pages_are_dense
from sim.refusals import refusal
from sim.releases import Rules
from sim.scenario import (
    MLA,
    Abort,
    Add,
    AnyGroup,
    AnyStep,
    Circular,
    Connector,
    Direct,
    Engine,
    Full,
    Mamba,
    ResetPrefixCache,
    Run,
    Scenario,
    SlidingWindow,
    Span,
    Step,
)
from sim.startup import smallest_pool

T = TypeVar("T")

MAX_PROMPT_TOKENS = 110
RUN_LIMIT = 400


# -------------------------------------------------------------------------------------------------------------- choosers


class Chooser(Protocol):
    """Where the randomness comes from."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options; earlier ones are simpler."""

    def flag(self, probability: float) -> bool:
        """True with about this probability."""


class SeededChooser:
    """A fast chooser; the same seed gives the same choices on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def one_of(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def flag(self, probability: float) -> bool:
        return self._random() < probability


class HypothesisChooser:
    """Choices drawn by Hypothesis, so that failures shrink. `draw` is what `st.composite` hands over."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw = draw
        self._strategies = strategies

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(self._strategies.integers(low, high)))

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def flag(self, probability: float) -> bool:
        return self.integer(0, 99) >= 100 - round(probability * 100)


def case_seed(campaign_seed: int, case_index: int) -> int:
    """The chooser's seed of one case of a campaign."""
    return (campaign_seed << 32) + case_index


# -------------------------------------------------------------------------------------------------------------- features


@dataclass(frozen=True)
class Feature:
    """Something a case may use: how often, and whether a release knows it."""

    probability: float
    allowed: Callable[[Rules], bool] = lambda rules: True


FEATURES: dict[str, Feature] = {
    "direct": Feature(0.15),
    "connector": Feature(0.5),
    "no_prefix_caching": Feature(0.12),
    "several_groups": Feature(0.55),
    "mixed_blocks": Feature(0.4),
    "dcp": Feature(0.2),
    "dcp_replicated": Feature(0.1, lambda rules: rules.dcp_sharded_flag),
    "chunked_off": Feature(0.15),
    "long_prefill": Feature(0.25),
    "small_budget": Feature(0.5),
    "few_seqs": Feature(0.25),
    "watermark": Feature(0.15),
    "gate_off": Feature(0.3),
    "retention_dense": Feature(0.3),
    "retention_interval": Feature(0.2),
    "tight_pool": Feature(0.6),
    "pool_below_smallest": Feature(0.04),
    "refused": Feature(0.02),
    "roomy_length": Feature(0.2),
    "layers": Feature(0.4),
    "kernel_blocks": Feature(0.2),
    "other_dtype": Feature(0.3),
    "mixed_dtypes": Feature(0.15),
    "other_mean": Feature(0.3),
    "random_fill": Feature(0.06),
    "startup_fill": Feature(0.06),
    "sharing": Feature(0.85),
    "bursts": Feature(0.5),
    "phases": Feature(0.35),
    "aborts": Feature(0.25),
    "resets": Feature(0.25),
    "reused_ids": Feature(0.3),
    "salts": Feature(0.1),
    "loras": Feature(0.07),
    "match_unit": Feature(0.1),
}


# ----------------------------------------------------------------------------------------------------------------- kinds


@dataclass(frozen=True)
class Kind:
    """How the generator makes one kind of group.

    make: the group, given its block size in tokens; skipped: how many leading tokens such a group no longer needs once
    `num_computed` tokens are computed; companion: it makes sense beside other groups only; caches: it can take part in
    prefix caching.
    """

    weight: int
    make: Callable[[_Draft, int], AnyGroup]
    skipped: Callable[[Any, int], int] = lambda group, num_computed: 0
    companion: bool = False
    caches: bool = True
    dcp_always: bool = False


def _make_full(draft: _Draft, block: int) -> AnyGroup:
    sharded = False if draft.dcp > 1 and "dcp_replicated" in draft.on and draft.chooser.flag(0.5) else None
    return Full(block=block, dcp_sharded=sharded)


def _make_mla(draft: _Draft, block: int) -> AnyGroup:
    return MLA(block=block)


def _make_sliding_window(draft: _Draft, block: int) -> AnyGroup:
    window = max(1, draft.near_multiple(block, 4)) if draft.chooser.flag(0.8) else draft.chooser.integer(1, 3)
    return SlidingWindow(block=block, window=window)


def _make_circular(draft: _Draft, block: int) -> AnyGroup:
    return Circular(block=block)


def _make_mamba(draft: _Draft, block: int) -> AnyGroup:
    """A state group. Its block is one request's whole length, as vLLM plans it; the direct driver may show it shorter
    blocks, so that the state block comes after null ones."""
    return Mamba(block=block if "direct" in draft.on else draft.max_model_len)


KINDS: dict[str, Kind] = {
    "full": Kind(weight=6, make=_make_full, dcp_always=True),
    "sliding_window": Kind(weight=5, make=_make_sliding_window, skipped=lambda group, x: max(0, x - group.window + 1)),
    "mla": Kind(weight=2, make=_make_mla, dcp_always=True),
    "circular": Kind(weight=1, make=_make_circular, companion=True),
    "mamba": Kind(weight=1, make=_make_mamba, skipped=lambda group, x: x - 1, caches=False),
}


# ------------------------------------------------------------------------------------------------------------- generator


@dataclass
class _Request:
    """A request to come: `prompt` as spans, `follows` when it quotes another one's output."""

    prompt: tuple[Span, ...]
    max_tokens: int
    salt: str | None = None
    lora: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.count for span in self.prompt)


@dataclass
class _Draft:
    """What has been decided so far. Sizes are in tokens."""

    chooser: Chooser
    rules: Rules
    on: frozenset[str]
    base_block: int = 16
    dcp: int = 1
    max_model_len: int = 0
    ids: list[str] = field(default_factory=list)
    requests: list[_Request] = field(default_factory=list)
    groups: tuple[AnyGroup, ...] = ()

    def near_multiple(self, unit: int, most: int) -> int:
        """k * unit, or one beside it, or anything up to most * unit; at least 1."""
        exact = self.chooser.integer(1, most) * unit
        return max(1, exact + self.chooser.one_of((0, 0, 1, -1, 0, 1, -1, self.chooser.integer(-unit, unit))))


def generate(chooser: Chooser, rules: Rules, features: Collection[str] = tuple(FEATURES)) -> Scenario:
    """A valid scenario for a release. `features`: names out of FEATURES that may be switched on."""
    on = frozenset(name for name in features if FEATURES[name].allowed(rules) and chooser.flag(FEATURES[name].probability))
    draft = _Draft(chooser=chooser, rules=rules, on=on)
    draft.base_block = chooser.one_of((16, 4, 8, 2, 16, 4, 3, 1))
    draft.dcp = chooser.one_of((2, 2, 4)) if "dcp" in on else 1
    kinds = _choose_kinds(draft)
    _make_requests(draft)
    draft.max_model_len = _choose_max_model_len(draft)
    draft.groups = _make_groups(draft, kinds)
    scenario = Scenario(
        driver="direct" if "direct" in on else "scheduler",
        engine=_make_engine(draft),
        connector=_make_connector(draft),
        groups=draft.groups,
        steps=(),
    )
    scenario = _direct_scenario(draft, scenario) if "direct" in on else _scheduler_scenario(draft, scenario)
    return _refused(draft, scenario) if "refused" in on else scenario


# ------------------------------------------------------------------------------------------------------ groups and engine


def _choose_kinds(draft: _Draft) -> list[str]:
    """Kinds of the groups in order: at least one that stands alone; what the release cannot combine stays out."""
    num_groups = draft.chooser.one_of((2, 2, 3, 4)) if "several_groups" in draft.on else 1
    candidates = [name for name, kind in KINDS.items() if _kind_fits(draft, kind)]
    weighted = [name for name in candidates for _ in range(KINDS[name].weight)]
    kinds = [draft.chooser.one_of(weighted) for _ in range(num_groups)]
    if all(KINDS[name].companion for name in kinds):
        kinds[draft.chooser.integer(0, num_groups - 1)] = "full"
    return kinds


def _kind_fits(draft: _Draft, kind: Kind) -> bool:
    if draft.dcp > 1 and not (kind.dcp_always or draft.rules.dcp_sharded_flag):
        return False
    return kind.caches or "no_prefix_caching" in draft.on or "direct" in draft.on


def _make_groups(draft: _Draft, kinds: Sequence[str]) -> tuple[AnyGroup, ...]:
    groups: list[AnyGroup] = []
    dtypes = _choose_dtypes(draft)
    for name in kinds:
        factor = draft.chooser.one_of((1, 2, 1, 3, 4)) if "mixed_blocks" in draft.on else 1
        group = KINDS[name].make(draft, draft.base_block * factor)
        settings: dict[str, Any] = {}
        if "layers" in draft.on:
            settings["layers"] = draft.chooser.integer(1, 3)
        if dtypes:
            settings["dtype"] = draft.chooser.one_of(dtypes)
        groups.append(replace(group, **settings) if settings else group)
    return _with_kernel_blocks(draft, tuple(groups)) if "kernel_blocks" in draft.on else tuple(groups)


def _choose_dtypes(draft: _Draft) -> tuple[str, ...]:
    """The element types that the groups may use; a model has one fp8 format."""
    plain = ("bfloat16", "float16", "float32")
    fp8 = draft.chooser.one_of(("fp8_e4m3", "fp8_e5m2"))
    if "mixed_dtypes" in draft.on:
        return ("bfloat16", draft.chooser.one_of(("float16", "float32", fp8)))
    if "other_dtype" in draft.on:
        return (draft.chooser.one_of((*plain[1:], fp8)),)
    return ()


def _with_kernel_blocks(draft: _Draft, groups: tuple[AnyGroup, ...]) -> tuple[AnyGroup, ...]:
    """Splits blocks into smaller kernel blocks. vLLM can do so only where a block is one dense page; a state is never
    split."""
    if not pages_are_dense(groups):
        return groups
    return tuple(
        replace(group, kernel_block=draft.chooser.one_of(divisors))
        if not isinstance(group, Mamba) and (divisors := _proper_divisors(group.block))
        else group
        for group in groups
    )


def _proper_divisors(block: int) -> list[int]:
    """The three largest sizes below `block` that divide it."""
    return [size for size in range(block // 2, 0, -1) if block % size == 0][:3]  # floor: none is above half


def _choose_max_model_len(draft: _Draft) -> int:
    """Close to the longest request, so that the smallest pool is small too; sometimes cutting its output short."""
    longest = max(request.num_prompt_tokens + request.max_tokens for request in draft.requests)
    longest_prompt = max(request.num_prompt_tokens for request in draft.requests)
    if "roomy_length" in draft.on:
        # Small blocks and great lengths make pools of thousands of blocks, which cost time and show nothing new.
        return max(2 * longest, draft.chooser.one_of((0, 32, 128)) * draft.base_block)
    return max(2, longest_prompt + 1, longest + draft.chooser.one_of((0, 1, 3, -1, -4)))


def _make_engine(draft: _Draft) -> Engine:
    """The engine without its pool, which is chosen once everything else stands."""
    chooser, on = draft.chooser, draft.on
    max_num_seqs = chooser.integer(1, 4) if "few_seqs" in on else 16
    budget = 8192
    if "small_budget" in on:
        budget = draft.near_multiple(draft.base_block, 6)
    chunked_prefill = "chunked_off" not in on
    if not chunked_prefill:
        budget = max(budget, draft.max_model_len + chooser.one_of((0, 1, draft.base_block)))
    budget = max(budget, max_num_seqs)
    threshold = min(draft.near_multiple(draft.base_block, 3), draft.max_model_len) if "long_prefill" in on else 0
    return Engine(
        blocks=2,
        prefix_caching=_caches_prefixes(draft),
        max_model_len=draft.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        chunked_prefill=chunked_prefill,
        long_prefill_token_threshold=threshold,
        dcp=draft.dcp,
        retention_interval=_choose_retention_interval(draft),
        prefix_match_unit=_choose_match_unit(draft),
        watermark=chooser.one_of((0.1, 0.05, 0.25)) if "watermark" in on else 0.0,
        reserve_full_isl="gate_off" not in on,
    )


def _caches_prefixes(draft: _Draft) -> bool:
    return "no_prefix_caching" not in draft.on and all(KINDS[group.kind].caches for group in draft.groups)


def _choose_retention_interval(draft: _Draft) -> int | None:
    """null (dense), 0, or a multiple of the scheduler block size where a group makes use of it."""
    if "retention_dense" in draft.on:
        return None
    uses_it = any(isinstance(group, SlidingWindow) for group in draft.groups) and _caches_prefixes(draft)
    if "retention_interval" not in draft.on or not uses_it:
        return 0
    sizes = [effective_block_size(group, draft.dcp, draft.rules) for group in draft.groups]
    return math.lcm(*sizes) * draft.chooser.integer(1, 3)


def _choose_match_unit(draft: _Draft) -> int | None:
    """A hash block size that divides every block, where several groups make it matter."""
    if "match_unit" not in draft.on or len(draft.groups) == 1:
        return None
    common = math.gcd(*(effective_block_size(group, draft.dcp, draft.rules) for group in draft.groups))
    return draft.chooser.one_of([unit for unit in range(1, common + 1) if common % unit == 0])


def _make_connector(draft: _Draft) -> Connector | None:
    if not draft.on & {"connector", "direct"}:
        return None
    extra: dict[str, Any] = {}
    if "other_mean" in draft.on:
        extra["fill_mean"] = draft.chooser.one_of((0.5, -2.0, 0.0, 1e6, 3.14159))
    if "random_fill" in draft.on:
        extra["fill_std"] = 0.25
    if "startup_fill" in draft.on:
        extra["startup_fill"] = True
    return Connector(name="DecodeBenchConnector", extra=extra)


def _with_pool(draft: _Draft, scenario: Scenario, num_working_blocks: int) -> Scenario:
    """Sets the pool: the smallest that start-up accepts, a little more, what the requests want together, or plenty."""
    chooser = draft.chooser
    smallest = smallest_pool(scenario, draft.rules)
    if "tight_pool" in draft.on:
        blocks = smallest + chooser.one_of((0, 0, 1, 2, chooser.integer(0, max(1, num_working_blocks // 2))))
    else:
        blocks = max(smallest, num_working_blocks) + chooser.integer(0, num_working_blocks)
    if "pool_below_smallest" in draft.on:
        blocks = max(2, smallest - chooser.integer(1, 3))
    return _with_engine(scenario, blocks=blocks)


def _with_engine(scenario: Scenario, **settings: Any) -> Scenario:
    return replace(scenario, engine=replace(scenario.engine, **settings))


# -------------------------------------------------------------------------------------------------------------- refusals


def _refused(draft: _Draft, scenario: Scenario) -> Scenario:
    """The scenario with one setting that its release refuses, if there is one."""
    engine = scenario.engine
    scheduler_block_size = math.lcm(*(effective_block_size(g, draft.dcp, draft.rules) for g in scenario.groups))
    changes: tuple[dict[str, Any], ...] = (
        {"chunked_prefill": False, "max_num_batched_tokens": max(1, engine.max_model_len - 1), "max_num_seqs": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4, "chunked_prefill": True},
        {"long_prefill_token_threshold": engine.max_model_len + 1},
        {"retention_interval": scheduler_block_size + 1},
        {"prefix_match_unit": scheduler_block_size + 1},
        {"dcp": 2},
        {"prefix_caching": True},
    )
    candidates = [candidate for change in changes if _is_refused(candidate := _with_engine(scenario, **change), draft)]
    return draft.chooser.one_of(candidates) if candidates else scenario


def _is_refused(scenario: Scenario, draft: _Draft) -> bool:
    return refusal(scenario, draft.rules) is not None


# -------------------------------------------------------------------------------------------------------------- requests


def _make_requests(draft: _Draft) -> None:
    num_requests = draft.chooser.one_of((3, 2, 4, 1, 5, 6))
    for request_index in range(num_requests):
        prompt = _choose_prompt(draft, request_index)
        max_tokens = draft.chooser.one_of((1, 2, 4, draft.chooser.integer(1, 20)))
        salt = draft.chooser.one_of((None, "x", "y")) if "salts" in draft.on else None
        lora = draft.chooser.one_of((None, "x", "y")) if "loras" in draft.on else None
        draft.requests.append(_Request(prompt, max_tokens, salt, lora))


def _choose_prompt(draft: _Draft, request_index: int) -> tuple[Span, ...]:
    """A fresh prompt, or one that shares tokens with an earlier one in one of PROMPT_FORMS' ways."""
    if draft.requests and "sharing" in draft.on and draft.chooser.flag(0.8):
        earlier_index = draft.chooser.integer(0, len(draft.requests) - 1)
        form = draft.chooser.one_of(PROMPT_FORMS)
        prompt = form(draft, earlier_index, f"s{request_index}")
        if 0 < sum(span.count for span in prompt) <= MAX_PROMPT_TOKENS:
            return prompt
    return (Span(f"s{request_index}", 0, _prompt_length(draft)),)


def _prompt_length(draft: _Draft) -> int:
    most = max(1, MAX_PROMPT_TOKENS // (2 * draft.base_block * draft.dcp))  # floor: a full block count that leaves room
    unit = draft.base_block * draft.dcp
    return min(draft.near_multiple(unit, min(most, 6)), MAX_PROMPT_TOKENS)


def _replay(draft: _Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The same prompt again."""
    return draft.requests[earlier_index].prompt


def _fork(draft: _Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The same start, cut near a block boundary, and a tail of its own."""
    earlier = draft.requests[earlier_index].prompt
    shared = _cut(earlier, draft.near_multiple(draft.base_block, 6))
    return (*shared, Span(stream, 0, draft.near_multiple(draft.base_block, 2)))


def _shorten(draft: _Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """A part of it."""
    return _cut(draft.requests[earlier_index].prompt, draft.near_multiple(draft.base_block, 6))


def _extend(draft: _Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """All of it and some tokens more."""
    earlier = draft.requests[earlier_index].prompt
    return (*earlier, Span(stream, 0, draft.near_multiple(draft.base_block, 2)))


def _follow_up(draft: _Draft, earlier_index: int, stream: str) -> tuple[Span, ...]:
    """The next turn of a conversation: its prompt, what it answered, and a new question."""
    earlier = draft.requests[earlier_index]
    answer = Span(f"{request_id(earlier_index)}.out", 0, draft.chooser.integer(1, earlier.max_tokens))
    return (*earlier.prompt, answer, Span(stream, 0, draft.chooser.integer(1, draft.base_block + 1)))


PROMPT_FORMS = (_replay, _fork, _shorten, _extend, _follow_up)


def request_id(request_index: int) -> str:
    """A, B, C, ..."""
    return chr(ord("A") + request_index)


def _cut(prompt: tuple[Span, ...], num_tokens: int) -> tuple[Span, ...]:
    """The first tokens of a prompt."""
    spans: list[Span] = []
    for span in prompt:
        if num_tokens <= 0:
            break
        spans.append(span._replace(count=min(span.count, num_tokens)))
        num_tokens -= span.count
    return tuple(spans)


# --------------------------------------------------------------------------------------------------------------- drivers


def _scheduler_scenario(draft: _Draft, scenario: Scenario) -> Scenario:
    steps = tuple(_scheduler_steps(draft))
    return _with_pool(draft, replace(scenario, steps=steps), _num_working_blocks(draft))


def _num_working_blocks(draft: _Draft) -> int:
    """Blocks that all requests hold together if nothing is shared, the null block included."""
    num_tokens = [request.num_prompt_tokens + request.max_tokens for request in draft.requests]
    sizes = [effective_block_size(group, draft.dcp, draft.rules) for group in draft.groups]
    return 1 + sum(math.ceil(n / size) for n in num_tokens for size in sizes)


def _scheduler_steps(draft: _Draft) -> Iterator[AnyStep]:
    """The requests in order, with steps, aborts and resets between them, and a run to the end."""
    chooser, on = draft.chooser, draft.on
    in_burst = "bursts" in on and chooser.flag(0.5)
    ended: list[str] = []
    live: list[str] = []
    for request_index, request in enumerate(draft.requests):
        name = request_id(request_index)
        if ended and "reused_ids" in on and chooser.flag(0.5):
            name = ended.pop(chooser.integer(0, len(ended) - 1))
        yield Add(id=name, prompt=request.prompt, max_tokens=request.max_tokens, salt=request.salt, lora=request.lora)
        live.append(name)
        if in_burst and chooser.flag(0.6):
            continue
        if "phases" in on and chooser.flag(0.4) and "pool_below_smallest" not in on:
            yield Run(limit=RUN_LIMIT)
            ended += live
            live.clear()
        else:
            yield Step(count=chooser.one_of((1, 2, 3, 1, 5, 8)))
        if live and "aborts" in on and chooser.flag(0.4):
            victim = live.pop(chooser.integer(0, len(live) - 1))
            yield Abort(id=victim)
            ended.append(victim)
        if "resets" in on and chooser.flag(0.35):
            yield ResetPrefixCache(running=chooser.flag(0.35))
    yield Run(limit=RUN_LIMIT)


def _direct_scenario(draft: _Draft, scenario: Scenario) -> Scenario:
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
    return _with_engine(scenario, blocks=blocks)


def _direct_shape(draft: _Draft, request: _Request) -> tuple[int, int, list[tuple[int, int]]]:
    """(tokens, local tokens, per group how many null blocks lead and how many real ones follow)."""
    num_tokens = request.num_prompt_tokens
    num_local = min(draft.near_multiple(draft.base_block, 4) - 1, num_tokens - 1) if draft.chooser.flag(0.7) else 0
    return num_tokens, num_local, [_direct_extent(draft, group, num_tokens) for group in draft.groups]


def _direct_extent(draft: _Draft, group: AnyGroup, num_tokens: int) -> tuple[int, int]:
    """Null and real blocks of a request whose last token is to be computed: the others are local or external."""
    if isinstance(group, Circular):
        return 0, 1
    size = effective_block_size(group, draft.dcp, draft.rules)
    num_positions = math.ceil(num_tokens / size)
    num_nulls = max(0, KINDS[group.kind].skipped(group, num_tokens - 1)) // size  # floor: a block partly needed is kept
    return num_nulls, num_positions - num_nulls

"""The engine, connector and pool of a case, and settings that its release refuses."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec.structs import replace

from diff_tests.generate.draft import Draft
from sim.geometry import effective_block_size
from sim.refusals import refusal
from sim.scenario import AnyGroup, Connector, Engine, Mamba, Scenario, SlidingWindow, SlidingWindowMLA, Speculative
from sim.speculation import num_draft_slots, num_lookahead
from sim.startup import smallest_pool


def choose_speculative(draft: Draft) -> Speculative | None:
    """Drafts, and how many of them are accepted in turn."""
    if "speculative" not in draft.on:
        return None
    chooser = draft.chooser
    methods: list[Literal["ngram", "draft_model", "eagle"]] = ["eagle", "draft_model"]
    if "async_scheduling" not in draft.on or draft.rules.async_scheduling_takes_ngram:
        methods.append("ngram")
    tokens = chooser.one_of((1, 2, 3, 5))
    accept = tuple(chooser.integer(0, tokens) for _ in range(chooser.integer(0, 3)))
    return Speculative(method=chooser.one_of(methods), tokens=tokens, accept=accept)


def choose_max_model_len(draft: Draft) -> int:
    """Close to the longest request, so that the smallest pool is small too; sometimes cutting its output short."""
    longest = max(request.num_prompt_tokens + request.max_tokens for request in draft.requests)
    longest_prompt = max(request.num_prompt_tokens for request in draft.requests)
    if "roomy_length" in draft.on:
        # Small blocks and great lengths make pools of thousands of blocks, which cost time and show nothing new.
        return max(2 * longest, draft.chooser.one_of((0, 32, 128)) * draft.base_block)
    return max(2, longest_prompt + 1, longest + draft.chooser.one_of((0, 1, 3, -1, -4)))


def make_engine(draft: Draft) -> Engine:
    """The engine without its pool, which is chosen once everything else stands."""
    chooser, on = draft.chooser, draft.on
    max_num_seqs = chooser.integer(1, 4) if "few_seqs" in on else 16
    chunked_prefill = "chunked_off" not in on
    has_threshold = "long_prefill" in on
    return Engine(
        blocks=2,
        prefix_caching=caches_prefixes(draft),
        max_model_len=draft.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_choose_budget(draft, max_num_seqs, chunked_prefill),
        chunked_prefill=chunked_prefill,
        long_prefill_token_threshold=(
            min(draft.near_multiple(draft.base_block, 3), draft.max_model_len) if has_threshold else 0
        ),
        long_prefill_adaptive=has_threshold and "long_prefill_adaptive" in on,
        prefill_schedule_interval=chooser.integer(2, 5) if "prefill_interval" in on else 1,
        policy="priority" if "priority" in on else "fcfs",
        async_scheduling="async_scheduling" in on,
        dcp=draft.dcp,
        retention_interval=_choose_retention_interval(draft),
        prefix_match_unit=_choose_match_unit(draft),
        watermark=chooser.one_of((0.1, 0.05, 0.25)) if "watermark" in on else 0.0,
        reserve_full_isl="gate_off" not in on,
        speculative=draft.speculative,
        kv_events="kv_events" in on,
    )


def _choose_budget(draft: Draft, max_num_seqs: int, chunked_prefill: bool) -> int:
    """Tokens per step: plenty, or a few blocks; what vLLM asks for at least."""
    budget = draft.near_multiple(draft.base_block, 6) if "small_budget" in draft.on else 8192
    if not chunked_prefill:
        budget = max(budget, draft.max_model_len + draft.chooser.one_of((0, 1, draft.base_block)))
    longest_encoder = max(request.encoder for request in draft.requests)  # its tokens are taken in one step
    drafting = Engine(blocks=2, speculative=draft.speculative)
    beside = num_lookahead if draft.rules.token_budget_must_exceed_lookahead else num_draft_slots
    return max(budget, max_num_seqs, longest_encoder, beside(drafting) + 1)


def caches_prefixes(draft: Draft) -> bool:
    """Whether the engine has a prefix cache. States of mode `none` cannot be cached."""
    return "no_prefix_caching" not in draft.on and not any(
        isinstance(group, Mamba) and group.mode == "none" for group in draft.groups
    )


def _block_sizes(draft: Draft) -> list[int]:
    return [effective_block_size(group, draft.dcp, draft.rules) for group in draft.groups]


def _choose_retention_interval(draft: Draft) -> int | None:
    """null (dense), 0, or a multiple of the scheduler block size where a group makes use of it."""
    if "retention_dense" in draft.on:
        return None
    uses_it = any(
        isinstance(group, (SlidingWindow, SlidingWindowMLA, Mamba)) for group in draft.groups
    ) and caches_prefixes(draft)
    if "retention_interval" not in draft.on or not uses_it:
        return 0
    return math.lcm(*_block_sizes(draft)) * draft.chooser.integer(1, 3)


def _choose_match_unit(draft: Draft) -> int | None:
    """A hash block size that divides every block, where several groups make it matter. States of mode `align` are the
    reason why it exists: with it they are found inside their blocks."""
    has_states = any(isinstance(group, Mamba) and group.mode == "align" for group in draft.groups)
    is_wanted = "match_unit" in draft.on or (has_states and draft.chooser.flag(0.5))
    if not is_wanted or len(draft.groups) == 1:
        return None
    common = math.gcd(*_block_sizes(draft))
    return draft.chooser.one_of([unit for unit in range(1, common + 1) if common % unit == 0])


def _may_recompute(draft: Draft) -> bool:
    """Whether what a failed load leaves can be followed. With drafts and steps in flight a request goes on counting tokens
    that never come (known issue placeholder-of-failed-load), so that nobody can tell where its next step begins."""
    return not {"speculative", "async_scheduling"} <= draft.on


def make_connector(draft: Draft) -> Connector | None:
    """None, the connector under test, or one that answers what the requests say."""
    if draft.is_scripted:
        recomputes = "failed_loads" in draft.on and draft.chooser.flag(0.6) and _may_recompute(draft)
        return Connector(name="scripted", load_failure="recompute" if recomputes else "fail")
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


def with_pool(draft: Draft, scenario: Scenario) -> Scenario:
    """Sets the pool: the smallest that start-up accepts, a little more, what the requests want together, or plenty."""
    chooser = draft.chooser
    smallest, num_working_blocks = smallest_pool(scenario, draft.rules), _num_working_blocks(draft)
    if "tight_pool" in draft.on:
        blocks = smallest + chooser.one_of((0, 0, 1, 2, chooser.integer(0, max(1, num_working_blocks // 2))))
    else:
        blocks = max(smallest, num_working_blocks) + chooser.integer(0, num_working_blocks)
    if "pool_below_smallest" in draft.on:
        blocks = max(2, smallest - chooser.integer(1, 3))
    return with_engine(scenario, blocks=blocks)


def _num_working_blocks(draft: Draft) -> int:
    """Blocks that all requests hold together if nothing is shared, the null block included."""
    num_tokens = [request.num_prompt_tokens + request.max_tokens for request in draft.requests]
    return 1 + sum(_num_blocks(draft, group, n) for n in num_tokens for group in draft.groups)


def _num_blocks(draft: Draft, group: AnyGroup, num_tokens: int) -> int:
    if isinstance(group, Mamba):
        return 2 + group.speculative_blocks + group.checkpoint_blocks
    return math.ceil(num_tokens / effective_block_size(group, draft.dcp, draft.rules))


def with_engine(scenario: Scenario, **settings: Any) -> Scenario:
    """The scenario with other engine settings."""
    return replace(scenario, engine=replace(scenario.engine, **settings))


# -------------------------------------------------------------------------------------------------------------- refusals


def refused(draft: Draft, scenario: Scenario) -> Scenario:
    """The scenario with one setting that its release refuses, if there is one."""
    engine = scenario.engine
    scheduler_block_size = math.lcm(*_block_sizes(draft))
    changes: tuple[dict[str, Any], ...] = (
        {"chunked_prefill": False, "max_num_batched_tokens": max(1, engine.max_model_len - 1), "max_num_seqs": 1},
        {"max_num_batched_tokens": 3, "max_num_seqs": 4, "chunked_prefill": True},
        {"long_prefill_token_threshold": engine.max_model_len + 1},
        {"long_prefill_adaptive": True},
        {"retention_interval": scheduler_block_size + 1},
        {"prefix_match_unit": scheduler_block_size + 1},
        {"dcp": 2},
        {"prefix_caching": True},
        {"async_scheduling": True, "speculative": Speculative(method="ngram", tokens=2)},
    )
    candidates = [candidate for change in changes if _is_refused(candidate := with_engine(scenario, **change), draft)]
    return draft.chooser.one_of(candidates) if candidates else scenario


def _is_refused(scenario: Scenario, draft: Draft) -> bool:
    return refusal(scenario, draft.rules) is not None

"""What a release refuses by design, before anything runs: configurations that contradict themselves or each other.

Only the type of vLLM's exception is a prediction; the words are ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.geometry import (
    FULL_LIKE,
    block_sizes,
    counted_block_sizes,
    is_dcp_sharded,
    is_prefix_cacheable,
    replay_windows,
    splits_gaps,
)
from sim.history import Refusal
from sim.releases import Rules
from sim.scenario import AnyGroup, Mamba, Scenario, SlidingWindow, SlidingWindowMLA
from sim.speculation import num_draft_slots, num_lookahead


def refusal(scenario: Scenario, rules: Rules) -> Refusal | None:
    """The refusal that vLLM answers the scenario's configuration with, or None if it accepts it."""
    return next(_refusals(scenario, rules), None)


def _refusals(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """In the order in which vLLM checks: settings, block sizes, groups, groups together."""
    yield from _settings(scenario)
    yield from _unknown_settings(scenario, rules)
    yield from _drafting(scenario, rules)
    yield from _unknown_groups(scenario, rules)
    yield from _match_unit(scenario, rules)
    yield from _kernel_blocks(scenario, rules)
    if scenario.driver == "direct":
        return  # what follows is checked by the scheduler, and there is none
    yield from _context_parallel_windows(scenario, rules)
    yield from _retention(scenario, rules)
    yield from _prefix_caching(scenario, rules)
    yield from _replayed_windows(scenario)


def _settings(scenario: Scenario) -> Iterator[Refusal]:
    """Limits in tokens that contradict each other."""
    engine = scenario.engine
    budget = engine.max_num_batched_tokens
    if not engine.chunked_prefill and budget < engine.max_model_len:
        yield Refusal(type="ValidationError", message="without chunks a whole prompt must fit the token budget")
    if budget < engine.max_num_seqs:
        yield Refusal(type="ValidationError", message="the token budget is below one token per sequence")
    if engine.long_prefill_token_threshold > engine.max_model_len:
        yield Refusal(type="ValidationError", message="the long-prefill threshold is above the maximum length")


def _drafting(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """A step must have room for a token beside the drafts."""
    engine = scenario.engine
    taken = num_lookahead(engine) if rules.token_budget_must_exceed_lookahead else num_draft_slots(engine)
    if engine.speculative is not None and engine.max_num_batched_tokens <= taken:
        yield Refusal(type="ValueError", message="the token budget leaves no room beside the drafts")


def _unknown_settings(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """Settings and combinations that other releases know."""
    engine, groups = scenario.engine, scenario.groups
    if engine.long_prefill_adaptive and not rules.long_prefill_threshold_adapts:
        yield Refusal(type="ValidationError", message="no adaptive long-prefill threshold")
    if not rules.mamba_mode_all_exists and any(isinstance(group, Mamba) and group.mode == "all" for group in groups):
        yield Refusal(type="ValidationError", message="no Mamba mode all")
    is_ngram = engine.speculative is not None and engine.speculative.method == "ngram"
    if engine.async_scheduling and is_ngram and not rules.async_scheduling_takes_ngram:
        yield Refusal(type="ValidationError", message="no drafts from the prompt with asynchronous scheduling")


def _unknown_groups(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """Groups that other releases know."""
    if not rules.bounded_replay_exists and replay_windows(scenario.groups):
        yield Refusal(type="TypeError", message="no sliding windows outside the prefix cache")
    says_sharded = any(g.dcp_sharded is not None for g in scenario.groups if not isinstance(g, Mamba))
    if scenario.engine.dcp > 1 and says_sharded and not rules.dcp_sharded_flag:
        yield Refusal(type="Unsupported", message="specifications do not say whether they are sharded")


def _match_unit(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """A hash block size of its own must divide the cacheable groups' blocks."""
    unit = scenario.engine.prefix_match_unit
    if unit is None or not (scenario.engine.prefix_caching or scenario.connector is not None):
        return
    sizes = _cacheable_sizes(scenario, rules)
    if len(scenario.groups) == 1:
        if rules.lone_group_refuses_prefix_match_unit and unit != sizes[0]:
            yield Refusal(type="ValueError", message="one group is matched in its own blocks")
    elif any(size % unit for size in sizes) and not _has_plain_mamba(scenario):
        yield Refusal(type="ValueError", message="the prefix match unit does not divide every block size")


def _kernel_blocks(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """A worker cannot split blocks that are no dense pages. There is one where there is a connector."""
    if scenario.connector is not None and not rules.unsplit_where_pages_differ and splits_gaps(scenario):
        yield Refusal(type="ValueError", message="the memory layout does not let blocks be split for kernels")


def _context_parallel_windows(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """Windows cannot be sharded; before specs said themselves whether they are, they counted as that."""
    windows = [group for group in scenario.groups if isinstance(group, (SlidingWindow, SlidingWindowMLA))]
    refused = [group for group in windows if not rules.dcp_sharded_flag or is_dcp_sharded(group, rules)]
    if scenario.engine.dcp > 1 and refused:
        yield Refusal(type="AssertionError", message="no sliding window under decode context parallelism")


def _retention(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """A retention interval needs a group that it thins out, and whole scheduler blocks."""
    interval = scenario.engine.retention_interval
    if not interval:
        return
    if not any(isinstance(group, (SlidingWindow, SlidingWindowMLA, Mamba)) for group in scenario.groups):
        yield Refusal(type="ValueError", message="no group makes use of a retention interval")
    elif interval % block_sizes(scenario, rules)[0]:
        yield Refusal(type="ValueError", message="the retention interval is no multiple of the scheduler block size")


def _replayed_windows(scenario: Scenario) -> Iterator[Refusal]:
    """Hits are computed again over one window."""
    if len(replay_windows(scenario.groups)) > 1:
        yield Refusal(type="AssertionError", message="windows outside the prefix cache must be equal")


def _prefix_caching(scenario: Scenario, rules: Rules) -> Iterator[Refusal]:
    """Groups that cannot be looked up, alone or together."""
    if not scenario.engine.prefix_caching:
        return
    if _has_plain_mamba(scenario) and rules.mamba_prefix_caching_requires_align:
        yield Refusal(type="AssertionError", message="prefix caching of states requires mode align")
    if scenario.engine.dcp > 1 and any(_is_sharded_otherwise(group, scenario, rules) for group in scenario.groups):
        yield Refusal(type="AssertionError", message="lookups under context parallelism are for full attention")
    if len(scenario.groups) > 1 and not any(is_prefix_cacheable(group) for group in scenario.groups):
        yield Refusal(type="AssertionError", message="of several groups none can be cached")
    hash_block_size = block_sizes(scenario, rules)[1]
    if len(scenario.groups) > 1 and any(size % hash_block_size for size in _cacheable_sizes(scenario, rules)):
        yield Refusal(type="AssertionError", message="a group's block is no multiple of the hash block size")


def _is_sharded_otherwise(group: AnyGroup, scenario: Scenario, rules: Rules) -> bool:
    """Whether DCP would spread the group over ranks in a way that lookups do not follow."""
    several = len(scenario.groups) > 1
    if isinstance(group, FULL_LIKE) or (several and isinstance(group, Mamba)):
        return False
    return several and is_dcp_sharded(group, rules) if rules.dcp_sharded_flag else True


def _cacheable_sizes(scenario: Scenario, rules: Rules) -> list[int]:
    """Effective block sizes of the groups that take part in the prefix cache; of all of them where none does."""
    sizes = counted_block_sizes(scenario, rules)
    return [size for group, size in zip(scenario.groups, sizes, strict=True) if is_prefix_cacheable(group)] or sizes


def _has_plain_mamba(scenario: Scenario) -> bool:
    return any(isinstance(group, Mamba) and group.mode != "align" for group in scenario.groups)

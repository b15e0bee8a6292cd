"""Block sizes that follow from the groups: effective per group, the scheduler's and the hash block size. In tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sim.releases import Rules
from sim.scenario import MLA, RSWA, AnyGroup, Circular, Cross, Full, Layers, Mamba, Scenario, SlidingWindowMLA

FULL_LIKE = (Full, MLA, RSWA)

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "packed": 1}


def page_bytes(group: AnyGroup, layers: Layers | None = None) -> int:
    """Bytes of one block of one layer: keys and values or one latent vector a token, or one state. layers: those of a size
    of their own."""
    sized = layers or group
    num_elements = sized.heads * sized.head_size
    if not isinstance(group, Mamba):
        num_elements *= group.block * (1 if isinstance(group, (MLA, SlidingWindowMLA)) else 2)
    return num_elements * _ELEMENT_BYTES[group.dtype]


def splits_gaps(scenario: Scenario) -> bool:
    """Whether kernels would have to split blocks between which memory leaves a gap: where pages of several sizes lie side
    by side, only the page that fills a whole block of memory leaves none."""
    if pages_are_dense(scenario.groups):
        return False
    pages = [
        [page_bytes(group)] * group.layers + [page_bytes(group, part) for part in group.uniform for _ in range(part.layers)]
        for group in scenario.groups
    ]
    block_bytes = max(map(sum, pages))
    return any(
        group.kernel_block not in (None, group.block) and not isinstance(group, Mamba) and set(sizes) != {block_bytes}
        for group, sizes in zip(scenario.groups, pages, strict=True)
    )


def pages_are_dense(groups: Sequence[AnyGroup]) -> bool:
    """Whether a block of a layer follows the one before without a gap: where all attention pages are of one size, to
    which smaller states are padded. Pages of several sizes lie side by side."""
    attention = [group for group in groups if not isinstance(group, Mamba)]
    pages = {page_bytes(group, layers) for group in attention for layers in (None, *group.uniform)}
    states = [page_bytes(group) for group in groups if isinstance(group, Mamba)]
    return not pages or (len(pages) == 1 and max(states, default=0) <= min(pages))


def is_dcp_sharded(group: AnyGroup, rules: Rules) -> bool:
    """Whether decode context parallelism spreads the group's tokens over the ranks."""
    if rules.dcp_sharded_flag and group.dcp_sharded is not None:
        return group.dcp_sharded
    return isinstance(group, FULL_LIKE)


def effective_block_size(group: AnyGroup, dcp: int, rules: Rules) -> int:
    """Tokens that one manager block of the group covers: its block size, times DCP where it is sharded."""
    return group.block * dcp if is_dcp_sharded(group, rules) else group.block


def counted_block_sizes(scenario: Scenario, rules: Rules) -> list[int]:
    """Block sizes of all groups as the scheduler counts them. Before specs said themselves whether they are sharded, it
    counted DCP for all but a state beside other groups, whatever their tables did."""
    dcp = scenario.engine.dcp
    if rules.dcp_sharded_flag:
        return [effective_block_size(group, dcp, rules) for group in scenario.groups]
    alone = len(scenario.groups) == 1
    return [group.block if isinstance(group, Mamba) and not alone else group.block * dcp for group in scenario.groups]


def is_prefix_cacheable(group: AnyGroup) -> bool:
    """Whether the group takes part in the prefix cache at all."""
    if isinstance(group, SlidingWindowMLA):
        return not group.bounded_replay
    return not isinstance(group, (Circular, Cross))


def replay_windows(groups: Sequence[AnyGroup]) -> set[int]:
    """Window sizes, in tokens, of the groups that are computed again instead of cached."""
    return {group.window for group in groups if isinstance(group, SlidingWindowMLA) and group.bounded_replay}


def replay_window(groups: Sequence[AnyGroup]) -> int:
    """How many of the last tokens of a hit are computed again for groups that are not cached; 0 without such groups."""
    return max(replay_windows(groups), default=0)


def block_sizes(scenario: Scenario, rules: Rules) -> tuple[int, int]:
    """(scheduler block size, hash block size). The scheduler block size is the least common multiple over all groups;
    hashes are taken at the greatest common divisor over the cacheable ones, or at `prefix_match_unit`."""
    sizes = counted_block_sizes(scenario, rules)
    if len(sizes) == 1:
        return sizes[0], sizes[0]
    scheduler_size = math.lcm(*sizes)
    if not (scenario.engine.prefix_caching or scenario.connector is not None):
        return scheduler_size, scheduler_size
    if any(isinstance(group, Mamba) and group.mode != "align" for group in scenario.groups):
        return scheduler_size, scheduler_size
    if scenario.engine.prefix_match_unit is not None:
        return scheduler_size, scenario.engine.prefix_match_unit
    hashed = [size for group, size in zip(scenario.groups, sizes, strict=True) if is_prefix_cacheable(group)] or sizes
    return scheduler_size, math.gcd(*hashed)


def has_partial_hits(scenario: Scenario, rules: Rules) -> bool:
    """Whether hits may end inside a block: some Mamba group of mode `align` is coarser than the hashes, and every group
    that is not at the hash block size can look inside its blocks."""
    groups, dcp = scenario.groups, scenario.engine.dcp
    if not scenario.engine.prefix_caching or len(groups) < 2:
        return False
    hash_size = block_sizes(scenario, rules)[1]
    some_coarse_state = any(
        isinstance(group, Mamba)
        and group.mode == "align"
        and (group.block > hash_size or (dcp > 1 and group.block == hash_size))
        for group in groups
    )
    return some_coarse_state and all(
        effective_block_size(group, dcp, rules) == hash_size or isinstance(group, (*FULL_LIKE, Mamba))
        for group in groups
        if is_prefix_cacheable(group)
    )

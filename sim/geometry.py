"""Block sizes that follow from the groups: effective per group, the scheduler's and the hash block size. In tokens."""

from __future__ import annotations

import math

from sim.releases import Rules
from sim.scenario import MLA, AnyGroup, Circular, Full, Mamba, Scenario

FULL_LIKE = (Full, MLA)


def is_dcp_sharded(group: AnyGroup, rules: Rules) -> bool:
    """Whether decode context parallelism spreads the group's tokens over the ranks."""
    if rules.dcp_sharded_flag and group.dcp_sharded is not None:
        return group.dcp_sharded
    return isinstance(group, FULL_LIKE)


def effective_block_size(group: AnyGroup, dcp: int, rules: Rules) -> int:
    """Tokens that one manager block of the group covers: its block size, times DCP where it is sharded."""
    return group.block * dcp if is_dcp_sharded(group, rules) else group.block


def is_prefix_cacheable(group: AnyGroup) -> bool:
    """Whether the group takes part in the prefix cache at all."""
    return not isinstance(group, Circular)


def block_sizes(scenario: Scenario, rules: Rules) -> tuple[int, int]:
    """(scheduler block size, hash block size). The scheduler block size is the least common multiple over all groups;
    hashes are taken at the greatest common divisor over the cacheable ones, or at `prefix_match_unit`."""
    sizes = [effective_block_size(group, scenario.engine.dcp, rules) for group in scenario.groups]
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

"""vLLM's start-up check: is there room for one request of the maximum length?"""

from __future__ import annotations

import msgspec

from sim.manager import KVCacheManager
from sim.releases import Rules
from sim.scenario import Scenario


def startup_blocks(scenario: Scenario, rules: Rules) -> list[int]:
    """Blocks that the start-up check reserves for one request of the maximum length, per group."""
    engine = msgspec.structs.replace(scenario.engine, blocks=2)
    kv = KVCacheManager(msgspec.structs.replace(scenario, engine=engine), rules)
    return [group.startup_blocks() for group in kv.groups]


def smallest_pool(scenario: Scenario, rules: Rules) -> int:
    """The smallest pool, in blocks and with the null block, that vLLM's start-up check accepts for the scenario's
    groups and limits. Smaller pools are valid scenarios, but nothing is promised for them."""
    return 1 + sum(startup_blocks(scenario, rules))

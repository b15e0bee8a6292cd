"""The KV cache manager: what the scheduler asks of all groups together."""

from __future__ import annotations

from sim.coordinator import Coordinator, Hits
from sim.geometry import block_sizes, effective_block_size
from sim.groups import manager_for
from sim.groups.base import Setting
from sim.pool import BlockPool
from sim.prefix import PrefixIndex
from sim.releases import Rules
from sim.request import Request, Status
from sim.scenario import Mamba, Scenario


class KVCacheManager:
    """Pool, prefix index and groups of one engine."""

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        engine = scenario.engine
        self.scheduler_block_size, hash_block_size = block_sizes(scenario, rules)
        self.caching = engine.prefix_caching
        self.hashing = engine.prefix_caching or scenario.connector is not None
        self.max_model_len = engine.max_model_len
        self.num_watermark_blocks = int(engine.watermark * engine.blocks)  # rounded down
        self.pool = BlockPool(engine.blocks, engine.prefix_caching)
        self.prefixes = PrefixIndex(hash_block_size)
        setting = Setting(
            pool=self.pool,
            rules=rules,
            num_groups=len(scenario.groups),
            hash_block_size=hash_block_size,
            hit_alignment=self.scheduler_block_size,
            retention_interval=engine.retention_interval,
            max_model_len=engine.max_model_len,
            max_in_flight_tokens=engine.max_num_batched_tokens * (2 if engine.async_scheduling else 1),
            zeroes_new_blocks=needs_zeroing(scenario),
        )
        self.groups = [
            manager_for(group, index, effective_block_size(group, engine.dcp, rules), setting)
            for index, group in enumerate(scenario.groups)
        ]
        self.coordinator = Coordinator(self.groups, self.scheduler_block_size)
        self.no_hits = self.coordinator.no_hits()
        self._cached_groups = [g for g in self.groups if g.prefix_cacheable] if self.caching else []

    def extend_prefixes(self, request: Request) -> None:
        """Gives numbers to the request's whole hash blocks that have none yet."""
        if self.hashing:
            self.prefixes.extend(request.prefixes, request.tokens, request.index, request.salt, request.lora)

    def computed_blocks(self, request: Request) -> Hits:
        """Local hits; the last token is always computed anew."""
        if not self.caching:
            return self.no_hits
        hits = self.coordinator.find_hits(request, len(request.tokens) - 1)
        request.shared_prefix_boundary = hits.num_tokens + hits.num_uncached if hits.num_uncached else 0
        return hits

    def allocate_slots(
        self,
        request: Request,
        num_new: int,
        hits: Hits | None = None,
        num_external: int = 0,
        gate: bool = False,
        others_running: bool = False,
    ) -> bool:
        """Makes room for `num_new` tokens after the computed, hit and external ones. False: they do not fit now.

        gate: also ask that the whole request would fit. others_running: the watermark of free blocks is kept.
        """
        hits = hits or self.no_hits
        num_local = request.num_computed + hits.num_tokens
        num_total = min(num_local + num_external, self.max_model_len)
        num_kept_free = self.num_watermark_blocks if others_running and request.status != Status.RUNNING else 0

        if gate:
            whole = min(len(request.tokens), self.max_model_len)
            if self._blocks_needed(request, whole, hits, num_total, num_local, True) + num_kept_free > self.pool.num_free:
                return False

        for group in self.groups:  # also when the rest does not fit
            group.release_skipped(request, num_total)

        num_tokens = min(num_total + num_new, self.max_model_len)
        num_needed = self._blocks_needed(request, num_tokens, hits, num_local + num_external, num_local, False)
        if num_needed + num_kept_free > self.pool.num_free:
            return False

        if not hits.is_empty or num_external > 0:
            self._admit(request, hits, num_local, num_external)
        for group in self.groups:
            group.allocate(request, num_tokens)
        self._cache(request, min(num_total + num_new, len(request.tokens)))
        request.quiet_until = min(group.quiet_until(request, num_tokens, num_total) for group in self.groups)
        return True

    def _blocks_needed(
        self, request: Request, num_tokens: int, hits: Hits, num_total: int, num_local: int, at_gate: bool
    ) -> int:
        return sum(
            group.blocks_needed(request, num_tokens, hits.blocks[group.index], num_total, num_local, at_gate)
            for group in self.groups
        )

    def _admit(self, request: Request, hits: Hits, num_local: int, num_external: int) -> None:
        """All groups hold their hits before any takes a block, so that none evicts another's hit."""
        for group in self.groups:
            group.add_local(request, hits.blocks[group.index], num_local, num_external)
        if num_external > 0:
            for group in self.groups:
                group.add_external(request, num_local, num_external)

    def _cache(self, request: Request, num_tokens: int) -> None:
        if self._cached_groups:
            num_cacheable = self.coordinator.num_cacheable(num_tokens)
            for group in self._cached_groups:
                group.cache(request, num_cacheable)

    def release_skipped(self, request: Request) -> None:
        """Lets go of what the request's computed tokens no longer need."""
        for group in self.groups:
            group.release_skipped(request, request.num_computed)

    def free(self, request: Request) -> None:
        """Frees the request's tables, group by group."""
        for group in self.groups:
            group.free(request)
        request.quiet_until = 0

    def drain_zeroed(self) -> list[int]:
        """Block IDs taken since the last call that the worker has to zero, group by group."""
        zeroed: list[int] = []
        for group in self.groups:
            if group.to_zero:
                zeroed += group.to_zero
                group.to_zero.clear()
        return zeroed


def needs_zeroing(scenario: Scenario) -> bool:
    """Whether the engine zeroes new blocks: a Mamba state is read before it is whole, and pages of several precisions
    may be misread as each other."""
    if any(isinstance(group, Mamba) for group in scenario.groups):
        return True
    return len({group.dtype for group in scenario.groups if not isinstance(group, Mamba)}) > 1

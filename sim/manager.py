"""The KV cache manager: what the scheduler asks of all groups together."""

from __future__ import annotations

from sim.coordinator import Coordinator, Hits
from sim.geometry import block_sizes, effective_block_size, has_partial_hits
from sim.groups import manager_for
from sim.groups.base import Room, Setting, ceil_div
from sim.groups.mamba import MambaManager
from sim.pool import NULL, BlockPool
from sim.prefix import PrefixIndex
from sim.releases import Rules
from sim.request import Request, Status
from sim.scenario import Mamba, Scenario
from sim.speculation import dropping_groups, has_eagle, hash_lookahead


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
        if engine.kv_events:
            self.pool.events = []
        lookahead = hash_lookahead(scenario, rules)
        self.prefixes = PrefixIndex(hash_block_size, lookahead, rules.adapter_and_salt_are_told_apart)
        dropping = dropping_groups(scenario, rules)
        partial_hits = has_partial_hits(scenario, rules)
        self.setting = Setting(
            pool=self.pool,
            rules=rules,
            num_groups=len(scenario.groups),
            scheduler_block_size=self.scheduler_block_size,
            hash_block_size=hash_block_size,
            hit_alignment=hash_block_size if partial_hits else self.scheduler_block_size,
            partial_hits=partial_hits,
            retention_interval=engine.retention_interval,
            max_model_len=engine.max_model_len,
            max_in_flight_tokens=engine.max_num_batched_tokens * (2 if engine.async_scheduling else 1),
            zeroes_new_blocks=needs_zeroing(scenario),
            drops_last_block=bool(dropping),
            drops_for_eagle=has_eagle(engine) and not lookahead,
            hash_lookahead=lookahead,
            max_encoder_tokens=engine.max_num_batched_tokens,
        )
        self.groups = [
            manager_for(group, index, effective_block_size(group, engine.dcp, rules), self.setting)
            for index, group in enumerate(scenario.groups)
        ]
        self.coordinator = Coordinator(self.groups, self.setting, dropping)
        self.no_hits = self.coordinator.no_hits()
        self._not_zeroed: set[int] = set()
        self._cached_groups = [g for g in self.groups if g.prefix_cacheable] if self.caching else []
        self._stepped_groups = [g for g in self.groups if isinstance(g, MambaManager)]

    def new_step(self) -> None:
        """A call of the scheduler begins."""
        for group in self._stepped_groups:
            group.new_step()

    def extend_prefixes(self, request: Request) -> None:
        """Gives numbers to the request's whole hash blocks that have none yet."""
        if self.hashing:
            self.prefixes.extend(request.prefixes, request.tokens, request.index, request.salt, request.lora)

    def computed_blocks(self, request: Request) -> Hits:
        """Local hits; the last token is always computed anew."""
        if not self.caching or request.skips_cache:
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
        num_lookahead: int = 0,
        num_reserved: int = 0,
        gate: bool = False,
        others_running: bool = False,
        loads_later: bool = False,
    ) -> bool:
        """Makes room for `num_new` tokens after the computed, hit and external ones. False: they do not fit now.

        num_lookahead: slots for drafted tokens. num_reserved: free blocks that are spoken for. gate: also ask that the
        whole request would fit. others_running: the watermark of free blocks is kept. loads_later: the external tokens
        arrive after this step, so nothing is cached yet.
        """
        hits = hits or self.no_hits
        num_local = request.num_computed + hits.num_tokens
        num_total = min(num_local + num_external, self.max_model_len)
        num_kept_free = self.num_watermark_blocks if others_running and request.status != Status.RUNNING else 0
        # Only sparse retention limits checkpoints to the end of a prefill.
        checkpoint_end = request.prefill_end if self.setting.retention_interval == 0 else 0

        if gate:
            whole = min(len(request.tokens), self.max_model_len)
            room = Room(whole, whole, num_total, num_local, checkpoint_end, True)
            if self._blocks_needed(request, room, hits) + num_kept_free > self.pool.num_free:
                return False

        for group in self.groups:  # also when the rest does not fit
            group.release_skipped(request, max(0, num_total - request.num_in_flight))

        num_main = num_total + num_new
        num_tokens = min(num_main + num_lookahead, self.max_model_len)
        room = Room(num_tokens, num_main, num_local + num_external, num_local, checkpoint_end, False)
        if self._blocks_needed(request, room, hits) + num_kept_free > self.pool.num_free - num_reserved:
            return False

        if (not hits.is_empty or num_external > 0) and not any(t is not None for t in request.tracked):
            self._admit(request, hits, num_local, num_external, zeroed=not loads_later)
        for group in self.groups:
            group.allocate(request, num_tokens, num_main)
        request.quiet_until = 0
        if not loads_later:
            num_cached = min(num_main, len(request.tokens))
            self.cache(request, num_cached)
            if request.num_in_flight == 0:  # else skipped blocks may be due before the tokens grow
                quiet = min(group.quiet_until(request, num_main, num_total) for group in self.groups)
                request.quiet_until = quiet - num_lookahead
        return True

    def _blocks_needed(self, request: Request, room: Room, hits: Hits) -> int:
        return sum(group.blocks_needed(request, room, hits.blocks[group.index]) for group in self.groups)

    def blocks_to_finish_prefill(self, request: Request, num_more: int) -> int:
        """Blocks that a request in its load or prefill still needs for all its tokens and `num_more`."""
        whole = min(len(request.tokens), self.max_model_len)
        room = Room(whole + num_more, whole, request.num_computed, request.num_computed, request.prefill_end, True)
        return self._blocks_needed(request, room, self.no_hits)

    def blocks_for_tokens(self, num_tokens: int) -> int:
        """Blocks that so many tokens take in all groups but Mamba's."""
        return sum(ceil_div(num_tokens, group.block_size) for group in self.groups if not isinstance(group.group, Mamba))

    def _admit(self, request: Request, hits: Hits, num_local: int, num_external: int, zeroed: bool) -> None:
        """All groups hold their hits before any takes a block, so that none evicts another's hit."""
        for group in self.groups:
            group.add_local(request, hits.blocks[group.index], num_local, num_external)
        if num_external > 0:
            for group in self.groups:
                group.add_external(request, num_local, num_external, zeroed or not group.prefix_cacheable)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Registers what the first `num_tokens` tokens allow."""
        for group in self._cached_groups:
            group.cache(request, self.coordinator.num_cacheable(num_tokens, group))

    def release_skipped(self, request: Request) -> None:
        """Lets go of what the request's computed and processed tokens no longer need."""
        for group in self.groups:
            group.release_skipped(request, max(0, request.num_computed - request.num_in_flight))

    def free(self, request: Request) -> None:
        """Frees the request's tables, group by group."""
        for group in self.groups:
            group.free(request)
        request.quiet_until = 0

    def pop(self, request: Request) -> list[int]:
        """Forgets the request; its blocks, in one list, wait to be released."""
        request.quiet_until = 0
        return [block_id for group in self.groups for block_id in group.pop(request)]

    def drain_zeroed(self) -> list[int]:
        """Block IDs taken since the last call that the worker has to zero, group by group."""
        zeroed: list[int] = []
        for group in self.groups:
            zeroed += group.to_zero
            group.to_zero.clear()
        if self._not_zeroed:
            zeroed = [block_id for block_id in zeroed if block_id not in self._not_zeroed]
            self._not_zeroed.clear()
        return zeroed if self.setting.zeroes_new_blocks else []

    def blocks_of(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """(table index, block) of the blocks of the tokens [start, end), group by group, without nulls."""
        return [
            (block_index, table[block_index])
            for group, table in zip(self.groups, request.tables, strict=True)
            for block_index in range(start // group.block_size, min(ceil_div(end, group.block_size), len(table)))
            if table[block_index] != NULL
        ]

    def skip_zeroing(self, request: Request, start: int, end: int) -> None:
        """Blocks of the tokens [start, end) are not zeroed in this step: a load writes to them meanwhile."""
        for group in self.groups:
            if group.zeroes_new_blocks:
                first, last = start // group.block_size, ceil_div(end, group.block_size)  # floor: the block of `start`
                self._not_zeroed.update(request.tables[group.index][first:last])

    def drain_copies(self) -> list[tuple[int, int]]:
        """(source, target) blocks that the worker has to copy in this step, group by group."""
        copies: list[tuple[int, int]] = []
        for group in self.groups:
            copies += group.copies
            group.copies.clear()
        return copies


def needs_zeroing(scenario: Scenario) -> bool:
    """Whether the engine zeroes new blocks: a Mamba state is read before it is whole, and pages of several precisions
    may be misread as each other."""
    if any(isinstance(group, Mamba) for group in scenario.groups):
        return True
    precisions = {"fp8" if group.dtype.startswith("fp8") else group.dtype for group in scenario.groups}
    return len(precisions) > 1

"""Where a prefill step has to end so that a Mamba state can be cached there."""

from __future__ import annotations

from sim.groups.base import floor_to
from sim.groups.mamba import MambaAlignManager
from sim.manager import KVCacheManager
from sim.request import Request
from sim.scenario import Engine


class MambaSplit:
    """The cut of prefill steps for Mamba groups of mode `align`.

    The state is written at the end of a step, so steps end at block boundaries; at the last boundary that can be hit; at
    the last hash block of the prompt; and where a shared prefix is known to end.
    """

    def __init__(self, kv: KVCacheManager, engine: Engine) -> None:
        self.groups = [group for group in kv.groups if isinstance(group, MambaAlignManager)]
        self.block_size = min((g.block_size for g in kv.groups if g.prefix_cacheable), default=0)
        self.setting = kv.setting
        self.rules = kv.setting.rules
        # Where nothing is finer than the blocks, no step ends inside one, though hits may be looked for there.
        self.partial_hits = kv.coordinator.partial_hits and kv.setting.hash_block_size < kv.scheduler_block_size
        self.all_have_checkpoints = all(group.has_checkpoints for group in self.groups)
        self.most_per_step = engine.max_num_batched_tokens
        if engine.long_prefill_token_threshold > 0:
            self.most_per_step = min(self.most_per_step, engine.long_prefill_token_threshold)

    def cut(self, request: Request, start: int, num_new: int) -> int:
        """How many of `num_new` tokens from token `start` on this step may compute."""
        prefill_end = request.prefill_end
        if start >= prefill_end:
            return num_new
        size = self.block_size
        end = start + num_new
        internal = self._writes_checkpoint(start, end, prefill_end)
        last_cacheable = 0 if internal else self._last_cacheable(len(request.tokens))
        if end < prefill_end and not (internal and self.rules.split_by_count_of_checkpoints):
            whole = floor_to(end, size)
            if whole > start or size <= self.most_per_step:
                end = whole
        stops = [last_cacheable]
        if start % size and not internal:
            stops.append(floor_to(start, size) + size)
        if self.partial_hits and (not internal or self.rules.split_by_count_of_checkpoints):
            tail = self.groups[0].prompt_tail(request, self.setting.drops_for_eagle)
            if last_cacheable < tail < request.num_prompt:
                stops.append(tail)
        shared = request.shared_prefix_boundary
        if start < shared < end:
            stops.append(start + floor_to(shared - start, size))
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def _last_cacheable(self, num_tokens: int) -> int:
        if self.rules.tail_at_checkpoint_position:
            return self.groups[0].checkpoint_position(num_tokens, self.block_size)
        shift = self.block_size if self.setting.drops_for_eagle else 0
        return max(0, floor_to(num_tokens, self.block_size) - shift)

    def _writes_checkpoint(self, start: int, end: int, prefill_end: int) -> bool:
        if not self.all_have_checkpoints:
            return False
        if self.rules.split_by_count_of_checkpoints:
            return start % self.block_size == 0 and not self.setting.drops_for_eagle
        by_hash = self.partial_hits or not self.rules.checkpoints_at_hit_alignment
        unit = self.setting.hash_block_size if by_hash else self.setting.scheduler_block_size
        group = self.groups[0]
        position = group.checkpoint_position(prefill_end, unit)
        return end >= prefill_end and group.is_checkpoint_valid(start, end, position)

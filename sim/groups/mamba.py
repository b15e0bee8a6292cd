"""Mamba: a block holds a state. Without prefix caching a request has one state and its speculative ones; in mode
`align` states at block ends, and at the prompt's end inside a block, are kept and hit."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import GroupManager, Room, Setting, ceil_div, floor_to
from sim.pool import NULL, PredictedError
from sim.request import MambaState, Request
from sim.scenario import Mamba


class UnhashedStateError(PredictedError):
    """A state is to be cached after tokens that have no key, such as drafts."""


class CheckpointBehindTableError(PredictedError):
    """A checkpoint is to be cached at a place that the table does not have."""


class TailMovedError(PredictedError):
    """A request's cached last state is to be left behind, but its block is not in the table any more."""


class MambaManager(GroupManager):
    """Modes `none` and `all`. Only the state after the last token matters, so all tokens before it are skipped."""

    zeroable = False

    def __init__(self, group: Mamba, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.keeps_all_states = group.mode == "all"
        self.num_speculative_blocks = group.speculative_blocks
        self.fresh_keys: set[int] = set()

    def new_step(self) -> None:
        """A call of the scheduler begins."""
        self.fresh_keys.clear()

    def blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        """See GroupManager. A state that this very step writes cannot be read in it: the request does not fit yet."""
        if hits and self.pool.primary_key(hits[-1]) in self.fresh_keys:
            return self.pool.num_blocks + 1
        return self._blocks_needed(request, room, hits)

    def _blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        return super().blocks_needed(request, room, hits)

    def cache(self, request: Request, num_tokens: int) -> None:
        """See GroupManager."""
        num_done = request.tracked[self.index] or 0
        super().cache(request, num_tokens)
        num_full = request.tracked[self.index] or 0
        self._cache_inside_block(request, num_tokens)
        table = request.tables[self.index]
        for block_index in range(num_done, num_full):
            key = self.pool.primary_key(table[block_index])
            if table[block_index] != NULL and key is not None:
                self.fresh_keys.add(key)

    def _cache_inside_block(self, request: Request, num_tokens: int) -> None:
        """Registers a state that is not at the end of a block."""

    def num_skipped_tokens(self, num_computed: int) -> int:
        return num_computed - 1

    def num_slots(self, room_tokens: int) -> int:
        return room_tokens + self.num_speculative_blocks * self.block_size

    def startup_blocks(self) -> int:
        if self.keeps_all_states:
            return super().startup_blocks() + self.num_speculative_blocks
        return 1 + self.num_speculative_blocks

    def next_skip(self, num_tokens: int) -> int:
        num_skipped_blocks = (num_tokens - 1) // self.block_size  # floor: the block of the last state stays
        return (num_skipped_blocks + 1) * self.block_size

    def lookup(
        self, request: Request, max_tokens: int, members: Sequence[GroupManager], drop_last: bool
    ) -> tuple[list[list[int]], int]:
        """The longest prefix whose state is cached; the states before it are not needed."""
        alignment = self.setting.hit_alignment
        if alignment < self.block_size and self.block_size % alignment == 0:
            step, longest = alignment, floor_to(min(max_tokens, self.num_hashed(request)), alignment)
        else:
            step, longest = self.block_size, floor_to(max_tokens, self.block_size)
        for num_tokens in range(longest, 0, -step):
            if step == self.block_size and num_tokens % alignment:
                continue
            block_ids = self.pool.lookup_all([member.key(request, num_tokens) for member in members])
            if block_ids is not None:
                num_before = ceil_div(num_tokens, self.block_size) - 1
                return [[NULL] * num_before + [block_id] for block_id in block_ids], num_tokens
        return [[] for _ in members], 0

    def cache_mask(self, request: Request, start_block: int, end_block: int) -> Sequence[bool] | None:
        interval = self.setting.retention_interval
        if interval is None:
            return None
        keep = self._interval_mask(start_block, end_block)
        if keep is None:
            return None
        for boundary in self.resume_boundaries(request):
            block_index = floor_to(boundary, self.setting.hit_alignment) // self.block_size - 1  # last whole block
            if start_block <= block_index < end_block:
                keep[block_index - start_block] = True
        return keep

    def _interval_mask(self, start_block: int, end_block: int) -> list[bool] | None:
        """One state per retention interval; None: all of them."""
        interval = self.setting.retention_interval
        if interval is None:
            return None
        per_segment = interval // self.block_size  # exact: intervals are multiples of the scheduler block size
        if interval and per_segment <= 1:
            return None
        return [bool(interval) and (i + 1) % per_segment == 0 for i in range(start_block, end_block)]


class MambaAlignManager(MambaManager):
    """Mode `align`: steps end at block boundaries, so that the state there can be cached.

    The table is as long as the tokens need, but only the last state, the speculative ones behind it and what is about to
    be released are real. The prompt's last state may lie inside a block: it is cached there, and the request goes on in
    another block that starts as a copy. A *checkpoint* is such a state written by the kernel inside a prefill step.
    """

    asks_key_lengths = True
    finds_partial_hits = True

    def __init__(self, group: Mamba, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.has_checkpoints = group.checkpoint_blocks > 0
        self.num_checkpoint_blocks = group.checkpoint_blocks
        self.checkpoint_alignment = group.checkpoint_alignment

    def startup_blocks(self) -> int:
        return 2 + self.num_speculative_blocks + self.num_checkpoint_blocks

    def _state(self, request: Request) -> MambaState:
        state = request.mamba.get(self.index)
        if state is None:
            state = request.mamba[self.index] = MambaState()
        return state

    # -- room ----------------------------------------------------------------------------------------------------------

    def _blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        rules, state = self.setting.rules, self._state(request)
        num_speculative = self.num_speculative_blocks
        num_new = ceil_div(room.num_main, self.block_size) + num_speculative - len(hits)
        num_new -= len(request.tables[self.index])
        copies_tail = self.ends_inside_block(hits, room.num_local) or self.index in request.shared_tail
        if copies_tail:
            num_new = max(num_new, 0) + 1
        checkpoint = self._checkpoint_in_step(request, room)
        if not room.at_gate:
            state.checkpoint = checkpoint
        if num_new > 0:
            first = not state.allocated
            has_checkpoint = checkpoint is not None
            num_most = 1 + copies_tail + has_checkpoint
            if first or (has_checkpoint and rules.checkpoint_cap_includes_speculative):
                num_most += num_speculative
            if rules.mamba_estimate_is_capped:
                num_new = min(num_new, num_most)
            elif not (has_checkpoint and not first and rules.checkpoint_estimate_is_exact):
                num_new = 1 + copies_tail + has_checkpoint + (num_speculative if first else 0)
        return num_new + self.pool.num_evictable(hits)

    def _checkpoint_in_step(self, request: Request, room: Room) -> tuple[int, int] | None:
        """(position in tokens, index in the table) of the checkpoint that a step up to `num_main` tokens writes."""
        rules, end, start = self.setting.rules, room.num_main, room.num_total
        block_index = ceil_div(end, self.block_size) - 2
        if not self.has_checkpoints or block_index < 0 or not self._is_writable(request, block_index):
            return None
        if not rules.checkpoints_at_positions:
            aligned = end % self.block_size != 0 and start % self.block_size == 0
            return (0, block_index) if aligned and not self._is_held(request, block_index) else None
        if rules.checkpoint_only_at_prefill_end and end < room.prefill_end:
            return None
        unit = self.setting.hit_alignment if rules.checkpoints_at_hit_alignment else self.setting.hash_block_size
        position = self.checkpoint_position(end, unit)
        if self.is_checkpoint_valid(start, end, position):
            return position, block_index
        return None

    def _is_held(self, request: Request, block_index: int) -> bool:
        table = request.tables[self.index]
        return block_index < len(table) and table[block_index] != NULL

    def _is_writable(self, request: Request, block_index: int) -> bool:
        table = request.tables[self.index]
        if block_index >= len(table) or table[block_index] == NULL:
            return True
        return self._state(request).allocated and block_index >= len(table) - self.num_speculative_blocks

    def checkpoint_position(self, num_tokens: int, unit: int) -> int:
        """The last multiple of `unit` at which a prefill of `num_tokens` tokens leaves a state to resume from."""
        drop = self.setting.drops_for_eagle
        if drop and self.setting.rules.checkpoint_drop_counts_last_token:
            last = num_tokens
        else:
            last = num_tokens - max(1, self.setting.hash_lookahead)
        return max(0, floor_to(last, unit) - (unit if drop else 0))

    def is_checkpoint_valid(self, start: int, end: int, position: int) -> bool:
        """Whether a step over tokens [start, end) can write a state at `position` besides its last one."""
        alignment = self.checkpoint_alignment
        hash_size = self.setting.hash_block_size
        return (
            alignment is not None
            and start % hash_size == 0
            and ceil_div(end, self.block_size) - 2 > (start - 1) // self.block_size  # floor: block of the first state
            and start + hash_size <= position
            and start < position < end
            and (position - start) % alignment == 0
        )

    # -- allocation ----------------------------------------------------------------------------------------------------

    def allocate(self, request: Request, num_tokens: int, num_main: int) -> None:
        rules, state, table = self.setting.rules, self._state(request), request.tables[self.index]
        num_speculative = self.num_speculative_blocks
        num_required = ceil_div(num_main, self.block_size) + num_speculative
        tail = request.shared_tail.get(self.index)
        has_checkpoint = state.checkpoint is not None
        num_before = len(table)
        if num_required <= num_before and tail is None and not (has_checkpoint and rules.checkpoints_at_positions):
            state.allocated = True
            return
        if state.allocated:
            state.last = num_before - 1 - num_speculative
        elif num_before > 0:
            state.last = num_before - 1
        num_null = num_required - num_speculative - 1
        if num_before < num_null:
            table.extend([NULL] * (num_null - has_checkpoint - num_before))
        if state.allocated and not (has_checkpoint and rules.checkpoint_step_keeps_speculative):
            end = num_null - (has_checkpoint if rules.relocation_spares_checkpoint else 0)
            for block_index in range(num_before - num_speculative, min(num_before, end)):
                table.append(table[block_index])  # the same block moves behind the new state
                table[block_index] = NULL
        taken = self.pool.take(max(num_required - len(table), 0) + (tail is not None))
        if tail is not None:
            self._leave_tail(request, state, *tail, taken.pop(0))
        table.extend(taken)
        state.allocated = True
        request.shared_tail.pop(self.index, None)

    def _leave_tail(self, request: Request, state: MambaState, block_index: int, source: int, copy: int) -> None:
        """The state inside the tail block stays cached in one block, and the request goes on in the other."""
        if not state.allocated:
            self._copy_on_write(request, block_index, source, copy)
            return
        if request.tables[self.index][block_index] != source:
            raise TailMovedError(f"block {source} is no longer at position {block_index}")
        self.pool.move_keys(source, copy)  # the producer keeps its own block
        self.copies.append((source, copy))
        self.pool.hold(source)
        key = self.pool.primary_key(copy)
        if key is not None:
            self.fresh_keys.add(key)

    # -- caching -------------------------------------------------------------------------------------------------------

    def _cache_inside_block(self, request: Request, num_tokens: int) -> None:
        state = self._state(request)
        if state.checkpoint is not None and self.setting.rules.checkpoints_at_positions:
            self._cache_checkpoint(request, num_tokens, *state.checkpoint)
        else:
            self._cache_prompt_tail(request, num_tokens)

    def _cache_checkpoint(self, request: Request, num_tokens: int, position: int, block_index: int) -> None:
        table = request.tables[self.index]
        if block_index >= len(table):  # of a step that did not fit
            raise CheckpointBehindTableError(f"position {block_index}, of {len(table)}")
        block_id = table[block_index]
        if not self._keeps_checkpoint(request, num_tokens, position):
            self.pool.drop_keys(block_id)
        elif block_id != NULL and self.pool.key_length(block_id) != position:
            self.pool.drop_keys(block_id)
            key = self._key_of_state(request, position)
            self.pool.link(key, block_id, position)
            self.fresh_keys.add(key)

    def _key_of_state(self, request: Request, num_tokens: int) -> int:
        if num_tokens > self.num_hashed(request):
            raise UnhashedStateError(f"a state after {num_tokens} tokens, {self.num_hashed(request)} hashed")
        return self.key(request, num_tokens)

    def _keeps_checkpoint(self, request: Request, num_tokens: int, position: int) -> bool:
        rules = self.setting.rules
        if position == request.shared_prefix_boundary:
            return True
        if rules.keeps_prompt_and_interval_checkpoints:
            if position == self.checkpoint_position(request.num_prompt, self.setting.hit_alignment):
                return True
            if position % self.block_size:
                return False
            block_index = position // self.block_size - 1
            mask = self._interval_mask(block_index, block_index + 1)
            return mask is None or mask[0]
        if self.setting.retention_interval != 0 or num_tokens >= request.num_prompt:
            return True
        own = self.checkpoint_position(request.num_prompt, self.setting.hash_block_size)
        return rules.keeps_prompt_checkpoint and position == own

    def _cache_prompt_tail(self, request: Request, num_tokens: int) -> None:
        """Where the prompt's last cacheable state lies inside a block (or, later, at its end)."""
        rules, hash_size = self.setting.rules, self.setting.hash_block_size
        if num_tokens <= 0 or num_tokens % hash_size:
            return
        drops = self.setting.drops_for_eagle if rules.tail_drops_with_any_group else self.drops_last_block
        if num_tokens != self.prompt_tail(request, drops):
            return
        if num_tokens % self.block_size == 0 and not rules.tail_may_end_a_block:
            return
        table = request.tables[self.index]
        block_index = ceil_div(num_tokens, self.block_size) - 1
        if block_index >= len(table) or table[block_index] == NULL:
            return
        block_id = table[block_index]
        if rules.tail_is_not_registered_twice and self.pool.key_length(block_id) == num_tokens:
            return
        key = self._key_of_state(request, num_tokens)
        self.pool.link_partial(key, block_id, num_tokens)
        self.fresh_keys.add(key)
        if num_tokens % self.block_size:
            request.shared_tail[self.index] = block_index, block_id
            request.tracked[self.index] = block_index

    def prompt_tail(self, request: Request, drops: bool) -> int:
        """The token count after which the prompt's last state is cached; drops: hits lose their last block."""
        hash_size = self.setting.hash_block_size
        rules = self.setting.rules
        if rules.tail_at_checkpoint_position:
            return self.checkpoint_position(request.num_prompt, hash_size)
        shift = hash_size if drops and rules.tail_drops_last_block else 0
        return max(0, floor_to(request.num_prompt, hash_size) - shift)

    # -- release -------------------------------------------------------------------------------------------------------

    def release_skipped(self, request: Request, num_computed: int) -> None:
        state, table = self._state(request), request.tables[self.index]
        num_skipped = self.num_skipped_tokens(num_computed) // self.block_size  # floor
        if self.setting.rules.mamba_release_passes_nulls:
            start_block = max(0, state.num_retired)
            end_block = min(num_skipped, len(table))
            if num_skipped > 0 and start_block < end_block:
                self._release_back(request, start_block, end_block, past_nulls=True)
                state.num_retired = end_block
        else:
            super().release_skipped(request, num_computed)
        last = state.last
        if last is not None and last < ceil_div(num_computed, self.block_size) - 1 and table[last] != NULL:
            self.pool.release([table[last]])
            table[last] = NULL

    def pop(self, request: Request) -> list[int]:
        request.mamba.pop(self.index, None)
        return super().pop(request)

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        if self.index in request.shared_tail or self._state(request).checkpoint is not None:
            return 0
        has_slots_for = (len(request.tables[self.index]) - self.num_speculative_blocks) * self.block_size
        return min(has_slots_for, super().quiet_until(request, num_tokens, num_released))

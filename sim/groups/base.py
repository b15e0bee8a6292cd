"""What every KV cache group does with a request's block table; kinds override what differs.

The functions mirror the steps of an admission: count what is needed, add local hits, take blocks for external tokens,
take blocks for new tokens, register full blocks, let go of skipped ones, free everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import NamedTuple

from sim.pool import NULL, BlockPool
from sim.releases import Rules
from sim.request import Request
from sim.scenario import AnyGroup


@dataclass(frozen=True)
class Setting:
    """What the groups of one engine share. Sizes and limits in tokens.

    hit_alignment: hits end at multiples of it. partial_hits: hits may end inside a block.
    drops_last_block: the last block of hits is dropped somewhere, so requests resume one block earlier. drops_for_eagle:
    it is because of EAGLE, not only because a group is marked as a speculator's.
    hash_lookahead: tokens after a hash block that its key covers too. max_encoder_tokens: a request's share in the start-up
    check.
    """

    pool: BlockPool
    rules: Rules
    num_groups: int
    scheduler_block_size: int
    hash_block_size: int
    hit_alignment: int
    partial_hits: bool
    retention_interval: int | None
    max_model_len: int
    max_in_flight_tokens: int
    zeroes_new_blocks: bool
    drops_last_block: bool = False
    drops_for_eagle: bool = False
    hash_lookahead: int = 0
    max_encoder_tokens: int = 0


class Room(NamedTuple):
    """A question for room. num_tokens: tokens that need slots, drafted ones included; num_main: without them.

    num_total: local and external computed tokens; num_local: the local ones; prefill_end: tokens at which the request's
    prefill ends. at_gate: the admission gate asks, which honours the cap of groups that recycle their blocks.
    """

    num_tokens: int
    num_main: int
    num_total: int
    num_local: int
    prefill_end: int
    at_gate: bool


def ceil_div(tokens: int, size: int) -> int:
    """tokens / size, rounded up."""
    return -(-tokens // size)


def floor_to(tokens: int, size: int) -> int:
    """The largest multiple of size that is not above tokens."""
    return tokens // size * size


NEVER = 1 << 60


class GroupManager:
    """One KV cache group. Without overrides: full attention's rules, nothing skipped, every full block cached."""

    prefix_cacheable = True
    full_like = False
    finds_partial_hits = False  # hits may end inside a block
    asks_key_lengths = False  # of keys that end with a block, too
    zeroable = True  # attention pages are zeroed before use where the configuration asks for it
    admission_cap: int | None = None

    def __init__(self, group: AnyGroup, index: int, block_size: int, setting: Setting) -> None:
        self.group = group
        self.index = index
        self.block_size = block_size
        self.setting = setting
        self.pool = setting.pool
        self.drops_last_block = False  # EAGLE drops the last block of this group's hits
        self.to_zero: list[int] = []
        self.zeroes_new_blocks = setting.zeroes_new_blocks and self.zeroable
        self.copies: list[tuple[int, int]] = []
        # Registering happens in steps of this many tokens.
        self.cache_step = min(block_size, setting.hash_block_size)

    # -- what kinds override -------------------------------------------------------------------------------------------

    def num_skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that are not needed any more once `num_computed` are computed."""
        return 0

    def num_slots(self, room_tokens: int) -> int:
        """Token slots the table must offer for so many tokens."""
        return room_tokens

    def startup_blocks(self) -> int:
        """Blocks that vLLM's start-up check reserves for one request of the maximum length."""
        if self.admission_cap is not None:
            return self.admission_cap
        return ceil_div(self.setting.max_model_len, self.block_size)

    def lookup(
        self, request: Request, max_tokens: int, members: Sequence[GroupManager], drop_last: bool
    ) -> tuple[list[list[int]], int]:
        """The longest cached prefix of at most `max_tokens` tokens for which all `members` have blocks: their block
        lists (null where not needed) and its length in tokens. drop_last: less one block, for EAGLE."""
        raise AssertionError(f"{self.group.kind} groups take no part in lookups")

    def cache_mask(self, request: Request, start_block: int, end_block: int) -> Sequence[bool] | None:
        """Which of the blocks [start_block, end_block) are worth registering; None: all."""
        return None

    def next_skip(self, num_tokens: int) -> int:
        """The largest count of computed tokens that skips no more blocks than `num_tokens` do."""
        return NEVER

    # -- steps of an admission -----------------------------------------------------------------------------------------

    def key(self, request: Request, num_tokens: int) -> int:
        """The pool key of the request's first `num_tokens` tokens in this group (a multiple of the hash block size)."""
        prefix = request.prefixes[num_tokens // self.setting.hash_block_size - 1]
        return prefix * self.setting.num_groups + self.index

    def block_keys(self, request: Request, start_block: int, end_block: int) -> list[int]:
        """The pool keys of the prefixes that end with the blocks [start_block, end_block)."""
        stride = self.block_size // self.setting.hash_block_size  # divides evenly
        prefixes = request.prefixes[(start_block + 1) * stride - 1 : end_block * stride : stride]
        num_groups, index = self.setting.num_groups, self.index
        return prefixes if num_groups == 1 else [prefix * num_groups + index for prefix in prefixes]

    def num_hashed(self, request: Request) -> int:
        """Leading tokens of the request that have keys."""
        return len(request.prefixes) * self.setting.hash_block_size

    def blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        """Blocks that must be free to give room; hits that sit in the free queue count too."""
        num_required = ceil_div(self.num_slots(room.num_tokens), self.block_size)
        if room.at_gate and self.admission_cap is not None:
            num_required = min(num_required, self.admission_cap)
        num_held = len(request.tables[self.index])
        if request.tracked[self.index] is not None:
            assert not hits
            return max(num_required - num_held, 0)
        num_skipped = self.num_skipped_tokens(room.num_total) // self.block_size
        num_new = max(num_required - max(num_skipped, len(hits) + num_held), 0)
        num_evictable = self.pool.num_evictable(hits[max(0, num_skipped - num_held) :])
        return num_new + num_evictable + self.ends_inside_block(hits, room.num_local)

    def ends_inside_block(self, hits: Sequence[int], num_local: int) -> bool:
        """Whether the hit ends inside a block, which then has to be copied before it is written."""
        return bool(hits) and num_local % self.block_size != 0

    def add_local(self, request: Request, hits: Sequence[int], num_local: int, num_external: int) -> None:
        """First admission: the hit blocks enter the table, those already skipped as null."""
        num_skipped = self.num_skipped_tokens(num_local + num_external) // self.block_size
        kept = hits[num_skipped:]
        self.pool.touch(kept)
        table = request.tables[self.index]
        assert not table
        table.extend([NULL] * num_skipped)
        table.extend(kept)
        request.tracked[self.index] = len(table)
        if self.ends_inside_block(kept, num_local):
            block_index = num_local // self.block_size  # the block the hit ends in
            request.shared_tail[self.index] = block_index, kept[-1]
            request.tracked[self.index] = block_index

    def add_external(self, request: Request, num_local: int, num_external: int, zeroed: bool) -> None:
        """Takes blocks for the external tokens that are not skipped. zeroed: as other new blocks are."""
        num_total = num_local + num_external
        num_wanted = min(num_external, num_total - self.num_skipped_tokens(num_total))
        if num_wanted > 0:
            self._grow(request, ceil_div(num_total, self.block_size), zeroed)

    def allocate(self, request: Request, num_tokens: int, num_main: int) -> None:
        """Takes blocks until `num_tokens` tokens have slots. A shared tail block is first replaced by a copy."""
        tail = request.shared_tail.pop(self.index, None)
        if tail is not None:
            block_index, source = tail
            copy = self.pool.take(1)[0]
            self._copy_on_write(request, block_index, source, copy)
            self.to_zero.append(copy)
        self._grow(request, ceil_div(self.num_slots(num_tokens), self.block_size), True)

    def _copy_on_write(self, request: Request, block_index: int, source: int, copy: int) -> None:
        """The request goes on with the copy; both ends are held until the worker has copied."""
        table = request.tables[self.index]
        assert table[block_index] == source
        table[block_index] = copy
        self.pool.hold(copy)
        self.copies.append((source, copy))

    def _grow(self, request: Request, num_blocks: int, zeroed: bool) -> None:
        table = request.tables[self.index]
        if num_blocks > len(table):
            taken = self.pool.take(num_blocks - len(table))
            table.extend(taken)
            if zeroed and self.zeroes_new_blocks:
                self.to_zero.extend(taken)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Registers the full blocks among the first `num_tokens` tokens. Masked and null blocks are passed for good."""
        num_full = min(num_tokens, self.num_hashed(request)) // self.block_size  # whole blocks only
        num_done = request.tracked[self.index] or 0
        if num_done >= num_full:
            return
        table = request.tables[self.index]
        mask = self.cache_mask(request, num_done, num_full)
        block_ids = table[num_done:num_full]
        keys = self.block_keys(request, num_done, num_full)
        if mask is None and NULL not in block_ids and not self.asks_key_lengths:
            self.pool.link_run(keys, block_ids)
        else:
            for i, block_id in enumerate(block_ids):
                if block_id != NULL and (mask is None or mask[i]):
                    num_prefix_tokens = (num_done + i + 1) * self.block_size if self.asks_key_lengths else None
                    self.pool.link_full(keys[i], block_id, num_prefix_tokens)
        request.tracked[self.index] = num_full

    def resume_boundaries(self, request: Request) -> list[int]:
        """Token counts at which another request may resume: with the same prompt, or with the part of it that is shared.
        With EAGLE a request resumes a block before the end, whichever of the last two boundaries it finds."""
        if self.setting.drops_last_block and self.setting.rules.eagle_resumes_at_two_boundaries:
            size = self.setting.scheduler_block_size
            boundaries = [max(floor_to(end, size) - size, 0) for end in (request.num_prompt - 1, request.num_prompt)]
        else:
            boundaries = [request.num_prompt - 1]
        shared = request.shared_prefix_boundary
        if shared:
            boundaries.append(shared)
            if self.drops_last_block and self.setting.rules.eagle_keeps_block_before_shared_prefix_end:
                boundaries.append(shared - self.block_size)
        return boundaries

    def release_skipped(self, request: Request, num_computed: int) -> None:
        """Frees the blocks whose tokens are all skipped, from the last one back to the first null."""
        num_skipped = self.num_skipped_tokens(num_computed) // self.block_size
        if num_skipped > 0:
            self._release_back(request, 0, min(num_skipped, len(request.tables[self.index])))

    def _release_back(self, request: Request, start_block: int, end_block: int, past_nulls: bool = False) -> None:
        """Frees table entries [start_block, end_block) from the last one back, to the first null or past it."""
        table = request.tables[self.index]
        released = []
        for block_index in range(end_block - 1, start_block - 1, -1):
            if table[block_index] != NULL:
                released.append(table[block_index])
                table[block_index] = NULL
            elif not past_nulls:
                break
        self.pool.release(released)

    def pop(self, request: Request) -> list[int]:
        """Forgets the request and returns its table without releasing it."""
        table = request.tables[self.index]
        if self.setting.rules.popped_tables_lose_leading_nulls:
            table = list(dropwhile(lambda block_id: block_id == NULL, table))
        request.tables[self.index] = []
        request.tracked[self.index] = None
        request.shared_tail.pop(self.index, None)
        return table

    def free(self, request: Request) -> None:
        """Gives back the whole table, last block first."""
        self.pool.release(reversed(self.pop(request)))

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        """With `num_tokens` tokens allocated and cached, and what `num_released` computed tokens skip released: the count
        of tokens up to which nothing here can change."""
        has_slots_for = len(request.tables[self.index]) * self.block_size
        next_registration = (num_tokens // self.cache_step + 1) * self.cache_step - 1
        return min(has_slots_for, next_registration, self.next_skip(num_released))

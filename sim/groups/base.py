"""What every KV cache group does with a request's block table; kinds override what differs.

The functions mirror the steps of an admission: count what is needed, add local hits, take blocks for external tokens,
take blocks for new tokens, register full blocks, let go of skipped ones, free everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sim.pool import NULL, BlockPool
from sim.releases import Rules
from sim.request import Request
from sim.scenario import AnyGroup


@dataclass(frozen=True)
class Setting:
    """What the groups of one engine share. Sizes and limits in tokens."""

    pool: BlockPool
    rules: Rules
    num_groups: int
    hash_block_size: int
    hit_alignment: int
    retention_interval: int | None
    max_model_len: int
    max_in_flight_tokens: int
    zeroes_new_blocks: bool


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
    zeroable = True  # attention pages are zeroed before use where the configuration asks for it
    admission_cap: int | None = None

    def __init__(self, group: AnyGroup, index: int, block_size: int, setting: Setting) -> None:
        self.group = group
        self.index = index
        self.block_size = block_size
        self.setting = setting
        self.pool = setting.pool
        self.to_zero: list[int] | None = [] if setting.zeroes_new_blocks and self.zeroable else None
        # Registering happens in steps of this many tokens.
        self.cache_step = block_size if block_size == setting.hash_block_size else setting.hash_block_size

    # -- what kinds override -------------------------------------------------------------------------------------------

    def num_skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that are not needed any more once `num_computed` are computed."""
        return 0

    def num_slots(self, num_tokens: int) -> int:
        """Token slots the table must offer for `num_tokens` tokens."""
        return num_tokens

    def lookup(self, request: Request, max_tokens: int, members: Sequence[GroupManager]) -> tuple[list[list[int]], int]:
        """The longest cached prefix of at most `max_tokens` tokens for which all `members` have blocks: their block
        lists (null where not needed) and its length in tokens."""
        raise AssertionError(f"{self.group.kind} groups take no part in lookups")

    def cache_mask(self, request: Request, start_block: int, end_block: int) -> Sequence[bool] | None:
        """Which of the blocks [start_block, end_block) are worth registering; None: all."""
        return None

    def next_skip(self, num_tokens: int) -> int:
        """The largest count of computed tokens that skips no more blocks than `num_tokens` do."""
        return NEVER

    def startup_blocks(self) -> int:
        """Blocks that vLLM's start-up check reserves for one request of the maximum length."""
        return ceil_div(self.setting.max_model_len, self.block_size)

    # -- steps of an admission -----------------------------------------------------------------------------------------

    def key(self, request: Request, num_tokens: int) -> int:
        """The pool key of the request's first `num_tokens` tokens in this group (a multiple of the hash block size)."""
        prefix = request.prefixes[num_tokens // self.setting.hash_block_size - 1]
        return prefix * self.setting.num_groups + self.index

    def blocks_needed(
        self, request: Request, num_tokens: int, hits: Sequence[int], num_total: int, num_local: int, at_gate: bool
    ) -> int:
        """Blocks that must be free so that `num_tokens` tokens have slots; hits that sit in the free queue count too.

        num_total: local and external computed tokens, num_local: the local ones. at_gate: the admission gate asks, which
        honours the cap of groups that recycle their blocks.
        """
        num_required = ceil_div(self.num_slots(num_tokens), self.block_size)
        if at_gate and self.admission_cap is not None:
            num_required = min(num_required, self.admission_cap)
        num_held = len(request.tables[self.index])
        if request.tracked[self.index] is not None:
            assert not hits
            return max(num_required - num_held, 0)
        num_skipped = self.num_skipped_tokens(num_total) // self.block_size
        num_new = max(num_required - max(num_skipped, len(hits) + num_held), 0)
        num_evictable = self.pool.num_evictable(hits[max(0, num_skipped - num_held) :])
        return num_new + num_evictable

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

    def add_external(self, request: Request, num_local: int, num_external: int) -> None:
        """Takes blocks for the external tokens that are not skipped."""
        num_total = num_local + num_external
        num_wanted = min(num_external, num_total - self.num_skipped_tokens(num_total))
        if num_wanted > 0:
            self._grow(request, ceil_div(num_total, self.block_size))

    def allocate(self, request: Request, num_tokens: int) -> None:
        """Takes blocks until `num_tokens` tokens have slots."""
        self._grow(request, ceil_div(self.num_slots(num_tokens), self.block_size))

    def _grow(self, request: Request, num_blocks: int) -> None:
        table = request.tables[self.index]
        if num_blocks > len(table):
            taken = self.pool.take(num_blocks - len(table))
            table.extend(taken)
            if self.to_zero is not None:
                self.to_zero.extend(taken)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Registers the full blocks among the first `num_tokens` tokens. Masked and null blocks are passed for good."""
        hashed = len(request.prefixes) * self.setting.hash_block_size
        num_full = min(num_tokens, hashed) // self.block_size
        num_done = request.tracked[self.index] or 0
        if num_done >= num_full:
            return
        table = request.tables[self.index]
        mask = self.cache_mask(request, num_done, num_full)
        for block_index in range(num_done, num_full):
            block_id = table[block_index]
            if block_id != NULL and (mask is None or mask[block_index - num_done]):
                self._register_full(self.key(request, (block_index + 1) * self.block_size), block_id)
        request.tracked[self.index] = num_full

    def _register_full(self, key: int, block_id: int) -> None:
        primary = self.pool.primary_key(block_id)
        if primary is not None and primary != key:
            self.pool.drop_keys(block_id)  # it held a shorter prefix so far
        self.pool.insert(key, block_id)

    def release_skipped(self, request: Request, num_computed: int) -> None:
        """Frees the blocks whose tokens are all skipped, from the last one back to the first null."""
        num_skipped = self.num_skipped_tokens(num_computed) // self.block_size
        if num_skipped <= 0:
            return
        table = request.tables[self.index]
        released = []
        for block_index in range(min(num_skipped, len(table)) - 1, -1, -1):
            if table[block_index] == NULL:
                break
            released.append(table[block_index])
            table[block_index] = NULL
        self.pool.release(released)

    def free(self, request: Request) -> None:
        """Gives back the whole table, last block first."""
        self.pool.release(reversed(request.tables[self.index]))
        request.tables[self.index] = []
        request.tracked[self.index] = None

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        """With `num_tokens` tokens allocated and cached, and what `num_released` computed tokens skip released: the count
        of tokens up to which nothing here can change."""
        has_slots_for = len(request.tables[self.index]) * self.block_size
        next_registration = (num_tokens // self.cache_step + 1) * self.cache_step - 1
        return min(has_slots_for, next_registration, self.next_skip(num_released))

"""Full attention and MLA: every block stays until the request ends. Reference sliding window: allocated alike, but
output tokens that the window has left are given back."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import GroupManager, Setting, ceil_div, floor_to
from sim.pool import NULL
from sim.request import Request
from sim.scenario import RSWA


class FullManager(GroupManager):
    """Full attention, and what is allocated like it."""

    full_like = True
    finds_partial_hits = True

    def lookup(
        self, request: Request, max_tokens: int, members: Sequence[GroupManager], drop_last: bool
    ) -> tuple[list[list[int]], int]:
        found: list[list[int]] = [[] for _ in members]
        limit = min(max_tokens, self.num_hashed(request))
        if len(members) == 1:
            found[0] = self.pool.lookup_run(self.block_keys(request, 0, limit // self.block_size))
            hit = len(found[0]) * self.block_size
        else:
            hit = 0
            while hit + self.block_size <= limit and self._append_hit(found, request, hit + self.block_size, members):
                hit += self.block_size
        alignment = self.setting.hit_alignment
        if alignment < self.block_size and self.block_size % alignment == 0:
            hit = self._extend_into_block(found, request, hit, limit, members)
        if drop_last and hit > 0:
            hit -= min(alignment, self.block_size)
        hit = floor_to(hit, alignment)
        num_blocks = ceil_div(hit, self.block_size)
        return [blocks[:num_blocks] for blocks in found], hit

    def _append_hit(
        self, found: list[list[int]], request: Request, num_tokens: int, members: Sequence[GroupManager]
    ) -> bool:
        """Adds the members' blocks for a prefix of `num_tokens` tokens if all have one."""
        block_ids = self.pool.lookup_all([member.key(request, num_tokens) for member in members])
        if block_ids is None:
            return False
        for blocks, block_id in zip(found, block_ids, strict=True):
            blocks.append(block_id)
        return True

    def _extend_into_block(
        self, found: list[list[int]], request: Request, hit: int, limit: int, members: Sequence[GroupManager]
    ) -> int:
        """After the whole blocks, the longest prefix that ends inside the next one."""
        hash_size = self.setting.hash_block_size
        longest = floor_to(min(limit, hit + self.block_size - 1), hash_size)
        for num_tokens in range(longest, hit, -hash_size):
            if self._append_hit(found, request, num_tokens, members):
                return num_tokens
        return hit

    def cache(self, request: Request, num_tokens: int) -> None:
        super().cache(request, num_tokens)
        if self.block_size != self.setting.hash_block_size:
            self._register_prompt_tail(request, num_tokens)

    def _register_prompt_tail(self, request: Request, num_tokens: int) -> None:
        """The block in which the prompt ends is also linked to the prompt's last whole hash block."""
        hash_size = self.setting.hash_block_size
        whole_prompt = self.drops_last_block or not self.setting.rules.prompt_tail_excludes_last_token
        last = request.num_prompt if whole_prompt else request.num_prompt - 1
        tail = min(floor_to(last, hash_size), self.num_hashed(request))
        block_index = tail // self.block_size  # the block that the tail ends in
        table = request.tables[self.index]
        if not 0 < tail <= num_tokens or tail % self.block_size == 0 or block_index >= len(table):
            return
        if table[block_index] != NULL:
            self.pool.link_partial(self.key(request, tail), table[block_index], tail)


class RSWAManager(FullManager):
    """The prompt stays; of the output, the last `window` tokens."""

    def __init__(self, group: RSWA, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.window = group.window

    def release_skipped(self, request: Request, num_computed: int) -> None:
        start_block = ceil_div(request.num_prompt, self.block_size)
        end_block = max(request.num_prompt, num_computed - self.window) // self.block_size  # whole blocks only
        self._release_back(request, start_block, min(end_block, len(request.tables[self.index])))

    def next_skip(self, num_tokens: int) -> int:
        end_block = max(num_tokens - self.window, 0) // self.block_size  # whole blocks only
        return (end_block + 1) * self.block_size + self.window - 1

"""Full attention and MLA: every block stays until the request ends."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import GroupManager, floor_to
from sim.pool import NULL
from sim.request import Request


class FullManager(GroupManager):
    """Full attention, and what is allocated like it."""

    full_like = True

    def lookup(self, request: Request, max_tokens: int, members: Sequence[GroupManager]) -> tuple[list[list[int]], int]:
        found: list[list[int]] = [[] for _ in members]
        hashed = len(request.prefixes) * self.setting.hash_block_size
        num_tokens = self.block_size
        while num_tokens <= min(max_tokens, hashed):
            block_ids = [self.pool.lookup(member.key(request, num_tokens)) for member in members]
            if None in block_ids:
                break
            for blocks, block_id in zip(found, block_ids, strict=True):
                assert block_id is not None
                blocks.append(block_id)
            num_tokens += self.block_size
        hit = floor_to(len(found[0]) * self.block_size, self.setting.hit_alignment)
        num_blocks = hit // self.block_size  # exact: the alignment is a multiple of the block size
        return [blocks[:num_blocks] for blocks in found], hit

    def cache(self, request: Request, num_tokens: int) -> None:
        super().cache(request, num_tokens)
        if self.block_size != self.setting.hash_block_size:
            self._register_prompt_tail(request, num_tokens)

    def _register_prompt_tail(self, request: Request, num_tokens: int) -> None:
        """The block in which the prompt ends is also linked to the prompt's last whole hash block."""
        hash_size = self.setting.hash_block_size
        last = request.num_prompt - 1 if self.setting.rules.prompt_tail_excludes_last_token else request.num_prompt
        tail = min(floor_to(last, hash_size), len(request.prefixes) * hash_size)
        block_index = tail // self.block_size  # the block that the tail ends in
        table = request.tables[self.index]
        if not 0 < tail <= num_tokens or tail % self.block_size == 0 or block_index >= len(table):
            return
        if table[block_index] != NULL:
            self.pool.insert(self.key(request, tail), table[block_index])

"""Chunked local attention: tokens attend within their own chunk; blocks of earlier chunks are given back."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import GroupManager, Setting, ceil_div, floor_to
from sim.pool import NULL, PredictedError
from sim.request import Request
from sim.scenario import ChunkedLocal


class ChunkedLookupError(PredictedError):
    """A lookup that vLLM does not implement."""


class ChunkedLocalManager(GroupManager):
    """Chunks of `chunk` tokens."""

    def __init__(self, group: ChunkedLocal, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.chunk = group.chunk
        most = min(self.chunk + setting.max_in_flight_tokens, setting.max_model_len)
        self.admission_cap = ceil_div(most, block_size)

    def num_skipped_tokens(self, num_computed: int) -> int:
        return floor_to(num_computed, self.chunk)

    def next_skip(self, num_tokens: int) -> int:
        return floor_to(num_tokens, self.chunk) + self.chunk - 1

    def lookup(
        self, request: Request, max_tokens: int, members: Sequence[GroupManager], drop_last: bool
    ) -> tuple[list[list[int]], int]:
        """Earlier chunks need nothing, so they always count as hit; then the cached blocks of the last chunk."""
        if drop_last or self.block_size != self.setting.hit_alignment:
            raise ChunkedLookupError("chunked local attention beside EAGLE, or beside groups of other block sizes")
        start_block = floor_to(max_tokens, self.chunk) // self.block_size  # the block the last chunk begins in
        found = [[NULL] * start_block for _ in members]
        for block_index in range(start_block, max_tokens // self.block_size):
            num_tokens = (block_index + 1) * self.block_size
            block_ids = self.pool.lookup_all([member.key(request, num_tokens) for member in members])
            if block_ids is None:
                break
            for blocks, block_id in zip(found, block_ids, strict=True):
                blocks.append(block_id)
        return found, len(found[0]) * self.block_size

"""Sliding window attention: blocks that the window has left are given back and their entries become null."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import GroupManager, Setting, ceil_div, floor_to
from sim.pool import NULL
from sim.request import Request
from sim.scenario import SlidingWindow, SlidingWindowMLA


class SlidingWindowManager(GroupManager):
    """The last `window` tokens, the one being computed included."""

    def __init__(self, group: SlidingWindow | SlidingWindowMLA, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.window = group.window
        self.prefix_cacheable = not (isinstance(group, SlidingWindowMLA) and group.bounded_replay)
        # One more than rounding up, since the window may begin inside a block.
        most = min(self.window - 1 + setting.max_in_flight_tokens, setting.max_model_len)
        self.admission_cap = ceil_div(most, block_size) + 1

    def num_skipped_tokens(self, num_computed: int) -> int:
        return max(0, num_computed - self.window + 1)

    def next_skip(self, num_tokens: int) -> int:
        num_skipped_blocks = self.num_skipped_tokens(num_tokens) // self.block_size
        return (num_skipped_blocks + 1) * self.block_size + self.window - 2

    def _run_needed(self, one_more: bool) -> int:
        """Blocks in a row that a hit needs to have the whole window before its next token; one more for EAGLE."""
        return ceil_div(self.window - 1, self.block_size) + one_more

    def lookup(
        self, request: Request, max_tokens: int, members: Sequence[GroupManager], drop_last: bool
    ) -> tuple[list[list[int]], int]:
        """The last run of blocks that is long enough and ends at an aligned length, or a shorter run from block 0 on."""
        run_needed = self._run_needed(drop_last)
        num_blocks = max_tokens // self.block_size
        found = [[NULL] * num_blocks for _ in members]
        run = 0
        for block_index in range(num_blocks - 1, -1, -1):
            num_tokens = (block_index + 1) * self.block_size
            block_ids = self.pool.lookup_all([member.key(request, num_tokens) for member in members])
            if block_ids is None:
                run = 0
                continue
            if run == 0 and not self._ends_aligned(block_index + 1 - drop_last):
                continue
            for blocks, block_id in zip(found, block_ids, strict=True):
                blocks[block_index] = block_id
            run += 1
            if run >= run_needed:
                return self._cut(found, block_index + run, drop_last)
        while run > 0 and not self._ends_aligned(run):
            run -= 1
        return self._cut(found, run, drop_last)

    def _ends_aligned(self, num_blocks: int) -> bool:
        return num_blocks * self.block_size % self.setting.hit_alignment == 0

    def _cut(self, found: list[list[int]], num_blocks: int, drop_last: bool) -> tuple[list[list[int]], int]:
        if drop_last and num_blocks > 0:
            num_blocks -= 1
            while num_blocks > 0 and not self._ends_aligned(num_blocks):
                num_blocks -= 1
        return [blocks[:num_blocks] for blocks in found], num_blocks * self.block_size

    def cache_mask(self, request: Request, start_block: int, end_block: int) -> Sequence[bool] | None:
        """Only blocks that some later hit can need: those before the ends of retained segments, and those before the
        places where a request with the same prompt, or a shared prefix of it, resumes."""
        interval = self.setting.retention_interval
        alignment = self.setting.hit_alignment
        if alignment % self.block_size:
            return None
        run_needed = self._run_needed(self.drops_last_block)
        shift = int(self.drops_last_block)
        keep = [False] * (end_block - start_block)
        segment = alignment if interval is None else interval
        if segment:
            per_segment = segment // self.block_size  # exact: intervals are multiples of the scheduler block size
            if run_needed >= per_segment:
                return None
            for block_index in range(max(start_block, shift), end_block):
                keep[block_index - start_block] = (block_index - shift) % per_segment >= per_segment - run_needed
        if interval is not None:
            for boundary in self.resume_boundaries(request):
                end = floor_to(boundary, alignment) // self.block_size + shift
                for block_index in range(max(start_block, end - run_needed), min(end_block, end)):
                    keep[block_index - start_block] = True
        return keep

"""Mamba without prefix caching: a request's state sits in one block, with more blocks for speculative states."""

from __future__ import annotations

from sim.groups.base import GroupManager, Setting
from sim.scenario import Mamba


class MambaManager(GroupManager):
    """Mode `none`. Only the state after the last token matters, so all tokens before it are skipped."""

    zeroable = False

    def __init__(self, group: Mamba, index: int, block_size: int, setting: Setting) -> None:
        super().__init__(group, index, block_size, setting)
        self.num_speculative_blocks = group.speculative_blocks
        self.num_speculative_slots = group.speculative_blocks * block_size

    def startup_blocks(self) -> int:
        return 1 + self.num_speculative_blocks

    def num_skipped_tokens(self, num_computed: int) -> int:
        return num_computed - 1

    def num_slots(self, num_tokens: int) -> int:
        return num_tokens + self.num_speculative_slots

    def next_skip(self, num_tokens: int) -> int:
        num_skipped_blocks = (num_tokens - 1) // self.block_size  # floor: the block of the last state stays
        return (num_skipped_blocks + 1) * self.block_size

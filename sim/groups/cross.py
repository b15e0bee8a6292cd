"""Cross attention: as many blocks as the encoder's tokens take, taken once, when the encoder's input is scheduled."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import NEVER, GroupManager, Room, ceil_div
from sim.request import Request


class CrossManager(GroupManager):
    """Nothing is hit, cached or skipped, and the table does not grow with the output."""

    prefix_cacheable = False

    def startup_blocks(self) -> int:
        return ceil_div(self.setting.max_encoder_tokens, self.block_size)

    def blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        return max(ceil_div(request.num_encoder_now, self.block_size) - len(request.tables[self.index]), 0)

    def allocate(self, request: Request, num_tokens: int, num_main: int) -> None:
        self._grow(request, ceil_div(request.num_encoder_now, self.block_size), True)

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        return NEVER

"""A circular buffer: one block for the whole life of a request, never shared, never given back early."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import NEVER, GroupManager, Room
from sim.request import Request


class CircularManager(GroupManager):
    """Whoever comes first, external or new tokens, takes the one block."""

    prefix_cacheable = False
    zeroable = False

    def startup_blocks(self) -> int:
        return 1

    def blocks_needed(self, request: Request, room: Room, hits: Sequence[int]) -> int:
        return 0 if request.tables[self.index] else 1

    def add_local(self, request: Request, hits: Sequence[int], num_local: int, num_external: int) -> None:
        """Nothing is ever hit."""

    def add_external(self, request: Request, num_local: int, num_external: int, zeroed: bool) -> None:
        self._grow(request, 1, zeroed)

    def allocate(self, request: Request, num_tokens: int, num_main: int) -> None:
        self._grow(request, 1, True)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Nothing is ever cached."""

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        return NEVER if request.tables[self.index] else 0

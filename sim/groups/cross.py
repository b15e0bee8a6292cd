"""Cross attention: blocks for the encoder's tokens, taken when the encoder runs."""

from __future__ import annotations

from collections.abc import Sequence

from sim.groups.base import NEVER, GroupManager
from sim.request import Request


class CrossManager(GroupManager):
    """Grows by the encoder tokens of a request; prefix caching has to be off."""

    prefix_cacheable = False

    def add_local(self, request: Request, hits: Sequence[int], num_local: int, num_external: int) -> None:
        """Encoder tokens are never hit."""

    def add_external(self, request: Request, num_local: int, num_external: int, zeroed: bool) -> None:
        """Nor do they come from outside."""

    def cache(self, request: Request, num_tokens: int) -> None:
        """Nothing is ever cached."""

    def quiet_until(self, request: Request, num_tokens: int, num_released: int) -> int:
        return NEVER

"""Several KV cache groups over one pool: which prefix do they have in common?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.groups.base import GroupManager, floor_to
from sim.request import Request


class Hits:
    """A lookup's result. blocks: per group the hit block IDs, null where the group does not need them; num_tokens: the
    length of the hit; num_uncached: how much longer the best single kind's hit was."""

    __slots__ = ("blocks", "num_tokens", "num_uncached")

    def __init__(self, blocks: list[list[int]], num_tokens: int, num_uncached: int = 0) -> None:
        self.blocks = blocks
        self.num_tokens = num_tokens
        self.num_uncached = num_uncached

    @property
    def is_empty(self) -> bool:
        """No group has an entry, not even a null one."""
        return not any(self.blocks)


class Coordinator:
    """The groups of a model, in the order of the KV cache config; that order decides which group gets which ID."""

    def __init__(self, managers: Sequence[GroupManager], scheduler_block_size: int) -> None:
        self.managers = list(managers)
        self.scheduler_block_size = scheduler_block_size
        self._sets = _lookup_sets(self.managers)

    def no_hits(self) -> Hits:
        """Nothing found."""
        return Hits([[] for _ in self.managers], 0)

    def find_hits(self, request: Request, max_tokens: int) -> Hits:
        """The longest prefix of at most `max_tokens` tokens that every cacheable group has."""
        if not self._sets:
            return self.no_hits()
        if len(self.managers) == 1:
            blocks, num_tokens = self.managers[0].lookup(request, max_tokens, self.managers)
            return Hits(blocks, num_tokens)
        return self._find_joint_hits(request, max_tokens)

    def _find_joint_hits(self, request: Request, max_tokens: int) -> Hits:
        """Looks the sets up in turn, each under the length the one before left, until a round shortens nothing."""
        hits = self.no_hits()
        full_length: dict[int, int] = {}
        hit, best = max_tokens, 0
        while True:
            length = hit
            for set_index, members in enumerate(self._sets):
                if set_index in full_length:
                    length = min(length, full_length[set_index])
                    continue
                blocks, length = members[0].lookup(request, length, members)
                best = max(best, length)
                for member, found in zip(members, blocks, strict=True):
                    hits.blocks[member.index] = found
                if members[0].full_like:
                    full_length[set_index] = length
            if length >= hit:
                break
            hit = length
            if len(self._sets) == 2 and self._sets[0][0].full_like:
                break  # the second set already looked under the first one's length
        for members in self._sets:
            if members[0].full_like:
                for member in members:
                    del hits.blocks[member.index][-(-hit // member.block_size) :]  # blocks rounded up
        hits.num_tokens = hit
        hits.num_uncached = best - hit
        return hits

    def num_cacheable(self, num_tokens: int) -> int:
        """How many of `num_tokens` leading tokens may be registered: with several groups, whole scheduler blocks."""
        if len(self.managers) == 1:
            return num_tokens
        return floor_to(num_tokens, self.scheduler_block_size)


def _lookup_sets(managers: Sequence[GroupManager]) -> list[list[GroupManager]]:
    """Cacheable groups of equal specification are looked up together; full attention comes first."""
    sets: dict[object, list[GroupManager]] = {}
    for manager in managers:
        if manager.prefix_cacheable:
            # How many layers share a table, and how kernels split its blocks, is not part of the specification.
            spec = msgspec.structs.replace(manager.group, layers=1, kernel_block=None)
            sets.setdefault(spec, []).append(manager)
    return sorted(sets.values(), key=lambda members: not members[0].full_like)

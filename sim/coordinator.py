"""Several KV cache groups over one pool: which prefix do they have in common?"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.groups.base import GroupManager, Setting, ceil_div, floor_to
from sim.releases import Rules
from sim.request import Request
from sim.scenario import Mamba


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


class LookupSet:
    """Cacheable groups of equal specification: a block counts as hit only if all of them have it."""

    def __init__(self, members: Sequence[GroupManager], drops_last_block: bool) -> None:
        self.members = list(members)
        self.first = members[0]
        self.drops_last_block = drops_last_block

    def find(self, request: Request, max_tokens: int, drop_last: bool) -> tuple[list[list[int]], int]:
        """See GroupManager.lookup."""
        return self.first.lookup(request, max_tokens, self.members, drop_last)


class Coordinator:
    """The groups of a model, in the order of the KV cache config; that order decides which group gets which ID."""

    def __init__(self, managers: Sequence[GroupManager], setting: Setting, dropping: frozenset[int]) -> None:
        """dropping: the groups whose hits lose their last block, for EAGLE."""
        self.managers = list(managers)
        self.setting = setting
        self.partial_hits = setting.partial_hits
        self.lookup_sets = _lookup_sets(self.managers, dropping, setting.rules)
        for lookup_set in self.lookup_sets:
            for member in lookup_set.members:
                member.drops_last_block = lookup_set.drops_last_block

    def no_hits(self) -> Hits:
        """Nothing found."""
        return Hits([[] for _ in self.managers], 0)

    def find_hits(self, request: Request, max_tokens: int) -> Hits:
        """The longest prefix of at most `max_tokens` tokens that every cacheable group has."""
        if not self.lookup_sets:
            return self.no_hits()
        if len(self.managers) == 1:
            (only,) = self.lookup_sets
            return Hits(*only.find(request, max_tokens, only.drops_last_block))
        return self._find_joint_hits(request, max_tokens)

    def _find_joint_hits(self, request: Request, max_tokens: int) -> Hits:
        """Looks the sets up in turn, each under the length that the one before left, until a round shortens nothing.
        Full attention is looked up once: a shorter prefix of its hit is a hit. A set whose last block is dropped looks
        one block further once, until another shortens the hit."""
        hits = self.no_hits()
        full_lengths: dict[LookupSet, int] = {}
        dropped: set[LookupSet] = set()
        hit, best = max_tokens, 0
        while True:
            length = hit
            for lookup_set in self.lookup_sets:
                if lookup_set in full_lengths:
                    length = min(length, full_lengths[lookup_set])
                    continue
                drop_last = lookup_set.drops_last_block and lookup_set not in dropped
                limit = length
                if drop_last and not isinstance(lookup_set.first.group, Mamba):
                    limit = self._limit_with_dropped_block(request, lookup_set.first, length, max_tokens)
                blocks, found = lookup_set.find(request, limit, drop_last)
                if drop_last:
                    dropped.add(lookup_set)
                elif found < length:
                    dropped.clear()
                length = found
                best = max(best, length)
                for member, member_blocks in zip(lookup_set.members, blocks, strict=True):
                    hits.blocks[member.index] = member_blocks
                if lookup_set.first.full_like:
                    full_lengths[lookup_set] = length
            if length >= hit:
                break
            hit = length
            if len(self.lookup_sets) == 2 and self.lookup_sets[0].first.full_like:
                break  # the second set already looked under the first one's length
        for lookup_set in full_lengths:
            for member in lookup_set.members:
                del hits.blocks[member.index][ceil_div(hit, member.block_size) :]
        hits.num_tokens = hit
        hits.num_uncached = best - hit
        return hits

    def _limit_with_dropped_block(self, request: Request, group: GroupManager, length: int, max_tokens: int) -> int:
        margin = group.block_size
        if self.partial_hits and group.finds_partial_hits:
            margin = min(margin, self.setting.hash_block_size)
        longest = group.num_hashed(request) if self.setting.rules.dropped_block_may_be_the_last else max_tokens
        return min(length + margin, longest)

    def num_cacheable(self, num_tokens: int, group: GroupManager) -> int:
        """How many of `num_tokens` leading tokens the group may register: with several groups whole scheduler blocks
        (unless hits may end inside), and the block after them where the last block of a hit is dropped."""
        if len(self.managers) == 1:
            return num_tokens
        whole = num_tokens if self.partial_hits else floor_to(num_tokens, self.setting.scheduler_block_size)
        if group.drops_last_block and whole > 0:
            return min(num_tokens, whole + group.block_size)
        return whole


def _lookup_sets(managers: Sequence[GroupManager], dropping: frozenset[int], rules: Rules) -> list[LookupSet]:
    """Sets in order of first appearance; full attention comes first. One member that drops makes all drop."""
    by_spec: dict[object, list[GroupManager]] = {}
    for manager in managers:
        if manager.prefix_cacheable:
            # How many layers share a table, which other sizes they have, and whose layers they are, a speculator's or the
            # main model's, is not part of the specification; how kernels split blocks may be.
            kernel_block = manager.group.kernel_block if rules.unsplit_where_pages_differ else None
            if kernel_block == manager.group.block:
                kernel_block = None
            spec = msgspec.structs.replace(manager.group, layers=1, uniform=(), kernel_block=kernel_block, draft=False)
            by_spec.setdefault(spec, []).append(manager)
    sets = [LookupSet(members, any(member.index in dropping for member in members)) for members in by_spec.values()]
    return sorted(sets, key=lambda lookup_set: not lookup_set.first.full_like)

"""The block pool: free queue, reference counts, and the links from prefix keys to blocks.

Block 0 is the null block: never allocated, freed or keyed. A *key* is an integer that stands for one prefix in one group
(see `sim.prefix`); several blocks may be linked to one key, and the earliest link is the one a lookup finds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

NULL = 0


class PredictedError(Exception):
    """vLLM raises an exception of type `vllm_type` here."""

    vllm_type = "AssertionError"


class OutOfBlocksError(PredictedError):
    """More blocks were taken than are free; nothing is taken."""

    vllm_type = "ValueError"


class BlockPool:
    """`num_blocks` physical blocks, the null block included.

    The free queue has three parts, from its head: blocks without a key (a stack), blocks never used so far (a range that
    costs nothing), and blocks whose key may still be hit (a queue in order of release).
    """

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.num_blocks = num_blocks
        self.caching = caching
        self.refs = [0] * num_blocks
        self.links: dict[int, list[int]] = {}
        self.version = 0  # grows with every change of queue, references or keys
        self._keyless: list[int] = []  # the head of the queue is the last entry
        self._next_unused = 1
        self._keyed: OrderedDict[int, None] = OrderedDict()
        self._primary: dict[int, int] = {}
        self._secondary: dict[int, list[int]] = {}
        self._key_lengths: dict[int, int] = {}
        self.events: list[tuple[str, int]] | None = None  # (stored | removed | cleared, key), where they are recorded

    # -- queue ---------------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks in the free queue."""
        return len(self._keyless) + self.num_blocks - self._next_unused + len(self._keyed)

    def free_order(self) -> list[int]:
        """Block IDs from the head of the free queue to its tail."""
        return [*reversed(self._keyless), *range(self._next_unused, self.num_blocks), *self._keyed]

    def take(self, count: int) -> list[int]:
        """Removes `count` blocks from the head, in order; their keys are evicted. Raises OutOfBlocksError."""
        if count == 0:
            return []
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks wanted, {self.num_free} free")
        self.version += 1
        taken: list[int] = []
        for _ in range(count):
            if self._keyless:
                block_id = self._keyless.pop()
            elif self._next_unused < self.num_blocks:
                block_id = self._next_unused
                self._next_unused += 1
            else:
                block_id = self._keyed.popitem(last=False)[0]
                self.drop_keys(block_id)
            self.refs[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Iterable[int]) -> None:
        """Gives up one reference each, in order, nulls skipped. Of those that become free, the keyless ones go to the
        head as one run in this order, the keyed ones to the tail in this order."""
        keyless: list[int] = []
        for block_id in block_ids:
            if block_id == NULL:
                continue
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                if block_id in self._primary:
                    self._keyed[block_id] = None
                else:
                    keyless.append(block_id)
            self.version += 1
        self._keyless.extend(reversed(keyless))

    def touch(self, block_ids: Iterable[int]) -> None:
        """Takes one more reference each; a free block leaves the queue from wherever it is."""
        for block_id in block_ids:
            if block_id == NULL:
                continue
            if self.refs[block_id] == 0:
                del self._keyed[block_id]
            self.refs[block_id] += 1
            self.version += 1

    def hold(self, block_id: int) -> None:
        """One more reference, whatever the block's state; its place in the queue does not change."""
        self.refs[block_id] += 1
        self.version += 1

    # -- keys ----------------------------------------------------------------------------------------------------------

    def lookup_all(self, keys: Sequence[int]) -> list[int] | None:
        """The block linked earliest to each key, or None if any key has none."""
        block_ids = []
        for key in keys:
            holders = self.links.get(key)
            if holders is None:
                return None
            block_ids.append(holders[0])
        return block_ids

    def primary_key(self, block_id: int) -> int | None:
        """The first key the block was given, or None."""
        return self._primary.get(block_id)

    def key_length(self, block_id: int) -> int | None:
        """Tokens in the prefix that the block's primary key stands for, or None without a key."""
        return self._key_lengths.get(block_id)

    def link(self, key: int, block_id: int, num_tokens: int) -> None:
        """Links the block to the key of a prefix of `num_tokens` tokens: as its primary key if it has none, else as a
        secondary one. Nothing happens if it is linked already."""
        holders = self.links.setdefault(key, [])
        if block_id in holders:
            return
        holders.append(block_id)
        self.version += 1
        if self.events is not None:
            self.events.append(("stored", key))
        if block_id in self._primary:
            self._secondary.setdefault(block_id, []).append(key)
        else:
            self._primary[block_id] = key
            self._key_lengths[block_id] = num_tokens

    def link_full(self, key: int, block_id: int, num_tokens: int) -> None:
        """Links a block that is full now; keys of shorter prefixes, which it had while it filled, go."""
        primary = self._primary.get(block_id)
        if primary is not None and primary != key:
            self.drop_keys(block_id)
        self.link(key, block_id, num_tokens)

    def link_partial(self, key: int, block_id: int, num_tokens: int) -> None:
        """Links a block to a prefix that ends inside it; keys of shorter prefixes go."""
        if block_id in self.links.get(key, ()):
            return
        length = self._key_lengths.get(block_id)
        if length is not None and length < num_tokens:
            self.drop_keys(block_id)
        self.link(key, block_id, num_tokens)

    def move_keys(self, source: int, target: int) -> None:
        """Hands all keys of `source` to `target`, which has none; each goes to the end of its key's links."""
        primary = self._primary.pop(source, None)
        if primary is None:
            return
        assert target not in self._primary
        self.version += 1
        secondary = self._secondary.pop(source, [])
        self._primary[target] = primary
        self._key_lengths[target] = self._key_lengths.pop(source)
        if secondary:
            self._secondary[target] = secondary
        for key in (primary, *secondary):
            self.links[key].remove(source)
            self.links[key].append(target)

    def drop_keys(self, block_id: int) -> None:
        """Unlinks the block from all its keys. References and queue stay."""
        primary = self._primary.pop(block_id, None)
        if primary is None:
            return
        del self._key_lengths[block_id]
        self.version += 1
        for key in (primary, *self._secondary.pop(block_id, ())):
            holders = self.links[key]
            holders.remove(block_id)
            if not holders:
                del self.links[key]
            if self.events is not None:
                self.events.append(("removed", key))

    def reset(self) -> bool:
        """Forgets all keys if no block is held; the queue keeps its order. Returns whether it did."""
        if self.num_free != self.num_blocks - 1:
            return False
        self.version += 1
        self.links.clear()
        self._primary.clear()
        self._secondary.clear()
        self._key_lengths.clear()
        if self.events is not None:
            self.events.append(("cleared", 0))
        return True

    def num_evictable(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks sit in the free queue (the null block does not)."""
        return sum(1 for block_id in block_ids if block_id != NULL and self.refs[block_id] == 0)

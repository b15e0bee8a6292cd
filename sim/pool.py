"""The block pool: free queue, reference counts, and the links from prefix keys to blocks.

Block 0 is the null block: never allocated, freed or keyed. A *key* is an integer that stands for one prefix in one group
(see `sim.prefix`); several blocks may be linked to one key, and the earliest link is the one a lookup finds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import cast

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
        self.version = 0  # grows with every change of queue, references or keys
        self.keys_version = 0  # grows with every change of keys
        self.num_evicted = 0  # blocks taken so far whose keys could still have been hit
        self._keyless: list[int] = []  # the head of the queue is the last entry
        self._next_unused = 1
        self._keyed: OrderedDict[int, None] = OrderedDict()
        self._first: dict[int, int] = {}  # by key: the block linked earliest
        self._later: dict[int, list[int]] = {}  # by key: the blocks linked after it, in order
        self._primary: dict[int, int] = {}  # by block: the first key it was given
        self._secondary: dict[int, list[int]] = {}  # by block: the keys it was given later
        self._lengths: dict[int, int] = {}  # by block: tokens in the prefix of its primary key, where they were given
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
        num_keyless = min(count, len(self._keyless))
        taken = self._keyless[: -num_keyless - 1 : -1]
        del self._keyless[len(self._keyless) - num_keyless :]
        num_unused = min(count - num_keyless, self.num_blocks - self._next_unused)
        if num_unused:
            taken += range(self._next_unused, self._next_unused + num_unused)
            self._next_unused += num_unused
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        refs = self.refs
        for block_id in taken:
            refs[block_id] = 1
        return taken

    def _evict(self, count: int) -> list[int]:
        """Removes `count` blocks from the head of the keyed ones, and their keys, which a reset may have taken before."""
        primary, keyed = self._primary, self._keyed
        evicted = list(islice(keyed, count))
        num_with_keys = len(primary)
        if self._secondary or self._later or self._lengths or self.events is not None:
            for block_id in evicted:
                del keyed[block_id]
                self.drop_keys(block_id)
        else:
            first = self._first
            self.keys_version += 1
            for block_id in evicted:
                del keyed[block_id]
                if block_id in primary:
                    del first[primary.pop(block_id)]
        self.num_evicted += num_with_keys - len(primary)
        return evicted

    def release(self, block_ids: Iterable[int]) -> None:
        """Gives up one reference each, in order, nulls skipped. Of those that become free, the keyless ones go to the
        head as one run in this order, the keyed ones to the tail in this order."""
        self.version += 1
        keyless: list[int] = []
        refs, keyed, primary = self.refs, self._keyed, self._primary
        for block_id in block_ids:
            left = refs[block_id] - 1
            if not left:
                refs[block_id] = 0
                if block_id in primary:
                    keyed[block_id] = None
                else:
                    keyless.append(block_id)
            elif block_id != NULL:
                refs[block_id] = left
        self._keyless += reversed(keyless)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Takes one more reference each; a free block leaves the queue from wherever it is."""
        self.version += 1
        refs, keyed = self.refs, self._keyed
        for block_id in block_ids:
            if block_id == NULL:
                continue
            if refs[block_id] == 0:
                del keyed[block_id]
            refs[block_id] += 1

    def hold(self, block_id: int) -> None:
        """One more reference, whatever the block's state; its place in the queue does not change."""
        self.refs[block_id] += 1
        self.version += 1

    # -- keys ----------------------------------------------------------------------------------------------------------

    def holders(self, key: int) -> list[int]:
        """The blocks linked to a key, earliest first; none if nothing is cached under it."""
        first = self._first.get(key)
        return [] if first is None else [first, *self._later.get(key, ())]

    def links(self) -> Iterator[tuple[int, list[int]]]:
        """Every key with its holders."""
        return ((key, self.holders(key)) for key in self._first)

    def lookup_all(self, keys: Sequence[int]) -> list[int] | None:
        """The block linked earliest to each key, or None if any key has none."""
        block_ids = []
        for key in keys:
            block_id = self._first.get(key)
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def lookup_run(self, keys: Iterable[int]) -> list[int]:
        """The blocks linked earliest to the keys, up to the first key that has none."""
        found = list(map(self._first.get, keys))
        if None in found:
            del found[found.index(None) :]
        return cast(list[int], found)

    def primary_key(self, block_id: int) -> int | None:
        """The first key the block was given, or None."""
        return self._primary.get(block_id)

    def key_length(self, block_id: int) -> int | None:
        """Tokens in the prefix that the block's primary key stands for; None without one, or where they were not given."""
        return self._lengths.get(block_id)

    def link(self, key: int, block_id: int, num_tokens: int | None) -> None:
        """Links the block to the key of a prefix of `num_tokens` tokens (None: nobody will ask): as its primary key if it
        has none, else as a secondary one. Nothing happens if it is linked already."""
        if not self._append_holder(key, block_id):
            return
        self._change_keys()
        if self.events is not None:
            self.events.append(("stored", key))
        if block_id in self._primary:
            self._secondary.setdefault(block_id, []).append(key)
        else:
            self._primary[block_id] = key
            if num_tokens is not None:
                self._lengths[block_id] = num_tokens

    def _append_holder(self, key: int, block_id: int) -> bool:
        """Links the block behind those linked before; False if it is one of them."""
        first = self._first.get(key)
        if first is None:
            self._first[key] = block_id
            return True
        if block_id == first:
            return False
        later = self._later.setdefault(key, [])
        if block_id in later:
            return False
        later.append(block_id)
        return True

    def _remove_holder(self, key: int, block_id: int) -> None:
        later = self._later.get(key)
        if later is None:
            del self._first[key]
            return
        if self._first[key] == block_id:
            self._first[key] = later.pop(0)
        else:
            later.remove(block_id)
        if not later:
            del self._later[key]

    def link_full(self, key: int, block_id: int, num_tokens: int | None) -> None:
        """Links a block that is full now; keys of shorter prefixes, which it had while it filled, go. Raises PredictedError
        if it has the key of one that is no shorter, such as a state's of a checkpoint."""
        primary = self._primary.get(block_id)
        length = self._lengths.get(block_id)
        if length is not None and num_tokens is not None and length >= num_tokens:
            raise PredictedError(f"block {block_id} has the key of {length} tokens, to be linked to that of {num_tokens}")
        if primary is not None and primary != key:
            self.drop_keys(block_id)
        self.link(key, block_id, num_tokens)

    def link_run(self, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """`link_full` for each key and block, in order, nobody asking for lengths. New keys on blocks without any, which is
        what a prefill brings, go in together."""
        if self.events is None and self._first.keys().isdisjoint(keys) and self._primary.keys().isdisjoint(block_ids):
            self._change_keys()
            self._first.update(zip(keys, block_ids, strict=True))
            self._primary.update(zip(block_ids, keys, strict=True))
        else:
            for key, block_id in zip(keys, block_ids, strict=True):
                self.link_full(key, block_id, None)

    def link_partial(self, key: int, block_id: int, num_tokens: int) -> None:
        """Links a block to a prefix that ends inside it; keys of shorter prefixes go."""
        if block_id in self.holders(key):
            return
        length = self.key_length(block_id)
        if length is not None and length < num_tokens:
            self.drop_keys(block_id)
        self.link(key, block_id, num_tokens)

    def move_keys(self, source: int, target: int) -> None:
        """Hands all keys of `source` to `target`, which has none; each goes to the end of its key's links."""
        primary = self._primary.pop(source, None)
        if primary is None:
            return
        assert target not in self._primary
        self._change_keys()
        secondary = self._secondary.pop(source, [])
        self._primary[target] = primary
        if source in self._lengths:
            self._lengths[target] = self._lengths.pop(source)
        if secondary:
            self._secondary[target] = secondary
        for key in (primary, *secondary):
            self._remove_holder(key, source)
            self._append_holder(key, target)

    def drop_keys(self, block_id: int) -> None:
        """Unlinks the block from all its keys. References and queue stay."""
        primary = self._primary.pop(block_id, None)
        if primary is None:
            return
        self._lengths.pop(block_id, None)
        self._change_keys()
        for key in (primary, *self._secondary.pop(block_id, ())):
            self._remove_holder(key, block_id)
            if self.events is not None:
                self.events.append(("removed", key))

    def reset(self) -> bool:
        """Forgets all keys if no block is held; the queue keeps its order. Returns whether it did."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._change_keys()
        for links in (self._first, self._later, self._primary, self._secondary, self._lengths):
            links.clear()
        if self.events is not None:
            self.events.append(("cleared", 0))
        return True

    def _change_keys(self) -> None:
        self.version += 1
        self.keys_version += 1

    def num_evictable(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks sit in the free queue (the null block does not)."""
        return sum(1 for block_id in block_ids if block_id != NULL and self.refs[block_id] == 0)

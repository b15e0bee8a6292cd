"""Reads what vLLM's scheduler holds inside: block tables, free queue, reference counts, cached keys.

Reading changes nothing. A field is given only where it differs from what was given last (None means unchanged).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.request import Request

from sim.history import Acted, CachedKey, StateRecord, Tables, is_pool_read

SEES = ("tables", "free", "refs", "keys", "deferred")
# A key that no request of the scenario has had. Nothing should ever show it.
_UNKNOWN = (-1, 0)
_EVENT_KINDS = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


class KeyNames:
    """Names hash keys by the request that had the prefix first. Hash bytes depend on the process, names do not."""

    def __init__(self, hash_block_size: int) -> None:
        self._hash_block_size = hash_block_size
        self._first: dict[bytes, tuple[int, int]] = {}
        self._num_named: dict[Request, int] = {}
        self._index_of: dict[Request, int] = {}

    def add(self, request: Request) -> None:
        """A request arrived: the next `add` of the scenario."""
        self._index_of[request] = len(self._index_of)
        self._num_named[request] = 0
        self.extend(request)

    def extend(self, request: Request) -> None:
        """Names the prefixes that the request has gained since the last call."""
        hashes = request.block_hashes
        num_named = self._num_named[request]
        if len(hashes) > num_named:
            for i in range(num_named, len(hashes)):
                name = (self._index_of[request], (i + 1) * self._hash_block_size)
                self._first.setdefault(hashes[i], name)
            self._num_named[request] = len(hashes)

    def name(self, block_hash: bytes) -> tuple[int, int]:
        """(index of the request, tokens of the prefix)."""
        return self._first.get(block_hash, _UNKNOWN)


class StateReader:
    """Reads one scheduler's state after each record. Block 0 is the null block.

    Walking the free queue and naming keys costs more than a step. Both are read only after a call of something that
    can change them, and always outside steps.
    """

    def __init__(self, scheduler: Any, names: KeyNames) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._names = names
        self._named: dict[bytes, tuple[int, int, int]] = {}
        self._queue_calls = _CallCounter(self._pool.free_block_queue)
        self._map_calls = _CallCounter(self._pool.cached_block_hash_to_block)
        self._free_read_at: object = None
        self._keys_read_at: object = None
        self._tables: Tables | None = None
        self._free: list[int] | None = None
        self._refs: list[int] | None = None
        self._keys: list[CachedKey] | None = None
        self._deferred: list[list[int]] | None = None
        self._events: list[Any] | None = None

    def watch_events(self) -> None:
        """Collects KV events from here on, in place of the publisher."""
        events: list[Any] = []

        class Collector:
            def publish(self, batch: Any) -> None:
                events.extend(batch.events)

            def shutdown(self) -> None:
                pass

        self._scheduler.kv_event_publisher = Collector()
        self._events = events

    def events(self) -> list[tuple[str, int, int, int]] | None:
        """KV events since the last call as (kind, group, request index, tokens), sorted; None where they are off."""
        if self._events is None:
            return None
        # A connector has events of its own, about another memory.
        told = [event for event in self._events if getattr(event, "medium", None) in (None, "GPU")]
        named = sorted(entry for event in told for entry in self._named_event(event))
        self._events.clear()
        return named

    def _named_event(self, event: Any) -> list[tuple[str, int, int, int]]:
        kind = _EVENT_KINDS[type(event).__name__]
        if kind == "cleared":
            return [(kind, -1, -1, -1)]
        group = event.group_idx or 0
        return [(kind, group, *self._names.name(block_hash)) for block_hash in event.block_hashes]

    def fill_in(self, record: StateRecord) -> None:
        """Sets the state fields of a record that differ from the last ones set."""
        record.tables, self._tables = _changed(self._read_tables(), self._tables)
        if not is_pool_read(self._pool.num_gpu_blocks, record):
            return
        record.deferred, self._deferred = _changed(self._read_deferred(), self._deferred)
        record.refs, self._refs = _changed(self._read_refs(), self._refs)
        is_outside_steps = isinstance(record, Acted)
        if is_outside_steps or self._queue_calls.count != self._free_read_at:
            self._free_read_at = self._queue_calls.count
            record.free, self._free = _changed(self._read_free(), self._free)
        if is_outside_steps or self._map_version() != self._keys_read_at:
            self._keys_read_at = self._map_version()
            record.keys, self._keys = _changed(self._read_keys(), self._keys)

    def _map_version(self) -> tuple[int, int]:
        key_map = self._pool.cached_block_hash_to_block
        if key_map is not self._map_calls.counted:  # forgetting all keys puts a new map in place
            self._map_calls = _CallCounter(key_map, self._map_calls.count + 1)
        return self._map_calls.count, len(key_map)

    def _read_tables(self) -> Tables:
        tables: Tables = {}
        for request_id in self._scheduler.requests:
            blocks = [manager.req_to_blocks.get(request_id, ()) for manager in self._managers]
            if any(blocks):
                tables[request_id] = [[block.block_id for block in table] for table in blocks]
        return tables

    def _read_free(self) -> list[int]:
        # Walked here rather than through the queue's own listing, whose checks would raise on a broken queue.
        queue = self._pool.free_block_queue
        order: list[int] = []
        block = queue.fake_free_list_head.next_free_block
        tail = queue.fake_free_list_tail
        limit = self._pool.num_gpu_blocks
        while block is not None and block is not tail and len(order) <= limit:
            order.append(block.block_id)
            block = block.next_free_block
        return order

    def _read_refs(self) -> list[int]:
        refs = [block.ref_cnt for block in self._pool.blocks]
        refs[0] = 0
        return refs

    def _read_deferred(self) -> list[list[int]]:
        return [[block.block_id for block in blocks] for _, blocks in self._scheduler.deferred_frees]

    def _read_keys(self) -> list[CachedKey]:
        keys = []
        named = self._named
        for key, holder in self._pool.cached_block_hash_to_block._cache.items():
            name = named.get(key) or self._name(key)
            blocks = [holder.block_id] if isinstance(holder, KVCacheBlock) else list(holder)
            keys.append(CachedKey(*name, blocks))
        keys.sort()
        return keys

    def _name(self, key: Any) -> tuple[int, int, int]:
        name = (get_group_id(key), *self._names.name(get_block_hash(key)))
        self._named[key] = name
        return name


class _CallCounter:
    """Counts calls of an object's public methods, which behave as before."""

    def __init__(self, counted: Any, start: int = 0) -> None:
        self.counted = counted
        self.count = start
        kind: Any = type(counted)
        for name in _changing_methods(kind):
            setattr(counted, name, self._counting(getattr(counted, name)))

    def _counting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            self.count += 1
            return method(*arguments)

        return counted


# Methods of the free queue and the key map that change nothing.
_READING_METHODS = frozenset({"contain", "get_all_free_blocks", "get_one_block"})


@functools.cache
def _changing_methods(kind: Any) -> list[str]:
    methods = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in methods if not name.startswith("_") and name not in _READING_METHODS]


def _changed(value: Any, last: Any) -> tuple[Any, Any]:
    """(value to give, value to remember)."""
    return (None, last) if value == last else (value, value)

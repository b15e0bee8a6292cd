"""Defects planted on purpose, in the child only, to show that each is caught and named."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any


class Defect:
    """What can be wrong with an engine. Each subclass breaks one thing."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        """Changes a fresh engine."""

    def on_the_way(self, metadata: Any) -> Any:
        """The connector's metadata as it reaches the worker."""
        return metadata


class LeakReference(Defect):
    """The first block freed keeps one reference."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        free_blocks = pool.free_blocks
        leaked: list[int] = []

        def leak(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            held = [block for block in blocks if not block.is_null]
            if held and not leaked:
                leaked.append(held[0].block_id)
                held[0].ref_cnt += 1
            free_blocks(blocks, *args, **kwargs)

        pool.free_blocks = leak


class FreeOrder(Defect):
    """The first two blocks of every release change places."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        free_blocks = pool.free_blocks

        def swapped(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            blocks[:2] = reversed(blocks[:2])
            free_blocks(blocks, *args, **kwargs)

        pool.free_blocks = swapped


class DropLastSelected(Defect):
    """The last block selected for a request gets lost on the way to the worker."""

    def on_the_way(self, metadata: Any) -> Any:
        fills = getattr(metadata, "reqs_to_fill", None)
        if not fills:
            return metadata
        lossy = copy.copy(metadata)
        lossy.reqs_to_fill = {request: (_without_last(ids), num) for request, (ids, num) in fills.items()}
        return lossy


def _without_last(ids_by_group: tuple[list[int], ...]) -> tuple[list[int], ...]:
    shorter = [list(ids) for ids in ids_by_group]
    for ids in reversed(shorter):
        if ids:
            ids.pop()
            break
    return tuple(shorter)


class WriteOutside(Defect):
    """After a fill, one byte of the last block in memory is flipped: nobody asks for that block in a roomy pool."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        if worker is None:
            return
        start_load_kv = worker.connector.start_load_kv

        def stray(*args: Any, **kwargs: Any) -> None:
            start_load_kv(*args, **kwargs)
            worker.memory.buffer[-1] ^= 0xFF

        worker.connector.start_load_kv = stray


class LateFill(Defect):
    """The scheduler does not say that loads have to come before the forward pass."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        if scheduler is None:
            return
        schedule = scheduler.schedule

        def silent(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            output.has_sync_kv_loads = False
            return output

        scheduler.schedule = silent


class SharedBlockFreed(Defect):
    """A block that several requests hold is freed with the first of them: somebody else gets it while the others read."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        free_blocks = pool.free_blocks

        def for_all(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            for block in blocks:
                block.ref_cnt = min(block.ref_cnt, 1)
            free_blocks(blocks, *args, **kwargs)

        pool.free_blocks = for_all


class TailFreedLast(Defect):
    """Requests give their blocks back head first, so that the beginning of a prefix is evicted before its end. The order
    was once forgotten for windows: what is left of such a prefix is never hit."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        free_blocks = pool.free_blocks

        def head_first(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            free_blocks(list(ordered_blocks)[::-1], *args, **kwargs)

        pool.free_blocks = head_first


class HitNotTouched(Defect):
    """A hit does not count as a reference: the block stays in the free queue and is handed to somebody else."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        touch = pool.touch

        def forgetful(blocks: Any, *args: Any, **kwargs: Any) -> None:
            touch([block for block in blocks if block.ref_cnt > 0], *args, **kwargs)

        pool.touch = forgetful


class KeyOutlivesBlock(Defect):
    """A block that is reused keeps its key: whoever asks for the old tokens gets the new ones."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)

        def keep(block: Any, *args: Any, **kwargs: Any) -> bool:
            return False

        pool._maybe_evict_cached_block = keep


class ResetKeepsKeys(Defect):
    """The prefix cache says that it was reset, and is as it was: after new weights, old keys and values are hit."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        _pool(scheduler).reset_prefix_cache = lambda: True


class WholePromptHit(Defect):
    """A lookup may take the last token too. Nothing is left to compute, and no logits come out; a block is hit that the
    model has to write to."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        if scheduler is None:
            return
        coordinator = scheduler.kv_cache_manager.coordinator
        find = coordinator.find_longest_cache_hit

        def longer(block_hashes: Any, max_length: int, *args: Any, **kwargs: Any) -> Any:
            return find(block_hashes, max_length + 1, *args, **kwargs)

        coordinator.find_longest_cache_hit = longer


class WindowLeavesEarly(Defect):
    """The block that holds the oldest token of a window is freed one token too early."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        for manager in _managers(scheduler):
            skipped = manager.get_num_skipped_tokens

            def one_more(num_computed_tokens: int, *args: Any, skipped: Any = skipped, **kwargs: Any) -> int:
                num_skipped: int = skipped(num_computed_tokens, *args, **kwargs)
                return num_skipped + 1 if num_skipped else 0

            manager.get_num_skipped_tokens = one_more


class LostCapacity(Defect):
    """The pool reports a block less than is free: the last one is never used, and who needs it waits for ever."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)
        num_free = pool.get_num_free_blocks
        pool.get_num_free_blocks = lambda: max(num_free() - 1, 0)


class SilentRemoval(Defect):
    """Evicted keys are not announced: whoever routes by KV events sends requests where nothing is cached any more."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        pool = _pool(scheduler)

        def silent(*args: Any, **kwargs: Any) -> None:
            pass

        pool._emit_block_removed_events = silent


class StaleMetadata(Defect):
    """The worker is handed the metadata of the step before as well, as a runner that binds without clearing does."""

    def __init__(self) -> None:
        self._before: Any = None

    def on_the_way(self, metadata: Any) -> Any:
        fills = getattr(metadata, "reqs_to_fill", None)
        if fills is None:
            return metadata
        both = copy.copy(metadata)
        both.reqs_to_fill = {**getattr(self._before, "reqs_to_fill", {}), **fills}
        self._before = metadata
        return both


class GroupsSwapped(Defect):
    """The lists of two groups change places on the way: each block is written through the other group's layers."""

    def on_the_way(self, metadata: Any) -> Any:
        fills = getattr(metadata, "reqs_to_fill", None)
        if not fills:
            return metadata
        swapped = copy.copy(metadata)
        swapped.reqs_to_fill = {request: (ids[::-1], num) for request, (ids, num) in fills.items()}
        return swapped


class NeighbourFilled(Defect):
    """The worker takes block IDs from 1, as if the null block had no row in memory: each fill goes one block too far."""

    def on_the_way(self, metadata: Any) -> Any:
        fills = getattr(metadata, "reqs_to_fill", None)
        if not fills:
            return metadata
        shifted = copy.copy(metadata)
        shifted.reqs_to_fill = {
            request: (tuple([block_id + 1 for block_id in ids] for ids in groups), num)
            for request, (groups, num) in fills.items()
        }
        return shifted


class LayerSkipped(Defect):
    """One layer is missing from what the connector got when memory was registered."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        registered = getattr(getattr(getattr(worker, "connector", None), "connector_worker", None), "kv_caches", None)
        if registered:
            del registered[max(registered)]


class FillRepeated(Defect):
    """The worker loads the same blocks again in the next step, when the request has begun to write to them."""

    def plant(self, scheduler: Any, worker: Any) -> None:
        if worker is None:
            return
        connector = worker.connector
        start_load_kv = connector.start_load_kv
        before: list[Any] = []

        def again(*args: Any, **kwargs: Any) -> None:
            now = connector._get_connector_metadata()
            start_load_kv(*args, **kwargs)
            if before:
                connector.bind_connector_metadata(before.pop())
                start_load_kv(*args, **kwargs)
                connector.bind_connector_metadata(now)
            if getattr(now, "reqs_to_fill", None):
                before.append(now)

        connector.start_load_kv = again


def _pool(scheduler: Any) -> Any:
    """The block pool, or something that takes changes and has no effect: the direct driver has no scheduler."""
    return scheduler.kv_cache_manager.block_pool if scheduler is not None else _Nothing()


def _managers(scheduler: Any) -> list[Any]:
    return list(scheduler.kv_cache_manager.coordinator.single_type_managers) if scheduler is not None else []


class _Nothing:
    """Has every attribute, and forgets what is set."""

    def __getattr__(self, name: str) -> Any:
        return None


DEFECTS: dict[str, type[Defect]] = {
    "leak_reference": LeakReference,
    "drop_last_selected": DropLastSelected,
    "write_outside": WriteOutside,
    "free_order": FreeOrder,
    "late_fill": LateFill,
    "shared_block_freed": SharedBlockFreed,
    "tail_freed_last": TailFreedLast,
    "hit_not_touched": HitNotTouched,
    "key_outlives_block": KeyOutlivesBlock,
    "reset_keeps_keys": ResetKeepsKeys,
    "whole_prompt_hit": WholePromptHit,
    "window_leaves_early": WindowLeavesEarly,
    "lost_capacity": LostCapacity,
    "silent_removal": SilentRemoval,
    "stale_metadata": StaleMetadata,
    "groups_swapped": GroupsSwapped,
    "neighbour_filled": NeighbourFilled,
    "layer_skipped": LayerSkipped,
    "fill_repeated": FillRepeated,
}

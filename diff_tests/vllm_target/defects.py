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
        pool = scheduler.kv_cache_manager.block_pool
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
        pool = scheduler.kv_cache_manager.block_pool
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
        schedule = scheduler.schedule

        def silent(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            output.has_sync_kv_loads = False
            return output

        scheduler.schedule = silent


DEFECTS: dict[str, type[Defect]] = {
    "leak_reference": LeakReference,
    "drop_last_selected": DropLastSelected,
    "write_outside": WriteOutside,
    "free_order": FreeOrder,
    "late_fill": LateFill,
}

"""OffloadingConnector, its scheduler side: keeps whole blocks of every cacheable group in slots of another memory.

Stores are sent in the step that fills the blocks, or, of a request that ended, in the next one, and read the blocks after
that step; a load is sent in the step that grants its blocks and arrives later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oracle.contracts.keeping import Keeping
from sim.geometry import is_prefix_cacheable
from sim.history import Move, Moves
from sim.releases import Rules
from sim.scenario import Mamba, Scenario


class Offloading(Keeping):
    """The contract under one scenario and release. A slot of the other memory holds `_num_blocks_per_slot` blocks."""

    name = "OffloadingConnector"
    requires_kv_delivery = False
    loads_later = True

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        super().__init__(scenario, rules)
        extra = scenario.connector.extra if scenario.connector else {}
        self._num_blocks_per_slot = int(extra.get("blocks_per_chunk") or 1)
        if extra.get("block_size"):
            self._num_blocks_per_slot = int(extra["block_size"]) // self.block_sizes[0]  # divides evenly, or is refused
        self.stores_parts = any(isinstance(group, Mamba) and group.mode == "align" for group in scenario.groups)
        self._kept = [index for index, group in enumerate(scenario.groups) if is_prefix_cacheable(group)]

    def moves(self, metadata: Any, tokens: Mapping[str, Sequence[int]]) -> Moves | None:
        """See KeepsContent."""
        loads, stores = getattr(metadata, "load_jobs", None), getattr(metadata, "store_jobs", None)
        if loads is None or stores is None:
            return None
        return Moves(
            loads=[
                move
                for number, job in loads.items()
                for move in self._moved(None if getattr(job, "sync", False) else number, job, job.dst_spec, job.src_spec)
            ],
            stores=[
                move for number, job in stores.items() for move in self._moved(number, job, job.src_spec, job.dst_spec)
            ],
            hurried=sorted(getattr(metadata, "jobs_to_flush", None) or ()),
        )

    def _moved(self, number: int | None, job: Any, inside: Any, outside: Any) -> Iterator[Move]:
        """The blocks of a job, group by group. Those of a group follow each other, and so do their slots."""
        blocks, slots = [int(block) for block in inside.block_ids], [int(slot) for slot in outside.block_ids]
        ratio = self._num_blocks_per_slot
        kept = self._kept if len(inside.group_sizes) == len(self._kept) else range(len(self.groups))
        for group, size, first in zip(kept, inside.group_sizes, inside.block_indices, strict=True):
            within = [int(first) % ratio + i for i in range(size)]
            places = [f"{slots[at // ratio]}.{at % ratio}" if at // ratio < len(slots) else "none" for at in within]
            if size:
                yield Move(job.req_id, group, blocks[:size], places, number)
            num_slots = within[-1] // ratio + 1 if within else 0
            blocks, slots = blocks[size:], slots[num_slots:]

"""What the workers of a trace were told, and what their loads left in KV memory."""

from __future__ import annotations

from typing import Any

from diff_tests.live.trace import ForwardRecord, Line, LoadRecord, MemoryRecord, ReceivedRecord, Stream, WrittenLayer
from oracle.contracts import Contract
from sim.history import Act, Written


class Worker:
    """One rank's stream, by step, as far as it is about one connector: child `c` of a MultiConnector, or the only one.

    acts: whether the load or the forward pass came first, where both were seen. looked_at: layers whose bytes were read.
    """

    def __init__(self, stream: Stream, c: int = 0) -> None:
        self.rank = stream.start.rank
        self.received: dict[int, Line] = {}
        self.loads: dict[int, Line] = {}
        self.acts: dict[int, list[Act]] = {}
        self.rows_per_block: dict[str, int] = {}
        self.looked_at: set[str] = set()
        for line in stream.lines:
            record = line.record
            if isinstance(record, MemoryRecord):
                self.rows_per_block = {layer[0]: layer[6] for layer in record.layers if layer[6]}
            elif isinstance(record, ReceivedRecord) and record.c == c:
                self.received[record.k] = line
            elif isinstance(record, LoadRecord) and record.c == c:
                self.loads[record.k] = line
                self.acts.setdefault(record.k, []).append("fill")
                self.looked_at.update(layer.layer for layer in record.written or ())
            elif isinstance(record, ForwardRecord):
                self.acts.setdefault(record.k, []).append("forward")
        self.first_step = min(self.received, default=0)
        self.last_step = max(self.received, default=0)

    def written(self, step: int, contract: Contract | None, sees_outside: bool = True) -> list[Written] | None:
        """What a load left in memory, in the words of law 6. sees_outside: whether nobody else writes meanwhile."""
        line = self.loads.get(step)
        if line is None or line.record.written is None or contract is None:
            return None
        entries = [entry for layer in line.record.written for entry in _judged(layer, contract)]
        return [entry for entry in entries if sees_outside or entry.state != "outside"]


def _judged(layer: WrittenLayer, contract: Contract) -> list[Written]:
    """What was seen of one layer, in the words of law 6. Bytes that are right are right, whether this load wrote them or
    they were so before; bytes that are wrong and did not change were not written."""
    value = contract.values[layer.group]
    equal = set(layer.equal)
    entries: list[Written] = []

    def enter(blocks: list[int], state: Any, element: str | None) -> None:
        if blocks:
            num_bytes = len(blocks) * layer.block_bytes
            entries.append(Written(layer.group, layer.layer, blocks, state, element, num_bytes))

    for element, blocks in [*layer.values, (None, layer.mixed)]:
        right = element is None if value.is_random else element is not None and _consists_of(element, value.element)
        if right and value.is_random:
            enter([block for block in blocks if block not in equal], "filled", None)
            continue
        if right:
            enter(list(blocks), "filled", element)
            continue
        enter([block for block in blocks if block in equal], "unwritten", element)
        enter([block for block in blocks if block not in equal], "wrong_value", element)
    enter(list(layer.outside), "outside", None)
    return entries


def _consists_of(seen: str, element: bytes) -> bool:
    """Whether an element of the layer's memory, in hex, is the right one, perhaps a narrower one over and over."""
    data = bytes.fromhex(seen)
    return data == element * (len(data) // len(element))  # floors: what does not divide evenly is not equal

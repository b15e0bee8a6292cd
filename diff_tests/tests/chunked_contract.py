"""The contract of `diff_tests.vllm_target.chunked`, as its author would write it, outside of ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from oracle.selection import blocks_of_tokens
from oracle.values import FillValue, encode
from sim.geometry import effective_block_size
from sim.history import Selection, Selections
from sim.releases import Rules
from sim.scenario import Scenario


class ChunkedRule:
    """Whole chunks of what a request has, but its last token."""

    requires_kv_delivery = True
    restores_windows = False

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        return max((num_tokens - 1) // self._chunk * self._chunk - num_local, 0), False

    def allocated(self, request_id: str, num_external: int) -> None:
        pass

    def finished(self, request_id: str) -> None:
        pass


class Chunked:
    """Exactly the blocks of the external tokens, filled with ones."""

    name = "ChunkedConnector"
    granularity: Literal["block", "token"] = "block"
    writes: Literal["constant", "content"] = "constant"
    requires_kv_delivery = True

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        assert scenario.connector is not None
        self._chunk = int(scenario.connector.extra.get("chunk", 256))
        self._sizes = [effective_block_size(group, scenario.engine.dcp, rules) for group in scenario.groups]
        self.values = [FillValue(encode(1.0, group.dtype), group.dtype, 1.0) for group in scenario.groups]

    def rule(self) -> ChunkedRule:
        return ChunkedRule(self._chunk)

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        return [
            blocks_of_tokens(table, size, num_local, num_local + num_external)
            for table, size in zip(tables, self._sizes, strict=True)
        ]

    def startup_fill(self) -> list[list[int]]:
        return [[] for _ in self._sizes]

    def read(self, metadata: Any) -> Selections | None:
        loads = getattr(metadata, "loads", None)
        if loads is None:
            return None
        return {request: Selection(ids, num_tokens) for request, (ids, num_tokens) in loads.items()}

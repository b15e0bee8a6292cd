"""DecodeBenchConnector: pretends that everything but a request's last token was computed elsewhere.

It answers once in the life of a request and writes a dummy value into the blocks of the external tokens, in the step
of the admission, before the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from oracle.selection import blocks_of_tokens, state_block, whole_table
from oracle.values import FillValue, clamp, encode
from sim.geometry import effective_block_size
from sim.manager import needs_zeroing
from sim.releases import Rules
from sim.scenario import AnyGroup, Circular, Mamba, Scenario

_DEFAULT_MEAN = 0.015


class DecodeBenchRule:
    """All uncomputed tokens but the last are external, synchronously, until a request has been given some."""

    requires_kv_delivery = True

    def __init__(self, restores_windows: bool) -> None:
        self.restores_windows = restores_windows
        self._given: set[str] = set()

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """External tokens beyond the local ones; never asynchronous."""
        if request_id in self._given:
            return 0, False
        return max(num_tokens - num_local - 1, 0), False

    def allocated(self, request_id: str, num_external: int) -> None:
        """A request that was granted none may still get some on a later admission."""
        if num_external > 0:
            self._given.add(request_id)

    def finished(self, request_id: str) -> None:
        """The ID may come again."""
        self._given.discard(request_id)


class DecodeBench:
    """The contract under one scenario and release."""

    name = "DecodeBenchConnector"
    granularity: Literal["block", "token"] = "block"
    writes: Literal["constant", "content"] = "constant"
    requires_kv_delivery = True

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        extra = scenario.connector.extra if scenario.connector else {}
        self._restores_windows = rules.decode_bench_restores_windows
        self._groups = scenario.groups
        self._num_blocks = scenario.engine.blocks
        self._block_sizes = [effective_block_size(group, scenario.engine.dcp, rules) for group in scenario.groups]
        self._filled_at_startup = [False] * len(scenario.groups)
        if extra.get("startup_fill") and rules.decode_bench_fills_at_startup:
            zeroing = needs_zeroing(scenario)
            self._filled_at_startup = [_keeps_startup_fill(group, zeroing) for group in scenario.groups]
        mean, std = float(extra.get("fill_mean", _DEFAULT_MEAN)), float(extra.get("fill_std", 0.0))
        self.values = [_fill_value(group, mean, std) for group in scenario.groups]
        self.states = [_state_values(group, mean, std) for group in scenario.groups]

    def rule(self) -> DecodeBenchRule:
        """The connector's answers, for one run of the model."""
        return DecodeBenchRule(self._restores_windows)

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Per group the blocks of the external tokens that it keeps; nothing where the start-up fill did it."""
        return [
            [] if self._filled_at_startup[i] else self._loads(group, self._block_sizes[i], table, num_local, num_external)
            for i, (group, table) in enumerate(zip(self._groups, tables, strict=True))
        ]

    def _loads(
        self, group: AnyGroup, block_size: int, table: Sequence[int], num_local: int, num_external: int
    ) -> list[int]:
        if num_external == 0:
            return []
        if isinstance(group, Circular):
            return whole_table(table)
        if isinstance(group, Mamba):
            return state_block(table, block_size, num_local + num_external)
        return blocks_of_tokens(table, block_size, num_local, num_local + num_external)

    def startup_fill(self) -> list[list[int]]:
        """Every block of the groups that the start-up fill covers, the null block too."""
        return [list(range(self._num_blocks)) if filled else [] for filled in self._filled_at_startup]


def _keeps_startup_fill(group: AnyGroup, zeroing: bool) -> bool:
    """A circular buffer starts each request from zeros, and where the engine zeroes new attention blocks a value written
    before would not last."""
    if isinstance(group, Circular):
        return False
    return isinstance(group, Mamba) or not zeroing


def _fill_value(group: AnyGroup, mean: float, std: float) -> FillValue:
    """Zero where the bytes are no plain numbers: rings pack other data beside them, pages of states are raw."""
    if isinstance(group, (Circular, Mamba)) or group.dtype == "packed":
        return FillValue(encode(0.0, "raw"), "raw")
    return _number(group.dtype, mean, std)


def _state_values(group: AnyGroup, mean: float, std: float) -> list[FillValue]:
    """States that are kept as tensors of numbers hold such numbers."""
    return [_number(state.dtype, mean, std) for state in group.states] if isinstance(group, Mamba) else []


def _number(dtype: str, mean: float, std: float) -> FillValue:
    if std > 0:
        return FillValue(b"", dtype, mean, std)
    return FillValue(encode(mean, dtype), dtype, clamp(mean, dtype))

"""Connectors that keep the content of blocks outside the KV cache and bring it back: what they have in common.

Such a connector's answers depend on what it has kept, and on what it has thrown away. Its contract has no rule for them:
the model follows the answers that were given, and law 4 asks what was loaded: exactly the blocks of the granted tokens,
each from a place where those very tokens had been stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeGuard

from oracle.selection import blocks_of_tokens, state_block
from oracle.values import FillValue, encode
from sim.geometry import effective_block_size, is_prefix_cacheable
from sim.history import Moves, Selection, Selections
from sim.releases import Rules
from sim.scenario import Mamba, Scenario


class KeepsContent(Protocol):
    """A contract that reads what its connector stores and loads off the metadata. stores_parts: it also stores blocks that
    are written in part. loads_later: all that it gives arrives after the step that asks."""

    stores_parts: bool
    loads_later: bool
    requires_kv_delivery: bool

    def moves(self, metadata: Any, tokens: Mapping[str, Sequence[int]]) -> Moves | None:
        """What the worker is told to move; None if the metadata has another form. tokens: all token IDs of each request
        admitted in the step, in the order of admission."""


def keeps_content(contract: object) -> TypeGuard[KeepsContent]:
    """Whether it is such a contract. Asked in every step, and `isinstance` of a protocol costs as much as a small one."""
    return hasattr(contract, "moves")


class Keeping:
    """The part of such a contract that all of them share. Sizes in tokens."""

    granularity: Literal["block", "token"] = "block"
    writes: Literal["constant", "content"] = "content"

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.groups = scenario.groups
        self.block_sizes = [effective_block_size(group, scenario.engine.dcp, rules) for group in scenario.groups]
        self.stores_parts = False
        self.values: Sequence[FillValue] = [FillValue(encode(0.0, "raw"), "raw")] * len(scenario.groups)

    def rule(self) -> None:
        """Its answers depend on what it keeps."""
        return

    def startup_fill(self) -> list[list[int]]:
        """Nothing."""
        return [[] for _ in self.groups]

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Of groups in the prefix cache the blocks of the external tokens, of a group of states the last one's."""
        end = num_local + num_external
        loads: list[list[int]] = []
        for group, size, table in zip(self.groups, self.block_sizes, tables, strict=True):
            if not is_prefix_cacheable(group):
                loads.append([])
            elif isinstance(group, Mamba):
                loads.append(state_block(table, size, end))
            else:
                loads.append(blocks_of_tokens(table, size, num_local, end))
        return loads


def loaded(moves: Moves | None, num_groups: int) -> Selections | None:
    """The loads among the moves, as a selection: blocks by request and group, in order. They announce no tokens."""
    if moves is None:
        return None
    groups: dict[str, list[list[int]]] = {}
    for move in moves.loads:
        groups.setdefault(move.request, [[] for _ in range(num_groups)])[move.group].extend(move.blocks)
    return {request: Selection(blocks, None) for request, blocks in groups.items()}

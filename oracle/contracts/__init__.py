"""Contracts: what each KV connector promises, as one small class. Nothing else in the oracle knows a connector by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from oracle.contracts.decode_bench import DecodeBench
from oracle.contracts.scripted import Scripted
from oracle.values import FillValue
from sim.connector import ConnectorRule
from sim.releases import Rules
from sim.scenario import Scenario


class Contract(Protocol):
    """What one connector promises for one scenario.

    name: as vLLM registers it. granularity: what its metadata counts in; `block` writes whole blocks. writes: `constant`
    data that stands for any content, or the very `content` of the tokens. requires_kv_delivery: see ConnectorRule.
    values: what a fill leaves in every element of a group's blocks.
    """

    name: str
    granularity: Literal["block", "token"]
    writes: Literal["constant", "content"]
    requires_kv_delivery: bool

    @property
    def values(self) -> Sequence[FillValue]:
        """By group index."""

    def rule(self) -> ConnectorRule:
        """The connector's answers, for one run of the model."""

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Block IDs per group, in order, that the worker has to write for a request with these block tables, when
        external tokens [num_local, num_local + num_external) were granted."""

    def startup_fill(self) -> list[list[int]]:
        """Block IDs per group that are written once, when memory is registered."""


_CONTRACTS: dict[str, Callable[[Scenario, Rules], Contract]] = {DecodeBench.name: DecodeBench, Scripted.name: Scripted}


def contract_for(scenario: Scenario, rules: Rules) -> Contract | None:
    """The contract of the scenario's connector; None without a connector, or where nobody has written its contract."""
    if scenario.connector is None:
        return None
    contract = _CONTRACTS.get(scenario.connector.name)
    return contract(scenario, rules) if contract else None

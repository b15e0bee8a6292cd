"""Contracts: what each KV connector promises, as one small class. Nothing else in the oracle knows a connector by name."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from oracle.contracts.decode_bench import DecodeBench
from oracle.contracts.example import Example
from oracle.contracts.keeping import KeepsContent, keeps_content, loaded
from oracle.contracts.multi import Multi, child_scenarios
from oracle.contracts.offloading import Offloading
from oracle.contracts.scripted import Scripted
from oracle.values import FillValue
from sim.connector import ConnectorRule
from sim.history import Selections
from sim.releases import Rules
from sim.scenario import Scenario

__all__ = [
    "Contract",
    "KeepsContent",
    "ReadsMetadata",
    "add",
    "added",
    "contract_for",
    "covered",
    "exemptions",
    "keeps_content",
    "loaded",
    "reads_metadata",
    "restores_windows",
]


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

    def rule(self) -> ConnectorRule | None:
        """The connector's answers, for one run of the model; None where they depend on what it keeps outside: then the
        model follows those that were given."""

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Block IDs per group, in order, that the worker has to write for a request with these block tables, when
        external tokens [num_local, num_local + num_external) were granted."""

    def startup_fill(self) -> list[list[int]]:
        """Block IDs per group that are written once, when memory is registered."""


class ReadsMetadata(Protocol):
    """A contract that reads its connector's metadata itself. Needed unless that has a `reqs_to_fill`: block IDs by group
    and a number of tokens, by request."""

    def read(self, metadata: Any) -> Selections | None:
        """What the metadata tells the worker to load; None if it cannot tell."""


def reads_metadata(contract: object) -> TypeGuard[ReadsMetadata]:
    """Whether it is such a contract, as cheap as `keeps_content`."""
    return hasattr(contract, "read")


@runtime_checkable
class FillsStates(Protocol):
    """A contract that says what becomes of states that a worker keeps as tensors of their own: a request's load writes
    each of its group's layers in full."""

    @property
    def states(self) -> Sequence[Sequence[FillValue]]:
        """By group index, for each tensor of a layer; empty where the layers are pages."""


_CONTRACTS: dict[str, Callable[[Scenario, Rules], Contract]] = {
    DecodeBench.name: DecodeBench,
    Example.name: Example,
    Offloading.name: Offloading,
    Scripted.name: Scripted,
}
_added: list[str] = []


def contract_for(scenario: Scenario, rules: Rules) -> Contract | None:
    """The contract of the scenario's connector; None without a connector, or where nobody has written its contract."""
    if scenario.connector is None:
        return None
    if scenario.connector.name == Multi.name:
        children = [contract_for(child, rules) for child in child_scenarios(scenario)]
        known = [child for child in children if child is not None]
        return Multi.of(known) if known and len(known) == len(children) else None
    contract = _CONTRACTS.get(scenario.connector.name)
    return contract(scenario, rules) if contract else None


def restores_windows(contract: Contract | None) -> bool:
    """See ConnectorRule; False without a contract, or where it has no rule."""
    rule = contract.rule() if contract is not None else None
    return rule is not None and rule.restores_windows


def covered() -> list[str]:
    """Names of the connectors that have a contract."""
    return [*_CONTRACTS, Multi.name]


def exemptions() -> dict[str, str]:
    """Connectors of vLLM that have none, each with the reason."""
    text = files("oracle.contracts").joinpath("exempt.toml").read_text(encoding="utf-8")
    return {name: str(reason) for name, reason in tomllib.loads(text).items()}


def add(path: str) -> None:
    """Takes in a contract from outside, `module:Class`, for the connector that its `name` says.

    Raises ValueError where there is no such class, or it does not say for whom it is.
    """
    if path in _added:
        return
    module_path, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_path), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: {error or 'must be module:Class'}") from None
    if not isinstance(getattr(found, "name", None), str):
        raise ValueError(f"{path}: the class must have a `name`, the connector's")
    _CONTRACTS[found.name] = found
    _added.append(path)


def added() -> tuple[str, ...]:
    """The contracts from outside, for another process to take in."""
    return tuple(_added)

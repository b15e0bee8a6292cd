"""MultiConnector: several connectors in a row; the first that has tokens for a request loads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from oracle.values import FillValue
from sim.connector import ConnectorRule
from sim.scenario import Connector, Scenario

if TYPE_CHECKING:
    from oracle.contracts import Contract


def child_scenarios(scenario: Scenario) -> list[Scenario]:
    """The scenario with each child in place of the MultiConnector."""
    assert scenario.connector is not None
    configs = scenario.connector.extra.get("connectors", [])
    return [
        replace(
            scenario,
            connector=Connector(name=config["kv_connector"], extra=config.get("kv_connector_extra_config", {})),
        )
        for config in configs
    ]


class MultiRule:
    """Every child is asked; the first that has tokens is chosen and keeps the request until it ends."""

    def __init__(self, children: Sequence[ConnectorRule]) -> None:
        self._children = children
        self._chosen: dict[str, int] = {}
        self.requires_kv_delivery = any(child.requires_kv_delivery for child in children)
        self.restores_windows = all(child.restores_windows for child in children)

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """See ConnectorRule. A child that does not know yet makes the request wait."""
        best: tuple[int, bool] = (0, False)
        for index, child in enumerate(self._children):
            num_external, loads_later = child.matched(request_id, num_tokens, num_local)
            if num_external is None:
                return None, False
            if not best[0] and num_external > 0:
                self._chosen[request_id] = index
                best = (num_external, loads_later)
        return best

    def allocated(self, request_id: str, num_external: int) -> None:
        """The others hear of the admission, but not of tokens."""
        for index, child in enumerate(self._children):
            child.allocated(request_id, num_external if index == self._chosen.get(request_id) else 0)

    def finished(self, request_id: str) -> None:
        """The ID may come again."""
        self._chosen.pop(request_id, None)
        for child in self._children:
            child.finished(request_id)


class Multi:
    """The contract over the children's. They must write alike: which of them loads is not told block by block."""

    name = "MultiConnector"
    granularity: Literal["block", "token"] = "block"
    writes: Literal["constant", "content"] = "constant"

    def __init__(self, children: Sequence[Contract]) -> None:
        self._children = children
        self.requires_kv_delivery = any(child.requires_kv_delivery for child in children)
        self.values: Sequence[FillValue] = children[0].values

    @classmethod
    def of(cls, children: Sequence[Contract]) -> Multi | None:
        """None where the children write different values, or at start-up, or keep content of their own."""
        alike = all(list(child.values) == list(children[0].values) for child in children)
        alike = alike and all(child.rule() is not None for child in children)
        return cls(children) if alike and not any(any(child.startup_fill()) for child in children) else None

    def rule(self) -> MultiRule:
        """See Contract."""
        return MultiRule([rule for child in self._children if (rule := child.rule()) is not None])

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Children that write alike load alike."""
        return self._children[0].loads(tables, num_local, num_external)

    def startup_fill(self) -> list[list[int]]:
        """Nothing."""
        return []

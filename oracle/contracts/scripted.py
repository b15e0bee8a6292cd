"""The scripted connector of the target: it answers what each request of the scenario says, and writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from oracle.values import FillValue, encode
from sim.releases import Rules
from sim.scenario import Add, Scenario


class ScriptedRule:
    """`external` tokens beyond the local ones whenever it is asked, as far as the request has them; with `load: async`
    they arrive later and may be all tokens, else the last token is left to compute."""

    requires_kv_delivery = True
    restores_windows = False

    def __init__(self, scenario: Scenario) -> None:
        self._lives: dict[str, list[Add]] = {}
        for step in scenario.steps:
            if isinstance(step, Add):
                self._lives.setdefault(step.id, []).append(step)
        self._num_ended: dict[str, int] = {}

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """See ConnectorRule."""
        add = self._lives[request_id][self._num_ended.get(request_id, 0)]
        loads_later = add.load == "async"
        num_external = min(add.external or 0, num_tokens - num_local - (0 if loads_later else 1))
        return num_external, loads_later and num_external > 0

    def allocated(self, request_id: str, num_external: int) -> None:
        """Every question is answered alike."""

    def finished(self, request_id: str) -> None:
        """The ID may come again, with another answer."""
        self._num_ended[request_id] = self._num_ended.get(request_id, 0) + 1


class Scripted:
    """The contract: answers, no writes."""

    name = "scripted"
    granularity: Literal["block", "token"] = "token"
    writes: Literal["constant", "content"] = "content"
    requires_kv_delivery = True

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self._scenario = scenario
        self._num_groups = len(scenario.groups)
        self.values: Sequence[FillValue] = [FillValue(encode(0.0, "raw"), "raw")] * self._num_groups

    def rule(self) -> ScriptedRule:
        """See Contract."""
        return ScriptedRule(self._scenario)

    def loads(self, tables: Sequence[Sequence[int]], num_local: int, num_external: int) -> list[list[int]]:
        """Nothing is handed to the worker."""
        return [[] for _ in range(self._num_groups)]

    def startup_fill(self) -> list[list[int]]:
        """Nothing."""
        return []

"""What the child does with a scenario, once vLLM is imported."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from vllm.envs import enable_envs_cache

from diff_tests.vllm_target import configs, direct_driver, scheduler_driver, wire, workload_driver
from diff_tests.vllm_target.connectors import contract_name, with_connector
from diff_tests.vllm_target.defects import DEFECTS
from oracle.contracts import contract_for
from sim.history import Record
from sim.releases import rules_of
from sim.scenario import Scenario, encode


class Server:
    """Executes scenarios on one vLLM with one connector."""

    def __init__(self, version: str, connector: str | None) -> None:
        """connector: the name for vLLM's configuration that replaces each scenario's own, if any."""
        self._version = version
        self._connector = connector
        self._contract_name = contract_name(connector) if connector else None

    def run(self, scenario: Scenario, judged_by: str, defect: str | None, emit: Callable[[Record], None]) -> None:
        """Executes the scenario, on an engine with the named defect if any, and emits its records. judged_by: the
        release whose rules say what a fill leaves in memory."""
        enable_envs_cache()  # as an engine core does once it has started
        contract = contract_for(self.effective(scenario), rules_of(judged_by))
        planted = DEFECTS[defect]() if defect else None
        driver = direct_driver if scenario.driver == "direct" else scheduler_driver
        scenario = with_connector(scenario, self._connector)
        if scenario.connector is not None and scenario.connector.extra.get("fill_std"):
            torch.manual_seed(zlib.crc32(encode(scenario)))  # values are drawn: the same scenario draws the same
        driver.run(scenario, self._version, contract, planted, emit)

    def effective(self, scenario: Scenario) -> Scenario:
        """The scenario as it is to be judged: with the connector under test in place of its own."""
        return with_connector(scenario, self._contract_name)

    def step_times(self, scenario: Scenario, num_warmup_steps: int, num_steps: int) -> list[float]:
        """Seconds that vLLM spends in each step of the scheduler driver, see there."""
        return scheduler_driver.step_times(scenario, num_warmup_steps, num_steps)

    def play_trace(self, scenario: Scenario, message: wire.PlayTrace, send: Callable[[wire.ToParent], None]) -> None:
        """Plays a request trace, see the workload driver."""
        workload_driver.play(scenario, message, send)

    def run_engine(self, scenario: Scenario, message: wire.RunEngine) -> wire.EngineEnd:
        """Starts a real engine and takes the scenario's steps."""
        # An engine brings in much that other work here does without.
        from diff_tests.vllm_target.engine.inprocess import run_engine

        return run_engine(scenario, message)

    def startup_pool(self, scenario: Scenario) -> int:
        """The smallest pool that vLLM's start-up check admits for the scenario's groups, in blocks."""
        return configs.smallest_pool(with_connector(scenario, self._connector))

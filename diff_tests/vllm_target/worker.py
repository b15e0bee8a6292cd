"""The worker's half of a step: hand the connector its metadata, let it load, look at what it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole

from diff_tests.vllm_target.configs import EngineSetup
from diff_tests.vllm_target.memory import KVMemory
from diff_tests.vllm_target.metadata import told
from oracle.contracts import Contract
from sim.history import Act, Scheduled, Selections, Written
from sim.scenario import Scenario


class Worker:
    """One worker with the connector's worker side and real KV memory."""

    def __init__(self, scenario: Scenario, setup: EngineSetup, contract: Contract | None) -> None:
        """contract: what the connector promises; None where nobody knows, then memory is not judged."""
        self.connector: Any = KVConnectorFactory.create_connector(
            setup.vllm_config, KVConnectorRole.WORKER, setup.worker_config
        )
        self._contract = contract
        self._num_groups = len(scenario.groups)
        self.tokens: Mapping[str, Sequence[int]] = {}  # of the requests that the step at hand admits
        self.memory = KVMemory(scenario, setup, contract)
        self._was_busy = False
        # What registering the memory wrote, judged like any other fill.
        self.written_at_start = self._register(contract.startup_fill() if contract else [])

    def _register(self, startup_fill: list[list[int]]) -> list[Written] | None:
        """Registers the memory, and judges what that wrote. New memory is zero; only if it no longer is, or should not
        be, every byte is looked at."""
        if not any(startup_fill):
            self.connector.register_kv_caches(self.memory.tensors)
            if self.memory.is_zero():
                return None
        self.memory.paint()
        self.connector.register_kv_caches(self.memory.tensors)
        return self.memory.verify([startup_fill]) or None

    def receive(self, metadata: Any) -> Selections | None:
        """Binds the step's metadata, and says what the worker will see."""
        self.connector.bind_connector_metadata(metadata)
        return told(self.connector._get_connector_metadata(), self._contract, self.tokens, self._num_groups).selected

    def act(self, received: Selections | None) -> list[Written] | None:
        """Loads, and judges every byte of KV memory afterwards.

        A step without work is judged only right after one with work: that is where a worker that kept old metadata
        would write again.
        """
        is_busy = received is None or any(any(selection.groups) for selection in received.values())
        judged = is_busy or self._was_busy
        self._was_busy = is_busy
        if judged:
            self.memory.paint()
        self.connector.start_load_kv(None)
        written = self.memory.verify([selection.groups for selection in (received or {}).values()]) if judged else None
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()
        return written if is_busy or written else None


def worker_acts(record: Scheduled, loads_first: bool) -> list[Act]:
    """What a worker does to KV memory in this step, in the order of vLLM's runner: it zeroes and copies before it hands the
    connector its metadata, and the scheduler tells it whether loads go before the forward pass."""
    acts: list[Act] = []
    if record.zeroed:
        acts.append("zero")
    if record.copies:
        acts.append("copy")
    received = record.received or {}
    later = {request for request in received if record.external.get(request) and request not in record.scheduled}
    fills = any(any(selection.groups) for request, selection in received.items() if request not in later)
    after: list[Act] = ["forward"] if record.scheduled else []
    if fills:
        after.insert(0 if loads_first else len(after), "fill")
    return acts + after

"""Workers for connectors that keep content outside the KV cache, where the real one needs a model runner or a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from diff_tests.vllm_target.configs import EngineSetup
from diff_tests.vllm_target.metadata import told
from diff_tests.vllm_target.recording import Emit
from diff_tests.vllm_target.worker import Worker
from oracle.contracts import Contract
from oracle.contracts.example import Example
from oracle.contracts.offloading import Offloading
from sim.history import Failure, Record, Selections, Updated, Written
from sim.scenario import Scenario

_FOLDER_KEY = "shared_storage_path"


@contextmanager
def file_store(scenario: Scenario, emit: Emit) -> Iterator[tuple[Scenario, Emit]]:
    """The scenario with an empty folder for the files of its connector, where it keeps any, gone in the end; and the way
    out for records, which do not tell its name, as it is another in every run."""
    connector = scenario.connector
    if connector is None or connector.name.rpartition(":")[2] != Example.name:
        yield scenario, emit
        return
    with tempfile.TemporaryDirectory(prefix="kvoracle-") as folder:

        def emit_nameless(record: Record) -> None:
            if isinstance(record, Failure):
                record.message = record.message.replace(folder, "FOLDER")
            emit(record)

        settled = replace(connector, extra={**connector.extra, _FOLDER_KEY: folder})
        yield replace(scenario, connector=settled), emit_nameless


def worker_of(scenario: Scenario, setup: EngineSetup, contract: Contract | None) -> Worker | JobWorker:
    """The worker for the scenario's connector."""
    if isinstance(contract, Offloading):
        return JobWorker(scenario, setup, contract)
    return (FileWorker if isinstance(contract, Example) else Worker)(scenario, setup, contract)


class FileWorker(Worker):
    """Loads and stores layer by layer, as a model runner has the connector do it around its layers."""

    def act(self, received: Selections | None) -> list[Written] | None:
        layers = self.memory.tensors
        forward = SimpleNamespace(
            attn_metadata=dict.fromkeys(layers),
            no_compile_layers={name: SimpleNamespace(kv_cache=tensor) for name, tensor in layers.items()},
        )
        self.connector.start_load_kv(forward)
        for name, tensor in layers.items():
            self.connector.save_kv_layer(name, tensor, None)
        self.connector.wait_for_save()
        self.connector.clear_connector_metadata()
        return None


class JobWorker:
    """Takes jobs and moves nothing. A load is over with the output of the step that sent it, a store with that of the next
    one, as its worker begins with it only then; one that has to hurry is over before the step."""

    written_at_start: list[Written] | None = None

    def __init__(self, scenario: Scenario, setup: EngineSetup, contract: Contract) -> None:
        self.connector: Any = KVConnectorFactory.create_connector(
            setup.vllm_config, KVConnectorRole.WORKER, setup.worker_config
        )
        self._contract = contract
        self._num_groups = len(scenario.groups)
        self.tokens: Mapping[str, Sequence[int]] = {}
        self._sent: list[int] = []  # stores of the last step, by number
        self._over: dict[int, str | None] = {}  # by number: for whom it is to be reported as a load

    def receive(self, metadata: Any) -> Selections | None:
        """Binds the step's metadata, and says what the worker will see."""
        self.connector.bind_connector_metadata(metadata)
        return told(self.connector._get_connector_metadata(), self._contract, self.tokens, self._num_groups).selected

    def act(self, received: Selections | None) -> list[Written] | None:
        """Takes the jobs; stores of the step before are over."""
        metadata = self.connector._get_connector_metadata()
        self._over |= dict.fromkeys(self._sent)
        self._over |= {number: None if _is_waited_for(job) else job.req_id for number, job in metadata.load_jobs.items()}
        hurried = metadata.jobs_to_flush or ()
        self._over |= dict.fromkeys(number for number in metadata.store_jobs if number in hurried)
        self._sent = [number for number in metadata.store_jobs if number not in hurried]
        self.connector.clear_connector_metadata()
        return None

    def report(self, record: Updated) -> KVConnectorOutput | None:
        """What the worker reports with a step's output; the record is told."""
        # Its module comes with the connector, not with this one.
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

        over, self._over = self._over, {}
        record.arrived = [request for request in over.values() if request is not None]
        if not over:
            return None
        done = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(over, 1))
        return KVConnectorOutput(finished_recving=set(record.arrived), kv_connector_worker_meta=done)


def _is_waited_for(job: Any) -> bool:
    """Since 0.33 a small load can be over before its step's forward pass."""
    return bool(getattr(job, "sync", False))

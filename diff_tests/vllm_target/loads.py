"""What a worker reports of loads: which asynchronous ones have arrived, which ones failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from sim.history import Scheduled, Updated

_FAIL_BY_REQUEST = "failed_recving" in {field.name for field in dataclasses.fields(KVConnectorOutput)}


class _Granted(NamedTuple):
    """External tokens that a request was granted: in which step, whether they come with it, and (table index, block ID) of
    each of their blocks in all groups, nulls left out."""

    step: int
    comes_with_step: bool
    blocks: list[tuple[int, int]]


class Loads:
    """The loads of one engine. Reports wait for the next output, or, of a synchronous load, for that of its step."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        managers = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._block_sizes = [manager.block_size for manager in managers]
        self._granted: dict[str, _Granted] = {}
        self._arrived: dict[str, None] = {}  # in order, also where vLLM has a set
        self._failed: dict[str, list[int]] = {}
        self._lost_in_step: dict[int, set[int]] = {}
        self._end_in_order_of_ids()

    def _end_in_order_of_ids(self) -> None:
        """Requests that end together do so in the order of a set, that is by chance. Here it is that of their IDs."""
        finish = self._scheduler.finish_requests

        def finish_requests(request_ids: Any, status: RequestStatus) -> list[Any]:
            if request_ids is None or isinstance(request_ids, str):
                return list(finish(request_ids, status) or ())
            return [ended for request_id in sorted(request_ids) for ended in finish(request_id, status) or ()]

        self._scheduler.finish_requests = finish_requests

    def grant(self, record: Scheduled, tables: dict[str, list[list[int]]]) -> None:
        """Loads began in this step. tables: of the requests with external tokens, as the connector was shown them."""
        for request_id, table_by_group in tables.items():
            start, num_external = record.hits[request_id], record.external[request_id]
            blocks = [
                (index, table[index])
                for size, table in zip(self._block_sizes, table_by_group, strict=True)
                for index in range(start // size, min(-(-(start + num_external) // size), len(table)))  # all they touch
                if table[index]
            ]
            self._granted[request_id] = _Granted(record.step, request_id in record.scheduled, blocks)

    def arrive(self, request_id: str) -> None:
        """The load is complete. Without a load under way nothing happens."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request_id in self._scheduler.finished_recving_kv_req_ids:
            return
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished():
            self._arrived[request_id] = None

    def fail(self, request_id: str, from_block: int, steps_in_flight: Collection[int]) -> None:
        """The load has failed from its table entry `from_block` on. Nothing happens unless it comes with a step in flight,
        whatever has become of its request, or is one that arrives later and is waited for."""
        granted = self._granted.get(request_id)
        if granted is None:
            return
        first = from_block if len(self._block_sizes) == 1 else 0
        lost = [block_id for index, block_id in granted.blocks if index >= first]
        if granted.comes_with_step:
            if granted.step in steps_in_flight:
                self._lost_in_step.setdefault(granted.step, set()).update(lost)
            return
        request = self._scheduler.requests.get(request_id)
        is_awaited = request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        is_over = request_id in self._scheduler.finished_recving_kv_req_ids or request_id in self._arrived
        if is_awaited and not is_over:
            self._arrived[request_id] = None
            self._failed[request_id] = lost

    def report(self, record: Updated) -> KVConnectorOutput | None:
        """What the worker reports with a step's output; the record is told."""
        arrived, self._arrived = self._arrived, {}
        failed, self._failed = self._failed, {}
        lost = self._lost_in_step.pop(record.step, set()).union(*failed.values())
        record.arrived, record.lost = list(arrived), sorted(lost)
        if not arrived and not lost:
            return None
        return KVConnectorOutput(finished_recving=arrived, **self._failures(failed, lost))  # type: ignore[arg-type]

    def _failures(self, failed: Iterable[str], lost: set[int]) -> dict[str, Any]:
        """By block where there is one group, else by request, where the release knows that."""
        if len(self._block_sizes) > 1 and _FAIL_BY_REQUEST:
            return {"failed_recving": set(failed)}
        return {"invalid_block_ids": lost}

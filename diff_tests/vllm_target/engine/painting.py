"""The probe connector, and around each of its loads every byte of KV memory painted before and judged after.

Only for engines of our own: paint destroys what the cache held. Name this module as the connector's module path, and a
connector as for the probe. Each worker writes what its loads did beside the trace, see `diff_tests.e2e.painted`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch

from diff_tests.e2e.painted import PAINTED_FOLDER, PaintedLoad, PaintedStep
from diff_tests.live.geometry import geometry_of
from diff_tests.live.trace import StartRecord
from diff_tests.vllm_target import kvprobe
from diff_tests.vllm_target.engine import acts
from oracle.contracts import contract_for
from oracle.fill import FillCheck, LayerView
from oracle.values import FillValue
from sim.history import Written
from sim.scenario import Scenario


class PaintedMemory:
    """All KV memory of one worker: painted, and judged byte by byte.

    Layers may lie in one storage or in several; each storage is judged on its own. caches: the registered views by layer
    name, as [rows, ...]; group_of: each layer's group; values: what a fill leaves in each group.
    """

    def __init__(
        self, caches: dict[str, torch.Tensor], group_of: dict[str, int], num_blocks: int, values: Sequence[FillValue]
    ) -> None:
        by_storage: dict[int, list[LayerView]] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for name, cache in caches.items():
            storage = cache.untyped_storage()
            storages[storage.data_ptr()] = storage
            view = LayerView(group_of[name], name, cache, cache.shape[0] // num_blocks)  # divides evenly
            by_storage.setdefault(storage.data_ptr(), []).append(view)
        self._checks = [FillCheck(_flat(storages[key]), views, values) for key, views in by_storage.items()]

    def paint(self) -> None:
        """A pattern in which every write shows, over all of the memory."""
        for check in self._checks:
            check.paint()

    def verify(self, requests: Sequence[Sequence[Sequence[int]]]) -> list[Written]:
        """What was written since, where these blocks were to be."""
        return [entry for check in self._checks for entry in check.verify(*requests)]


def _flat(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _Painter:
    """Paints and judges around the loads of one worker-side connector, and keeps the order of what the worker does."""

    def __init__(self, connector: Any) -> None:
        self._view = kvprobe.WorkerView(connector)
        self._memory: PaintedMemory | None = None
        self._was_busy = False

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        config = self._view.kv_cache_config
        start = msgspec.convert({**self._view.start, "part": 0}, StartRecord)
        rows = {name: cache.shape[0] // config.num_blocks for name, cache in caches.items()}
        geometry = geometry_of(start, config.num_blocks, rows)
        scenario = Scenario(engine=geometry.engine, connector=geometry.connector, groups=geometry.groups, steps=())
        contract = contract_for(scenario, geometry.rules)
        if contract is not None:
            group_of = {name: g for g, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
            self._memory = PaintedMemory(caches, group_of, config.num_blocks, contract.values)

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Judged are a load with work, and the next, where a worker that kept old metadata would write."""
        requests = self._view.requests
        is_busy = any(any(groups) for groups in requests)
        memory = self._memory if is_busy or self._was_busy else None
        self._was_busy = is_busy
        if is_busy:
            acts.LOG.note("fill")
        if memory is not None:
            memory.paint()
        yield
        if memory is not None and (written := memory.verify(requests)):
            self._write(PaintedLoad(self._view.step, self._view.start["rank"], written))

    def end_step(self) -> None:
        """The worker is done with its metadata."""
        done = acts.LOG.take()
        if done and done != ["forward"]:
            self._write(PaintedStep(self._view.step, self._view.start["rank"], done))

    def _write(self, entry: PaintedLoad | PaintedStep) -> None:
        folder = self._view.folder / PAINTED_FOLDER
        folder.mkdir(exist_ok=True)
        with (folder / f"worker-{entry.rank}-{self._view.start['pid']}.jsonl").open("ab") as file:
            file.write(msgspec.json.encode(entry) + b"\n")


@functools.cache
def _painted_class(name: str) -> type:
    probed: Any = getattr(kvprobe, name)

    class Painted(probed):  # type: ignore[misc]
        """The probed connector between paint and verdict."""

        def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
            super().register_kv_caches(kv_caches)
            self._painter = _Painter(self)
            self._painter.register(kv_caches)

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            super().bind_connector_metadata(connector_metadata)
            acts.LOG.bind()

        def start_load_kv(self, forward_context: Any, **rest: Any) -> None:
            with self._painter.load():
                super().start_load_kv(forward_context, **rest)

        def clear_connector_metadata(self) -> None:
            self._painter.end_step()
            super().clear_connector_metadata()

    # vLLM decides some things by a connector's name.
    Painted.__name__ = Painted.__qualname__ = probed.__name__
    return Painted


def __getattr__(name: str) -> type:
    """Connector classes on demand, by the names that the probe takes."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _painted_class(name)

"""KV memory as a worker has it: one buffer, and views of it made by vLLM's own functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

from diff_tests.vllm_target.backends import AttentionGroup, KernelBlocks
from diff_tests.vllm_target.configs import EngineSetup
from oracle.fill import FillCheck, LayerView
from oracle.values import FillValue
from sim.history import Written
from sim.scenario import Scenario

_device = "cpu"


def place_on(device: str) -> None:
    """Where the KV memory of all workers in this process lies from now on."""
    global _device
    _device = device


class KVMemory:
    """The KV memory of one worker. `tensors` is what the connector registers, by layer name."""

    def __init__(self, scenario: Scenario, setup: EngineSetup, values: Sequence[FillValue] | None) -> None:
        """Raises whatever vLLM raises where a layout cannot hold the scenario's kernel blocks."""
        config = setup.worker_config
        assert config.kv_cache_layout is not None
        attention_groups = [
            [AttentionGroup(KernelBlocks(group), cache_group.kv_cache_spec)]
            for group, cache_group in zip(scenario.groups, config.kv_cache_groups, strict=True)
        ]
        kernel_block_sizes = prepare_kernel_block_sizes(config, attention_groups)  # type: ignore[arg-type]
        self.tensors: dict[str, torch.Tensor] = allocate_kv_cache(
            config, torch.device(_device), KVCacheLayout[config.kv_cache_layout], kernel_block_sizes
        )
        self.buffer = _backing(next(iter(self.tensors.values())))
        self._check = None
        if values is not None:
            layers = [
                LayerView(group_index, name, self.tensors[name], self.tensors[name].shape[0] // config.num_blocks)
                for group_index, group in enumerate(config.kv_cache_groups)
                for name in group.layer_names
            ]
            self._check = FillCheck(self.buffer, layers, values)

    def is_zero(self) -> bool:
        """Whether every byte is zero."""
        return not bool(self.buffer.any())

    def paint(self) -> None:
        """Overwrites all of the memory with a pattern in which every write shows."""
        if self._check is not None:
            self._check.paint()

    def verify(self, requests: Iterable[Sequence[Sequence[int]]]) -> list[Written] | None:
        """What was written since `paint`, where these block IDs per group, request by request, were to be written.
        None: nobody knows with what."""
        return self._check.verify(*requests) if self._check is not None else None


def _backing(view: torch.Tensor) -> torch.Tensor:
    """The flat bytes below a view."""
    storage = view.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=view.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))

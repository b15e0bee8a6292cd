"""KV memory as a worker has it: one buffer, and views of it made by vLLM's own functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

from diff_tests.vllm_target.backends import AttentionGroup, KernelBlocks
from diff_tests.vllm_target.configs import EngineSetup
from diff_tests.vllm_target.state_memory import StateMemory
from oracle.contracts import Contract, FillsStates
from oracle.fill import FillCheck, LayerView
from sim.history import Written
from sim.scenario import Mamba, Scenario

_device = "cpu"


def place_on(device: str) -> None:
    """Where the KV memory of all workers in this process lies from now on."""
    global _device
    _device = device


class KVMemory:
    """The KV memory of one worker. `tensors` is what the connector registers, by layer name: pages, or a list of states, or
    what it does not know. Nobody may write to the pages of such layers: they count as padding."""

    def __init__(self, scenario: Scenario, setup: EngineSetup, contract: Contract | None) -> None:
        """contract: what the connector promises; None where nobody knows, then nothing is judged. Raises whatever vLLM
        raises where a layout cannot hold the scenario's kernel blocks."""
        config = setup.worker_config
        assert config.kv_cache_layout is not None
        attention_groups = [
            [AttentionGroup(KernelBlocks(group), cache_group.kv_cache_spec)]
            for group, cache_group in zip(scenario.groups, config.kv_cache_groups, strict=True)
        ]
        kernel_block_sizes = prepare_kernel_block_sizes(config, attention_groups)  # type: ignore[arg-type]
        pages: dict[str, torch.Tensor] = allocate_kv_cache(
            config, torch.device(_device), KVCacheLayout[config.kv_cache_layout], kernel_block_sizes
        )
        self.buffer = _backing(next(iter(pages.values())))
        names = [group.layer_names for group in config.kv_cache_groups]
        states = contract.states if isinstance(contract, FillsStates) else None
        self._states = StateMemory(scenario, names, states, _device)
        self.tensors: dict[str, object] = {**pages, **self._states.tensors}
        unknown = _hide_unknown(self.tensors, scenario, names)
        self._paged = [not (isinstance(group, Mamba) and group.states) for group in scenario.groups]
        self._check = None
        if contract is not None:
            layers = [
                LayerView(group_index, name, pages[name], pages[name].shape[0] // config.num_blocks)
                for group_index, group in enumerate(config.kv_cache_groups)
                for name in group.layer_names
                if name not in unknown
            ]
            self._check = FillCheck(self.buffer, layers, contract.values)

    def is_zero(self) -> bool:
        """Whether every byte is zero."""
        return not bool(self.buffer.any()) and not bool(self._states.buffer.any())

    def paint(self) -> None:
        """Overwrites all of the memory with a pattern in which every write shows."""
        if self._check is not None:
            self._check.paint()
        self._states.paint()

    def verify(self, requests: Sequence[Sequence[Sequence[int]]]) -> list[Written] | None:
        """What was written since `paint`, where these block IDs per group, request by request, were to be written.
        None: nobody knows with what."""
        if self._check is None:
            return None
        in_pages = [[ids if paged else [] for ids, paged in zip(r, self._paged, strict=False)] for r in requests]
        return self._check.verify(*in_pages) + self._states.verify(requests)


def _hide_unknown(tensors: dict[str, object], scenario: Scenario, names: Sequence[Sequence[str]]) -> set[str]:
    """Puts something else in the place of layers that the scenario calls unknown. Returns their names."""
    hidden = set()
    for group, group_names in zip(scenario.groups, names, strict=True):
        for form, name in zip(group.unknown, group_names, strict=False):
            hidden.add(name)
            del tensors[name]
            if form != "absent":
                tensors[name] = object() if form == "object" else [object()]
    return hidden


def _backing(view: torch.Tensor) -> torch.Tensor:
    """The flat bytes below a view."""
    storage = view.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=view.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))

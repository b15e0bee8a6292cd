"""Stand-ins for attention backends: they say into which kernel blocks a manager's block may be split, nothing more."""

from __future__ import annotations

from typing import Any, NamedTuple

import vllm.v1.worker.utils as worker_utils

from sim.scenario import AnyGroup


class KernelBlocks:
    """A backend whose kernels take blocks of exactly one size, in tokens."""

    def __init__(self, group: AnyGroup) -> None:
        self._size = group.kernel_block or group.block

    def get_supported_kernel_block_sizes(self, *_: object) -> list[int]:
        return [self._size]

    def customize_spec(self, spec: Any) -> Any:
        return spec

    def get_name(self) -> str:
        return f"kernel blocks of {self._size} tokens"


class AttentionGroup(NamedTuple):
    """What vLLM's worker looks at when it chooses kernel block sizes."""

    backend: KernelBlocks
    kv_cache_spec: Any


def customized(group: AnyGroup, spec: Any) -> Any:
    """The spec as the group's backend wants it. Releases before 0.32 do not ask backends."""
    customize = getattr(worker_utils, "customize_attention_spec", None)
    if customize is None or group.kernel_block in (None, group.block):
        return spec
    return customize(KernelBlocks(group), spec)

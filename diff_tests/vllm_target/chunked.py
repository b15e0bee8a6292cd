"""A connector from outside vLLM, small enough to read: a store that holds every token in chunks, loaded at once.

It is here to show how such a connector is tested: `--connector diff_tests.vllm_target.chunked:ChunkedConnector --contract
diff_tests.tests.chunked_contract:Chunked`. Settings: `chunk`, tokens in a chunk; `rounds_down` loads from the start of the
chunk in which the local tokens end, as if they were its own to write: a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

_VALUE = 1.0


@dataclass
class ChunkedMetadata(KVConnectorMetadata):
    """Block IDs per group and the number of tokens, by request."""

    loads: dict[str, tuple[list[list[int]], int]] = field(default_factory=dict)


class ChunkedConnector(KVConnectorBase_V1, SupportsHMA):
    """Scheduler and worker side in one."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._chunk = int(extra.get("chunk", 256))
        self._rounds_down = bool(extra.get("rounds_down", False))
        self._groups = kv_cache_config.kv_cache_groups
        self._pending = ChunkedMetadata()
        self._tensors: dict[str, Any] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_stored = (request.num_tokens - 1) // self._chunk * self._chunk  # floors: whole chunks, a token left to compute
        return max(num_stored - num_computed_tokens, 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        end = (request.num_tokens - 1) // self._chunk * self._chunk
        start = end - num_external_tokens
        if self._rounds_down:
            start = start // self._chunk * self._chunk
        loads = []
        for group, group_blocks in zip(self._groups, blocks.blocks, strict=True):
            size = group.kv_cache_spec.block_size
            covered = group_blocks[start // size : -(-end // size)]  # floors, then rounds up
            loads.append([block.block_id for block in covered if not block.is_null])
        self._pending.loads[request.request_id] = (loads, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata, self._pending = self._pending, ChunkedMetadata()
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._tensors = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ChunkedMetadata)
        for loads, _ in metadata.loads.values():
            for group, ids in zip(self._groups, loads, strict=True):
                for layer in group.layer_names:
                    self._tensors[layer][ids] = _VALUE

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

"""A connector that answers what the scenario says, so that every path of external tokens can be driven."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from oracle.contracts.scripted import ScriptedRule
from sim.scenario import Scenario

NAME = "scripted"
CLASS = f"{__name__}:ScriptedConnector"
_EXTRA_KEY = "scenario"


def extra_config(scenario: Scenario) -> dict[str, Any]:
    """What the connector has to be told of its scenario."""
    return {_EXTRA_KEY: scenario}


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """Answers by the scenario; its worker side does nothing, loads arrive when the scenario says so."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._rule = ScriptedRule(vllm_config.kv_transfer_config.kv_connector_extra_config[_EXTRA_KEY])

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._rule.matched(request.request_id, request.num_tokens, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._rule.finished(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

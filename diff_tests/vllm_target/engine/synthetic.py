"""A model of ours whose layers declare any mix of KV cache groups and compute nothing.

vLLM's engine does everything else: it plans the groups, allocates and splits memory, builds block tables, zeroes and copies
blocks and calls the connector. So kinds of groups and sizes run that no kernel on this machine could compute.

The groups stand in the model's config.json, as in a scenario.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from diff_tests.e2e.models import SYNTHETIC_GROUPS_KEY
from diff_tests.vllm_target.specs import layer_names, layer_specs
from sim.scenario import AnyGroup, Engine, Scenario


class _Builder(AttentionMetadataBuilder[Any]):
    """Builds the metadata of a step for kernels that do not exist."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        return common_attn_metadata


class _Impl(AttentionImpl[Any]):
    """An attention that is never computed. It claims what decode context parallelism asks of a kernel."""

    can_return_lse_for_decode = True
    supports_pcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(self) -> None:
        self.need_to_return_lse_for_decode = True

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        raise NotImplementedError


class _Backend(AttentionBackend):
    """A backend without kernels."""

    @staticmethod
    def get_name() -> str:
        return "KVORACLE"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return _Impl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return _Builder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True


@functools.cache
def _backend(kernel_block_size: int, is_uniform: bool) -> type[AttentionBackend]:
    """A backend whose kernels take blocks of exactly this size, in tokens. Pages of one size may lie layer by layer; pages
    of different sizes fit only side by side within a block."""
    layouts = ("LBNHC", "LBHNC") if is_uniform else ("BLHNC",)

    class Backend(_Backend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
            return [kernel_block_size]

        @classmethod
        def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
            return tuple(KVCacheLayout[name] for name in layouts)

    # vLLM tells backends apart by their names.
    Backend.__qualname__ = f"Backend{kernel_block_size}{'' if is_uniform else 'Mixed'}"
    return Backend


class _Layer(nn.Module, AttentionLayerBase):
    """A layer that owns KV cache and does nothing with it."""

    def __init__(self, spec: KVCacheSpec, backend: type[AttentionBackend]) -> None:
        super().__init__()
        self._spec = spec
        self._backend = backend
        self.impl = _Impl()
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        return self._spec


class KVOracleForCausalLM(nn.Module):
    """The model. Every token is as likely as any other, so that the one which a request allows is taken."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self._hidden_size = config.hidden_size
        self._vocabulary_size = config.vocab_size
        self._dtype = vllm_config.model_config.dtype
        groups = tuple(msgspec.convert(getattr(config, SYNTHETIC_GROUPS_KEY), list[AnyGroup]))
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        scenario = Scenario(engine=Engine(blocks=2, dcp=dcp), groups=groups, steps=())
        specs = layer_specs(scenario)
        is_uniform = len({spec.page_size_bytes for spec in specs.values()}) == 1
        context = vllm_config.compilation_config.static_forward_context
        for group, names in zip(groups, layer_names(scenario), strict=True):
            backend = _backend(group.kernel_block or group.block, is_uniform)
            for name in names:
                # vLLM numbers layers by the one integer in their names.
                context[f"layers.{len(context)}"] = _Layer(specs[name], backend)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(input_ids), self._hidden_size, dtype=self._dtype, device=input_ids.device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.embed_input_ids(positions)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden_states), self._vocabulary_size, dtype=torch.float32, device=hidden_states.device)

    def load_weights(self, weights: Any) -> set[str]:
        return set()

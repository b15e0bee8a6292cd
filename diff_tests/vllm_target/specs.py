"""From a scenario's groups to vLLM's KV cache specs, one for each layer, on every release."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from vllm.v1 import kv_cache_interface as kv

from diff_tests.vllm_target.backends import customized
from sim.geometry import FULL_LIKE
from sim.scenario import (
    MLA,
    RSWA,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Cross,
    Full,
    Mamba,
    Scenario,
    SlidingWindow,
    SlidingWindowMLA,
)

_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    # A worker stores fp8 as plain bytes; the quantisation mode says what they mean.
    "fp8": torch.uint8,
    "fp8_e4m3": torch.uint8,
    "fp8_e5m2": torch.uint8,
    "packed": torch.uint8,  # no quantisation mode, as the caches of sparse attention's indexers
}
FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2"})


class Unsupported(ValueError):
    """The scenario asks for something that this vLLM's configuration cannot express."""


def layer_names(scenario: Scenario) -> list[list[str]]:
    """Layer names per group: `g0.l0`, `g0.l1`, ..."""
    return [[f"g{g}.l{i}" for i in range(group.num_layers)] for g, group in enumerate(scenario.groups)]


def layer_specs(scenario: Scenario) -> dict[str, kv.KVCacheSpec]:
    """vLLM's KV cache spec of every layer, group by group."""
    specs: dict[str, kv.KVCacheSpec] = {}
    for group, names in zip(scenario.groups, layer_names(scenario), strict=True):
        first, sized = _spec(group, scenario), []
        for part in group.uniform:
            spec = _spec(replace(group, heads=part.heads, head_size=part.head_size), scenario)
            sized += [spec] * part.layers
        specs.update(zip(names, [first] * group.layers + sized, strict=True))
    return _pad_states(specs)


def group_spec(group: AnyGroup, names: list[str], specs: dict[str, kv.KVCacheSpec]) -> kv.KVCacheSpec:
    """The spec of a group of these layers: theirs, or a wrapper around several. Raises Unsupported."""
    if not group.uniform:
        return specs[names[0]]
    wrapper = kv.UniformTypeKVCacheSpecs.from_specs({name: specs[name] for name in names})
    if wrapper is None:
        raise Unsupported(f"this release does not wrap several {group.kind} specs in one group")
    return wrapper


def _pad_states(specs: dict[str, kv.KVCacheSpec]) -> dict[str, kv.KVCacheSpec]:
    """Pads Mamba states to the attention page where all attention pages are equal, as hybrid models are set up."""
    pages = {spec.page_size_bytes for spec in specs.values() if not isinstance(spec, kv.MambaSpec)}
    if len(pages) != 1:
        return specs
    page = pages.pop()
    return {
        name: dataclasses.replace(spec, page_size_padded=page)
        if isinstance(spec, kv.MambaSpec) and spec.page_size_bytes < page
        else spec
        for name, spec in specs.items()
    }


def _spec(group: AnyGroup, scenario: Scenario) -> kv.KVCacheSpec:
    if isinstance(group, Mamba):
        return _mamba_spec(group, scenario)
    spec_class, extra = _ATTENTION_SPECS[type(group)]
    fields: dict[str, Any] = {
        "block_size": group.block,
        "num_kv_heads": group.heads,
        "head_size": group.head_size,
        "dtype": _TORCH_DTYPES[group.dtype],
        **extra(group),
        **_dcp_fields(group, scenario, spec_class),
        **_draft_fields(group, spec_class),
    }
    if group.dtype in FP8:
        fields["kv_quant_mode"] = kv.KVQuantMode.FP8_PER_TENSOR
        if isinstance(group, MLA):
            fields["cache_dtype_str"] = group.dtype
    spec: kv.KVCacheSpec = customized(group, spec_class(**fields))
    return spec


_Extra = Callable[[Any], dict[str, Any]]
_ATTENTION_SPECS: dict[type, tuple[Any, _Extra]] = {
    Full: (kv.FullAttentionSpec, lambda group: {}),
    MLA: (kv.MLAAttentionSpec, lambda group: {}),
    SlidingWindowMLA: (
        kv.SlidingWindowMLASpec,
        lambda group: {"sliding_window": group.window, **({"bounded_replay": True} if group.bounded_replay else {})},
    ),
    SlidingWindow: (kv.SlidingWindowSpec, lambda group: {"sliding_window": group.window}),
    RSWA: (kv.RSWASpec, lambda group: {"rswa_window": group.window}),
    ChunkedLocal: (kv.ChunkedLocalAttentionSpec, lambda group: {"attention_chunk_size": group.chunk}),
    Circular: (kv.CircularBufferSpec, lambda group: {}),
    Cross: (kv.CrossAttentionSpec, lambda group: {}),
}


@functools.cache
def _field_names(spec_class: type) -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(spec_class))


def _dcp_fields(group: AnyGroup, scenario: Scenario, spec_class: type) -> dict[str, Any]:
    """Whether decode context parallelism shards the group, where the release's specs say so themselves."""
    if "dcp_sharded" not in _field_names(spec_class):
        if group.dcp_sharded is not None and scenario.engine.dcp > 1:
            raise Unsupported("this release has no dcp_sharded flag on its KV cache specs")
        return {}
    if group.dcp_sharded is not None:
        return {"dcp_sharded": group.dcp_sharded}
    # Without DCP the flag has no meaning; the spec's own default keeps equal specs equal.
    return {"dcp_sharded": isinstance(group, FULL_LIKE)} if scenario.engine.dcp > 1 else {}


def _draft_fields(group: AnyGroup, spec_class: type) -> dict[str, Any]:
    return {"is_draft": True} if group.draft and "is_draft" in _field_names(spec_class) else {}


def _mamba_spec(group: Mamba, scenario: Scenario) -> kv.MambaSpec:
    fields: dict[str, Any] = {
        "block_size": group.block,
        "shapes": ((group.heads, group.head_size),),
        "dtypes": (_TORCH_DTYPES[group.dtype],),
        "mamba_cache_mode": group.mode,
        "num_speculative_blocks": group.speculative_blocks,
        "num_prefill_checkpoint_blocks": group.checkpoint_blocks,
        **_draft_fields(group, kv.MambaSpec),
    }
    if group.checkpoint_blocks and "prefill_checkpoint_alignment" in _field_names(kv.MambaSpec):
        # A backend that can export a state anywhere.
        fields["prefill_checkpoint_alignment"] = group.checkpoint_alignment
    if group.dcp_sharded is not None and "dcp_sharded" in _field_names(kv.MambaSpec):
        fields["dcp_sharded"] = group.dcp_sharded
    return kv.MambaSpec(**fields)

"""From what the probe saw of an engine to our own words for it: engine settings, KV cache groups, connector."""

from __future__ import annotations

from typing import Any, NamedTuple

from diff_tests.live.trace import Connector as TracedConnector
from diff_tests.live.trace import ConnectorRecord, Settings, Spec, StartRecord
from diff_tests.live.trace import Group as TracedGroup
from sim.releases import NEWEST, RELEASES, Rules
from sim.scenario import (
    MLA,
    RSWA,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Connector,
    Cross,
    Engine,
    Full,
    Mamba,
    SlidingWindow,
    SlidingWindowMLA,
    Speculative,
)

# vLLM's spec classes, a subclass before its base. A class we do not know is taken for the nearest one we do.
_KINDS: dict[str, type[AnyGroup]] = {
    "CrossAttentionSpec": Cross,
    "CircularBufferSpec": Circular,
    "RSWASpec": RSWA,
    "SlidingWindowMLASpec": SlidingWindowMLA,
    "SlidingWindowSpec": SlidingWindow,
    "ChunkedLocalAttentionSpec": ChunkedLocal,
    "MLAAttentionSpec": MLA,
    "FullAttentionSpec": Full,
    "MambaSpec": Mamba,
}
# Subclasses that are allocated otherwise than the class they derive from.
_NOT_MODELLED = ("SinkFullAttentionSpec", "HiSparseHotSpec", "HiSparseResidentSpec")
_SAME_AS_BASE = ("HiddenStateCacheSpec",)

# Methods that a block table cannot tell apart: without layers of their own, with a model beside, on the model's states.
_METHODS = {
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "ngram",
    "draft_model": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle",
}


class GeometryError(ValueError):
    """An engine that cannot be, whatever recorded it."""


class Geometry(NamedTuple):
    """An engine in our words. gaps: what the model does not know of it, each a clause; then only the laws judge."""

    rules: Rules
    engine: Engine
    groups: tuple[AnyGroup, ...]
    connector: Connector
    gaps: list[str]


def rules_for(version: str) -> Rules | None:
    """The rules of a release, whatever build of it; None for a vLLM that we have no rules for."""
    return RELEASES.get(version.partition("+")[0])


def geometry_of(start: StartRecord, num_blocks: int, rows_per_block: dict[str, int]) -> Geometry:
    """rows_per_block: kernel rows in a manager block, by layer, as far as a worker has told. Raises GeometryError."""
    gaps: list[str] = []
    rules = rules_for(start.vllm)
    if rules is None:
        gaps.append(f"no rules for vLLM {start.vllm}")
        rules = RELEASES[NEWEST]
    settings = start.engine
    if (settings.pipeline_parallel_size or 1) > 1:
        gaps.append("pipeline parallelism is not modelled")
    if (settings.prefill_context_parallel_size or 1) > 1:
        gaps.append("prefill context parallelism is not modelled")
    groups = tuple(_group(group, start, rows_per_block, gaps) for group in start.groups)
    return Geometry(rules, _engine(start, num_blocks, gaps), groups, connector_of(start.connector), gaps)


def _engine(start: StartRecord, num_blocks: int, gaps: list[str]) -> Engine:
    settings = start.engine
    # What a release does not say is as vLLM has it by default.
    fields = {
        "prefix_caching": settings.enable_prefix_caching,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_scheduled_tokens or settings.max_num_batched_tokens,
        "chunked_prefill": settings.enable_chunked_prefill,
        "long_prefill_token_threshold": settings.long_prefill_token_threshold,
        "long_prefill_adaptive": settings.long_prefill_token_threshold_adaptive,
        "prefill_schedule_interval": settings.prefill_schedule_interval,
        "policy": settings.policy,
        "async_scheduling": settings.async_scheduling,
        "dcp": settings.decode_context_parallel_size,
        "prefix_match_unit": settings.prefix_match_unit,
        "watermark": settings.watermark,
        "reserve_full_isl": settings.scheduler_reserve_full_isl,
    }
    if settings.policy not in (None, "fcfs", "priority"):
        gaps.append(f"the policy {settings.policy} is not modelled")
    told: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return Engine(
        blocks=num_blocks,
        retention_interval=start.retention_interval,
        speculative=_speculative(settings, gaps),
        **told,
    )


def _speculative(settings: Settings, gaps: list[str]) -> Speculative | None:
    if not settings.num_speculative_tokens:
        return None
    method = str(settings.method)
    kind = _METHODS.get(method, "eagle" if method.endswith("mtp") else None)
    if kind is None:
        gaps.append(f"speculation by {method} is not modelled")
    if settings.num_speculative_tokens_per_batch_size:
        gaps.append("drafts whose number depends on the batch are not modelled")
    if settings.disable_eagle_block_drop:
        gaps.append("EAGLE that keeps the last block of a hit is not modelled")
    method = kind or "ngram"
    return Speculative(method=method, tokens=settings.num_speculative_tokens)  # type: ignore[arg-type]  # one of three


def connector_of(about: TracedConnector | ConnectorRecord) -> Connector:
    """Settings that are digests say nothing to us."""
    extra = {k: v for k, v in about.extra.items() if isinstance(v, (bool, int, float))}
    return Connector(name=about.name, extra=extra)


def _group(group: TracedGroup, start: StartRecord, rows_per_block: dict[str, int], gaps: list[str]) -> AnyGroup:
    spec = (group.spec.specs or [group.spec])[0]  # a wrapper of equal specs behaves as its first
    known = next((kind for kind in (spec.kind, *spec.bases) if kind in _KINDS), None)
    if known is None or spec.kind in _NOT_MODELLED:
        gaps.append(f"groups of {spec.kind} are not modelled")
    elif known != spec.kind and spec.kind not in _SAME_AS_BASE:
        gaps.append(f"{spec.kind} is taken for {known}")
    kind = _KINDS[known or "FullAttentionSpec"]
    if kind is Cross:
        gaps.append("cross attention is not modelled")
    if spec.extra_retained_tokens:
        gaps.append("windows that keep more than their width are not modelled")
    return kind(**_common_fields(group, spec, start, rows_per_block, gaps), **_own_fields(kind, spec, gaps))


def _common_fields(
    group: TracedGroup, spec: Spec, start: StartRecord, rows_per_block: dict[str, int], gaps: list[str]
) -> dict[str, Any]:
    block = _needed(spec.block_size, spec, "block_size")
    fields: dict[str, Any] = {"block": block, "dtype": _dtype(spec, start, gaps)}
    rows = max((rows_per_block.get(layer, 1) for layer in group.layers), default=1)
    if rows > 1 and block % rows == 0:
        fields["kernel_block"] = block // rows  # divides evenly
    if (start.engine.decode_context_parallel_size or 1) > 1 and spec.dcp_sharded is not None:
        fields["dcp_sharded"] = spec.dcp_sharded
    if group.eagle or spec.is_draft:
        fields["draft"] = True
    return fields


def _own_fields(kind: type[AnyGroup], spec: Spec, gaps: list[str]) -> dict[str, Any]:
    if kind in (SlidingWindow, SlidingWindowMLA):
        own = {"window": _needed(spec.sliding_window, spec, "sliding_window")}
        return {**own, "bounded_replay": True} if spec.bounded_replay else own
    if kind is RSWA:
        return {"window": _needed(spec.rswa_window, spec, "rswa_window")}
    if kind is ChunkedLocal:
        return {"chunk": _needed(spec.attention_chunk_size, spec, "attention_chunk_size")}
    if kind is Mamba:
        mode = spec.mamba_cache_mode or "none"
        if mode not in ("none", "align", "all"):
            gaps.append(f"Mamba cache mode {mode} is not modelled")
        return {
            "mode": mode,
            "speculative_blocks": spec.num_speculative_blocks or 0,
            "checkpoint_blocks": spec.num_prefill_checkpoint_blocks or 0,
            "checkpoint_alignment": spec.prefill_checkpoint_alignment,
        }
    return {}


def _needed(value: int | None, spec: Spec, name: str) -> int:
    if value is None:
        raise GeometryError(f"a group of {spec.kind} without {name}")
    return value


def _dtype(spec: Spec, start: StartRecord, gaps: list[str]) -> str:
    """The dtype that the blocks' values have. Plain bytes are fp8 where the spec says so."""
    name = (spec.dtype or (spec.dtypes or ["torch.bfloat16"])[0]).removeprefix("torch.")
    if name in ("bfloat16", "float16", "float32"):
        return name
    if "FP8" in (spec.kv_quant_mode or "") or name.startswith("float8"):
        cache_dtype = spec.cache_dtype_str or start.engine.cache_dtype or ""
        return "fp8_e5m2" if "e5m2" in cache_dtype or "e5m2" in name else "fp8_e4m3"
    if spec.mamba_cache_mode is not None:
        return "bfloat16"  # pages of states are raw bytes whatever their elements are
    gaps.append(f"elements of {name} are taken for bfloat16")
    return "bfloat16"

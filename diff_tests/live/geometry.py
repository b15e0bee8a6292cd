"""From what the probe saw of an engine to our own words for it: engine settings, KV cache groups, connector."""

from __future__ import annotations

from typing import Any, NamedTuple

from diff_tests.live.trace import Connector as TracedConnector
from diff_tests.live.trace import ConnectorRecord, StartRecord
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
    """rows_per_block: kernel rows in a manager block, by layer, as far as a worker has told."""
    gaps: list[str] = []
    rules = rules_for(start.vllm)
    if rules is None:
        gaps.append(f"no rules for vLLM {start.vllm}")
        rules = RELEASES[NEWEST]
    settings = start.engine
    if (settings.get("pipeline_parallel_size") or 1) > 1:
        gaps.append("pipeline parallelism is not modelled")
    if (settings.get("prefill_context_parallel_size") or 1) > 1:
        gaps.append("prefill context parallelism is not modelled")
    groups = tuple(_group(group, start, rows_per_block, gaps) for group in start.groups)
    return Geometry(rules, _engine(start, num_blocks, gaps), groups, connector_of(start.connector), gaps)


def _engine(start: StartRecord, num_blocks: int, gaps: list[str]) -> Engine:
    settings = start.engine

    def given(name: str, default: Any) -> Any:
        value = settings.get(name)
        return default if value is None else value

    budget = given("max_num_scheduled_tokens", given("max_num_batched_tokens", 8192))
    return Engine(
        blocks=num_blocks,
        prefix_caching=bool(given("enable_prefix_caching", True)),
        max_model_len=given("max_model_len", 4096),
        max_num_seqs=given("max_num_seqs", 16),
        max_num_batched_tokens=budget,
        chunked_prefill=bool(given("enable_chunked_prefill", True)),
        long_prefill_token_threshold=given("long_prefill_token_threshold", 0),
        long_prefill_adaptive=bool(given("long_prefill_token_threshold_adaptive", False)),
        prefill_schedule_interval=given("prefill_schedule_interval", 1),
        policy=given("policy", "fcfs"),
        async_scheduling=bool(given("async_scheduling", False)),
        dcp=given("decode_context_parallel_size", 1),
        retention_interval=start.retention_interval,
        prefix_match_unit=settings.get("prefix_match_unit"),
        watermark=float(given("watermark", 0.0)),
        reserve_full_isl=bool(given("scheduler_reserve_full_isl", True)),
        speculative=_speculative(settings, gaps),
    )


def _speculative(settings: dict[str, Any], gaps: list[str]) -> Speculative | None:
    num_tokens = settings.get("num_speculative_tokens")
    if not num_tokens:
        return None
    method = str(settings.get("method"))
    kind = _METHODS.get(method, "eagle" if method.endswith("mtp") else None)
    if kind is None:
        gaps.append(f"speculation by {method} is not modelled")
    if settings.get("num_speculative_tokens_per_batch_size"):
        gaps.append("drafts whose number depends on the batch are not modelled")
    if settings.get("disable_eagle_block_drop"):
        gaps.append("EAGLE that keeps the last block of a hit is not modelled")
    return Speculative(method=kind or "ngram", tokens=num_tokens)  # type: ignore[arg-type]  # one of three


def connector_of(about: TracedConnector | ConnectorRecord) -> Connector:
    """Settings that are digests say nothing to us."""
    extra = {k: v for k, v in about.extra.items() if isinstance(v, (bool, int, float))}
    return Connector(name=about.name, extra=extra)


def _group(group: TracedGroup, start: StartRecord, rows_per_block: dict[str, int], gaps: list[str]) -> AnyGroup:
    spec = group.spec.get("specs", [group.spec])[0]  # a wrapper of equal specs behaves as its first
    name, bases = str(spec.get("class")), [str(base) for base in spec.get("bases", [])]
    known = next((kind for kind in (name, *bases) if kind in _KINDS), None)
    if known is None or name in _NOT_MODELLED:
        gaps.append(f"groups of {name} are not modelled")
    elif known != name and name not in _SAME_AS_BASE:
        gaps.append(f"{name} is taken for {known}")
    kind = _KINDS[known or "FullAttentionSpec"]
    if kind is Cross:
        gaps.append("cross attention is not modelled")
    if spec.get("extra_retained_tokens"):
        gaps.append("windows that keep more than their width are not modelled")
    return kind(**_common_fields(group, spec, start, rows_per_block, gaps), **_own_fields(kind, spec))


def _common_fields(
    group: TracedGroup, spec: dict[str, Any], start: StartRecord, rows_per_block: dict[str, int], gaps: list[str]
) -> dict[str, Any]:
    block = int(spec["block_size"])
    fields: dict[str, Any] = {"block": block, "dtype": _dtype(spec, start, gaps)}
    rows = max((rows_per_block.get(layer, 1) for layer in group.layers), default=1)
    if rows > 1 and block % rows == 0:
        fields["kernel_block"] = block // rows  # divides evenly
    if (start.engine.get("decode_context_parallel_size") or 1) > 1 and "dcp_sharded" in spec:
        fields["dcp_sharded"] = bool(spec["dcp_sharded"])
    if group.eagle or spec.get("is_draft"):
        fields["draft"] = True
    return fields


def _own_fields(kind: type[AnyGroup], spec: dict[str, Any]) -> dict[str, Any]:
    if kind in (SlidingWindow, SlidingWindowMLA):
        own = {"window": spec["sliding_window"]}
        return {**own, "bounded_replay": True} if spec.get("bounded_replay") else own
    if kind is RSWA:
        return {"window": spec["rswa_window"]}
    if kind is ChunkedLocal:
        return {"chunk": spec["attention_chunk_size"]}
    if kind is Mamba:
        return {
            "mode": spec.get("mamba_cache_mode") or "none",
            "speculative_blocks": spec.get("num_speculative_blocks") or 0,
            "checkpoint_blocks": spec.get("num_prefill_checkpoint_blocks") or 0,
            "checkpoint_alignment": spec.get("prefill_checkpoint_alignment"),
        }
    return {}


def _dtype(spec: dict[str, Any], start: StartRecord, gaps: list[str]) -> str:
    """The dtype that the blocks' values have. Plain bytes are fp8 where the spec says so."""
    name = str(spec.get("dtype") or (spec.get("dtypes") or ["torch.bfloat16"])[0]).removeprefix("torch.")
    if name in ("bfloat16", "float16", "float32"):
        return name
    if "FP8" in str(spec.get("kv_quant_mode", "")) or name.startswith("float8"):
        cache_dtype = str(spec.get("cache_dtype_str") or start.engine.get("cache_dtype"))
        return "fp8_e5m2" if "e5m2" in cache_dtype or "e5m2" in name else "fp8_e4m3"
    if spec.get("mamba_cache_mode") is not None:
        return "bfloat16"  # pages of states are raw bytes whatever their elements are
    gaps.append(f"elements of {name} are taken for bfloat16")
    return "bfloat16"

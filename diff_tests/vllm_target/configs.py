"""From a scenario to vLLM's own configuration objects, on every release.

The engine core's start-up code does the work, with a stand-in for the workers: it resolves the layout, plans the KV
cache and settles block sizes exactly as a real engine of that release. Two things are ours: the groups come from the
scenario instead of a model, and the check for a minimal pool is off (smaller pools are valid scenarios).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import vllm.v1.engine.core as engine_core_module
from msgspec.structs import replace
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from diff_tests.vllm_target import scripted
from diff_tests.vllm_target.releases import cache_root
from diff_tests.vllm_target.specs import FP8, Unsupported, group_spec, layer_names, layer_specs
from sim.scenario import MLA, Mamba, Scenario

# Where the planner lives: a module of its own since 0.33.
try:
    planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
except ModuleNotFoundError:
    planning = kv_cache_utils

# More than any scenario asks for: positions are never the limit.
_MAX_POSITIONS = 1 << 30
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    # 64 heads divide by any tensor parallel size we use; one KV head, because decode context parallelism wants
    # more ranks than KV heads.
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": _MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
}
# Backends prefer layers outermost. Pages of different sizes fit only side by side within a block, and a backend of such
# a model declares that.
_LAYER_OUTER = ["LBNHC", "LBHNC"]
_BLOCK_OUTER = ["BLHNC"]


@dataclasses.dataclass
class EngineSetup:
    """What a real engine core holds before it builds its scheduler. Block sizes in tokens."""

    vllm_config: VllmConfig
    scheduler_config: kv.KVCacheConfig
    worker_config: kv.KVCacheConfig
    scheduler_block_size: int
    hash_block_size: int


def warm_up() -> None:
    """Builds the model that most scenarios share: the first one of a process has vLLM inspect its architecture.

    Also saves vLLM two kinds of work that make up a fifth of configuring it, and on which nothing depends: measuring the
    same few dtypes over and over, and copying specs, which are immutable.
    """
    _base_model("bfloat16")
    interface: Any = kv
    interface.get_dtype_size = functools.cache(interface.get_dtype_size)
    interface.KVCacheSpec.__deepcopy__ = lambda spec, memo: spec


def build(scenario: Scenario) -> EngineSetup:
    """Configures an engine for the scenario. Raises whatever vLLM raises on a configuration that it refuses."""
    vllm_config = _vllm_config(scenario)
    executor = _Executor(scenario)
    with _pool_check(enabled=False), _groups_from(scenario):
        scheduler_config = _start_engine(vllm_config, executor)
    scheduler_block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduler_config, vllm_config)
    return EngineSetup(vllm_config, scheduler_config, executor.worker_config(), scheduler_block_size, hash_block_size)


def smallest_pool(scenario: Scenario) -> int:
    """The smallest pool, in blocks with the null block, that vLLM's start-up check admits. Raises if none is."""

    # The check compares bytes with the need of one request of maximum length; doubling and halving find its edge.
    def admits(num_blocks: int) -> bool:
        sized = _with_blocks(scenario, num_blocks)
        vllm_config = _vllm_config(sized)
        with _pool_check(enabled=True), _groups_from(sized):
            try:
                _start_engine(vllm_config, _Executor(sized))
            except _PoolTooSmall:
                return False
        return True

    low, high = 1, 2
    while not admits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2  # floor: between low, refused, and high, admitted
        low, high = (low, middle) if admits(middle) else (middle, high)
    return high


def _with_blocks(scenario: Scenario, num_blocks: int) -> Scenario:
    return replace(scenario, engine=replace(scenario.engine, blocks=num_blocks))


# ------------------------------------------------------------------------------------------------------------ the engine


class _PoolTooSmall(Exception):
    """vLLM's start-up check said no."""


class _Executor:
    """Stands in for the workers while the engine core starts: it reports the scenario's layers, keeps their config."""

    def __init__(self, scenario: Scenario) -> None:
        self._specs = layer_specs(scenario)
        self._configs: list[kv.KVCacheConfig] = []

    def worker_config(self) -> kv.KVCacheConfig:
        return self._configs[0]

    def get_kv_cache_specs(self) -> list[dict[str, kv.KVCacheSpec]]:
        return [self._specs]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        page_sizes = {spec.page_size_bytes for spec in self._specs.values()}
        return [_LAYER_OUTER if len(page_sizes) == 1 else _BLOCK_OUTER]

    def determine_available_memory(self) -> list[int]:
        # Overridden by num_gpu_blocks_override; it must only be positive.
        return [1 << 50]

    def initialize_from_config(self, configs: list[kv.KVCacheConfig]) -> None:
        self._configs = configs

    def set_kv_cache_layout(self, *_: object) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass


# Below the tracing that vLLM wraps around it.
_start: Any = inspect.unwrap(engine_core_module.EngineCore._initialize_kv_caches)


class _Core:
    """The part of an engine core that its start-up code reads and writes."""

    def __init__(self, vllm_config: VllmConfig, executor: _Executor) -> None:
        self.vllm_config = vllm_config
        self.model_executor = executor
        self.available_gpu_memory_for_kv_cache = -1


def _start_engine(vllm_config: VllmConfig, executor: _Executor) -> kv.KVCacheConfig:
    config: kv.KVCacheConfig = _start(_Core(vllm_config, executor), vllm_config)
    return config


@contextmanager
def _pool_check(enabled: bool) -> Iterator[None]:
    """Turns vLLM's check for a minimal pool off, or makes its refusal tellable from other errors."""
    original = planning._check_enough_kv_cache_memory

    def off(*_: object) -> None:
        pass

    def telling(*args: Any) -> None:
        try:
            original(*args)
        except ValueError as error:
            raise _PoolTooSmall(str(error)) from error

    planning._check_enough_kv_cache_memory = telling if enabled else off
    try:
        yield
    finally:
        planning._check_enough_kv_cache_memory = original


@contextmanager
def _groups_from(scenario: Scenario) -> Iterator[None]:
    """Makes the planner take the scenario's groups, in order, instead of grouping the layers itself."""
    original = planning.get_kv_cache_groups

    def groups(_: VllmConfig, specs: dict[str, kv.KVCacheSpec]) -> list[kv.KVCacheGroupSpec]:
        return [
            kv.KVCacheGroupSpec(names, group_spec(group, names, specs), is_eagle_group=group.draft)
            for group, names in zip(scenario.groups, layer_names(scenario), strict=True)
        ]

    planning.get_kv_cache_groups = groups
    try:
        yield
    finally:
        planning.get_kv_cache_groups = original


# ----------------------------------------------------------------------------------------------------------- the configs


@functools.cache
def _model_folder() -> str:
    folder = Path(cache_root(), "model")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_MODEL)
    config = folder / "config.json"
    if not config.exists() or config.read_text() != text:
        # Children of several releases share the folder: none may read a half-written file.
        partial = folder / f"config.json.{os.getpid()}"
        partial.write_text(text)
        partial.replace(config)
    return str(folder)


@functools.cache
def _base_model(dtype: Any) -> ModelConfig:
    return ModelConfig(
        model=_model_folder(),
        tokenizer=None,  # type: ignore[arg-type]  # none is needed, and vLLM takes it
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=_MAX_POSITIONS,
    )


def _vllm_config(scenario: Scenario) -> VllmConfig:
    """The scenario's engine settings. What is alike in many scenarios is built once, with vLLM's own checks, and copied:
    building it costs as much as running a small scenario."""
    engine = scenario.engine
    kv_transfer_config = _kv_transfer_config(scenario)
    template = _template(_Alike.of(scenario))
    vllm_config = copy.copy(template)
    vllm_config.kv_transfer_config = kv_transfer_config
    vllm_config.parallel_config = copy.copy(template.parallel_config)
    vllm_config.model_config = copy.copy(template.model_config)
    vllm_config.model_config.max_model_len = engine.max_model_len
    vllm_config.model_config.original_max_model_len = engine.max_model_len
    vllm_config.kv_events_config = _kv_events_config() if engine.kv_events else None
    if engine.speculative is not None:
        speculative_config: Any = copy.copy(template.speculative_config)
        speculative_config.num_speculative_tokens = engine.speculative.tokens
        vllm_config.speculative_config = speculative_config
    vllm_config.scheduler_config = _filled(template.scheduler_config, _scheduler_config(scenario), _SCHEDULER_FIELDS)
    vllm_config.scheduler_config.max_num_scheduled_tokens = None  # the template's budget was another
    vllm_config._set_max_num_scheduled_tokens()  # type: ignore[no-untyped-call]
    vllm_config.cache_config = _filled(template.cache_config, _cache_config(scenario), _CACHE_FIELDS)
    # Platform and model hooks rewrite these for the machine at hand; the scenario has the last word.
    vllm_config.cache_config.cache_dtype = _cache_dtype(scenario)
    vllm_config.cache_config.num_gpu_blocks_override = engine.blocks
    vllm_config.scheduler_config.disable_hybrid_kv_cache_manager = not _takes_groups(kv_transfer_config)
    return vllm_config


class _Alike(NamedTuple):
    """The settings on which vLLM bases other settings. Scenarios that agree in them share a template."""

    model_dtype: str
    dcp: int
    prefix_caching: bool
    chunked_prefill: bool
    async_scheduling: bool
    mamba_mode: Any
    connector: str | None
    speculative_method: str | None

    @classmethod
    def of(cls, scenario: Scenario) -> _Alike:
        engine = scenario.engine
        model_dtypes = [group.dtype for group in scenario.groups if group.dtype not in (*FP8, "packed")]
        return cls(
            model_dtype=model_dtypes[0] if model_dtypes else "bfloat16",
            dcp=engine.dcp,
            prefix_caching=engine.prefix_caching,
            chunked_prefill=engine.chunked_prefill,
            async_scheduling=engine.async_scheduling,
            mamba_mode=_mamba_mode(scenario),
            connector=scenario.connector.name if scenario.connector else None,
            speculative_method=engine.speculative.method if engine.speculative else None,
        )


@functools.lru_cache(maxsize=1024)
def _template(alike: _Alike) -> VllmConfig:
    model_config = _base_model(alike.model_dtype)
    return VllmConfig(
        model_config=model_config,
        scheduler_config=SchedulerConfig(
            max_model_len=_MAX_POSITIONS,
            max_num_batched_tokens=_MAX_POSITIONS,
            is_encoder_decoder=False,
            enable_chunked_prefill=alike.chunked_prefill,
            async_scheduling=alike.async_scheduling,
        ),
        cache_config=CacheConfig(
            enable_prefix_caching=alike.prefix_caching, cache_dtype="auto", mamba_cache_mode=alike.mamba_mode
        ),
        # As many ranks as decode context parallelism spreads a token's KV over; they exist on paper only.
        parallel_config=ParallelConfig(tensor_parallel_size=alike.dcp, decode_context_parallel_size=alike.dcp),
        device_config=DeviceConfig(device="cpu"),
        kv_transfer_config=_transfer_config(alike.connector, {}) if alike.connector else None,
        speculative_config=_speculative_config(alike, model_config),
    )


@functools.cache
def _kv_events_config() -> KVEventsConfig:
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def _filled(template: Any, fresh: Any, fields: tuple[str, ...]) -> Any:
    """The template with these fields of a config that has been checked on its own."""
    config = copy.copy(template)
    for field in fields:
        if hasattr(fresh, field):
            setattr(config, field, getattr(fresh, field))
    return config


_SCHEDULER_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "max_num_encoder_input_tokens",
    "encoder_cache_size",
    "policy",
    "async_scheduling",
    "watermark",
    "scheduler_reserve_full_isl",
    "prefill_schedule_interval",
    "long_prefill_token_threshold_adaptive",
)


def _scheduler_config(scenario: Scenario) -> SchedulerConfig:
    engine = scenario.engine
    return SchedulerConfig(
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=engine.chunked_prefill,
        long_prefill_token_threshold=engine.long_prefill_token_threshold,
        policy=engine.policy,
        async_scheduling=engine.async_scheduling,
        watermark=engine.watermark,
        scheduler_reserve_full_isl=engine.reserve_full_isl,
        prefill_schedule_interval=engine.prefill_schedule_interval,
        **_if_known(SchedulerConfig, long_prefill_token_threshold_adaptive=engine.long_prefill_adaptive),
    )


def _if_known(config_class: type, **settings: Any) -> dict[str, Any]:
    """The settings, less those at their default that this release's config does not have."""
    known = {field.name for field in dataclasses.fields(config_class)}
    return {name: value for name, value in settings.items() if value or name in known}


_CACHE_FIELDS = (
    "block_size",
    "enable_prefix_caching",
    "mamba_cache_mode",
    "prefix_cache_retention_interval",
    "prefix_match_unit",
)


def _cache_config(scenario: Scenario) -> CacheConfig:
    engine = scenario.engine
    return CacheConfig(
        block_size=min(group.block for group in scenario.groups),
        enable_prefix_caching=engine.prefix_caching,
        cache_dtype="auto",
        mamba_cache_mode=_mamba_mode(scenario),
        prefix_cache_retention_interval=engine.retention_interval,
        prefix_match_unit=engine.prefix_match_unit,
    )


def _mamba_mode(scenario: Scenario) -> Any:
    modes = {group.mode for group in scenario.groups if isinstance(group, Mamba)}
    if len(modes) > 1:
        raise Unsupported(f"one Mamba cache mode per engine, found {', '.join(sorted(modes))}")
    return modes.pop() if modes else "none"


def _cache_dtype(scenario: Scenario) -> Any:
    formats = {group.dtype for group in scenario.groups if group.dtype in FP8 and not isinstance(group, MLA)}
    if len(formats) > 1:
        raise Unsupported("one fp8 format per engine, except in MLA groups, which name their own")
    formats = formats or {group.dtype for group in scenario.groups if group.dtype in FP8}
    return min(formats) if formats else "auto"


def _kv_transfer_config(scenario: Scenario) -> KVTransferConfig | None:
    connector = scenario.connector
    if connector is None:
        return None
    extra = scripted.extra_config(scenario) if connector.name == scripted.NAME else connector.extra
    return _transfer_config(connector.name, extra, connector.load_failure)


def _transfer_config(connector: str, extra: dict[str, Any], load_failure: Any = "fail") -> KVTransferConfig:
    if connector == scripted.NAME:
        connector = scripted.CLASS
    module_path, _, name = connector.rpartition(":")
    return KVTransferConfig(
        kv_connector=name,
        kv_connector_module_path=module_path or None,
        kv_role="kv_both",
        kv_connector_extra_config=dict(extra),
        kv_load_failure_policy=load_failure,
    )


def _takes_groups(kv_transfer_config: KVTransferConfig | None) -> bool:
    """Whether the connector, if there is one, takes several KV cache groups; else an engine has one manager for all."""
    if kv_transfer_config is None:
        return True
    return supports_hma(KVConnectorFactory.get_connector_class(kv_transfer_config))


def _speculative_config(alike: _Alike, model_config: ModelConfig) -> SpeculativeConfig | None:
    if alike.speculative_method is None:
        return None
    config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=1,  # what follows from the number is set where the scenario is known
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=model_config,
        target_parallel_config=ParallelConfig(),
    )
    # The other methods want a draft model on disk; what the scheduler reads of them is this name.
    config.method = alike.speculative_method  # type: ignore[assignment]
    return config

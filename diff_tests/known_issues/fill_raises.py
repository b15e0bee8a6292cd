"""DecodeBenchConnector raises in the worker where its value does not fit the memory's own type.

A mean beyond the range of float16, or of the bytes that an fp8 cache is stored in, must be clamped and encoded, and drawn
values must be drawn in a type that can be drawn. Instead the engine's step fails.

Run it with the vLLM in question: `python fill_raises.py`. It fails where vLLM has the issue.
"""

from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorMetadata,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    KVQuantMode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 8
# (storage type, quantisation, cache dtype, options of the connector)
CASES: list[tuple[torch.dtype, KVQuantMode, Any, dict[str, float]]] = [
    (torch.float16, KVQuantMode.NONE, "auto", {"fill_mean": 1e6}),
    (torch.uint8, KVQuantMode.FP8_PER_TENSOR, "fp8_e4m3", {"fill_mean": -2.0}),
    (torch.uint8, KVQuantMode.FP8_PER_TENSOR, "fp8_e4m3", {"fill_std": 0.25}),
]


def fill(dtype: torch.dtype, quant_mode: KVQuantMode, cache_dtype: Any, options: dict[str, float]) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=dtype, kv_quant_mode=quant_mode)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=NUM_BLOCKS * page, layers=["layer"], layer_stride=NUM_BLOCKS * page, block_stride=page)
    config = KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config=dict(options)
    )
    vllm_config = VllmConfig(
        cache_config=CacheConfig(cache_dtype=cache_dtype),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    worker = DecodeBenchConnector(vllm_config, KVConnectorRole.WORKER, config)
    worker.register_kv_caches(allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [16]))
    worker.bind_connector_metadata(DecodeBenchConnectorMetadata(reqs_to_fill={"A": (([1],), 16)}))
    worker.start_load_kv(None)


def main() -> None:
    failures = []
    for case in CASES:
        try:
            fill(*case)
        except (RuntimeError, NotImplementedError) as error:
            failures.append(f"{case[2]} {case[3]}: {error}")
    assert not failures, "; ".join(failures)


if __name__ == "__main__":
    main()

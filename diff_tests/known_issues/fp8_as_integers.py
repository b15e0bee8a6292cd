"""DecodeBenchConnector writes the mean into an fp8 KV cache as if its bytes were integers.

An fp8 cache is stored as uint8. The mean, 0.5 here, must be encoded as fp8; the connector truncates it to the byte 0.

Run it with the vLLM in question: `python fp8_as_integers.py`. It fails where vLLM has the issue.
"""

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
MEAN = 0.5


def main() -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR
    )
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=NUM_BLOCKS * page, layers=["layer"], layer_stride=NUM_BLOCKS * page, block_stride=page)
    config = KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [16])
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config={"fill_mean": MEAN}
    )
    vllm_config = VllmConfig(
        cache_config=CacheConfig(cache_dtype="fp8_e4m3"),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )
    worker = DecodeBenchConnector(vllm_config, KVConnectorRole.WORKER, config)
    worker.register_kv_caches(caches)
    worker.bind_connector_metadata(DecodeBenchConnectorMetadata(reqs_to_fill={"A": (([1],), 16)}))
    worker.start_load_kv(None)

    numbers = caches["layer"][1].contiguous().view(torch.float8_e4m3fn).float()
    assert bool((numbers == MEAN).all()), f"block 1 holds {numbers.unique().tolist()} instead of {MEAN}"


if __name__ == "__main__":
    main()

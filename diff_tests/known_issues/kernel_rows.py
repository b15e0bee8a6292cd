"""DecodeBenchConnector takes block IDs for rows of kernel blocks.

A KV cache may be split into kernel blocks smaller than the manager's blocks: two rows of the layer's view a block here.
Told to fill block 1, rows 2 and 3, the connector fills row 1, which is half of block 0, the null block.

Run it with the vLLM in question: `python kernel_rows.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorMetadata,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 8


def main() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=NUM_BLOCKS * page, layers=["layer"], layer_stride=NUM_BLOCKS * page, block_stride=page)
    config = KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [8])
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config={"fill_mean": 1.0}
    )
    vllm_config = VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))
    worker = DecodeBenchConnector(vllm_config, KVConnectorRole.WORKER, config)
    worker.register_kv_caches(caches)
    worker.bind_connector_metadata(DecodeBenchConnectorMetadata(reqs_to_fill={"A": (([1],), 16)}))
    worker.start_load_kv(None)

    filled = (caches["layer"].flatten(1) == 1).all(dim=1).nonzero().flatten().tolist()
    assert filled == [2, 3], f"block 1 is rows [2, 3]; rows {filled} were filled"


if __name__ == "__main__":
    main()

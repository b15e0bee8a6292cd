"""DecodeBenchConnector writes the mean into pages of Mamba states as if their bytes were integers.

Such a page arrives as int8 and holds no plain numbers, so that only zero is safe. With a mean of 3.5 the connector
writes bytes of value 3 all over the state.

Run it with the vLLM in question: `python state_as_integers.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import (
    DecodeBenchConnector,
    DecodeBenchConnectorMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 8


def main() -> None:
    spec = MambaSpec(block_size=64, shapes=((1, 32),), dtypes=(torch.bfloat16,))
    page = spec.page_size_bytes
    tensor = KVCacheTensor(size=NUM_BLOCKS * page, layers=["layer"], layer_stride=NUM_BLOCKS * page, block_stride=page)
    config = KVCacheConfig(NUM_BLOCKS, [tensor], [KVCacheGroupSpec(["layer"], spec)])
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBNHC, [64])
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config={"fill_mean": 3.5}
    )
    vllm_config = VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))
    worker = DecodeBenchConnector(vllm_config, KVConnectorRole.WORKER, config)
    worker.register_kv_caches(caches)
    worker.bind_connector_metadata(DecodeBenchConnectorMetadata(reqs_to_fill={"A": (([1],), 16)}))
    worker.start_load_kv(None)

    page_bytes = caches["layer"][1].unique().tolist()
    assert page_bytes == [0], f"the state holds bytes {page_bytes} instead of zeros"


if __name__ == "__main__":
    main()

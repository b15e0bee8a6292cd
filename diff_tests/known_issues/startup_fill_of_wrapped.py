"""The start-up fill of DecodeBenchConnector covers a group that is filled request by request, too.

Where the engine zeroes new blocks, attention groups are left out of the start-up fill. The worker asks the group's spec
whether it is one of attention. A wrapper around several specs of layers is none, so the worker fills the group's whole
memory, with it the states that share the pages. The scheduler's side sees the specs without their wrapper and selects
the group's blocks for every request.

Run it with the vLLM in question: `python startup_fill_of_wrapped.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.config import DeviceConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 8


def main() -> None:
    heads = {"one": 1, "two": 2}
    layers = {
        name: FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=n, head_size=32, dtype=torch.bfloat16)
        for name, n in heads.items()
    }
    wrapper = UniformTypeKVCacheSpecs.from_specs(layers)
    assert wrapper is not None
    mamba = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,))
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["mamba"], mamba), KVCacheGroupSpec(list(layers), wrapper)])
    if not config.needs_kv_cache_zeroing:
        return
    transfer = KVTransferConfig(
        kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_connector_extra_config={"startup_fill": True}
    )
    vllm_config = VllmConfig(kv_transfer_config=transfer, device_config=DeviceConfig("cpu"))
    worker = DecodeBenchConnector(vllm_config, KVConnectorRole.WORKER, config)
    caches = {
        name: torch.zeros(NUM_BLOCKS, n, BLOCK_SIZE, 64, dtype=torch.bfloat16)  # keys and values
        for name, n in heads.items()
    }
    worker.register_kv_caches({"mamba": torch.zeros(NUM_BLOCKS, 1, 1, 64, dtype=torch.int8), **caches})
    filled = [name for name, cache in caches.items() if cache.any()]
    assert not filled, f"layers {filled} were filled at start, though the engine zeroes their blocks before each use"


if __name__ == "__main__":
    main()

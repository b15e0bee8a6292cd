"""A hit that ends inside a block gets a copy of it from before the block is computed.

Blocks get their keys when they are allocated: whoever is scheduled later in the same step may read them, as the worker
writes all of a layer's keys and values before it attends. A request that finds a state only before the end of such a block
hits a part of it. That part is copied, and the worker makes all copies before its forward pass
(`GPUModelRunner._update_states`), so the copy has what the block held before. States are spared: who hits one of the same
step has to wait.

Run it with the vLLM in question: `python copied_before_computed.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_BLOCKS = 12


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )


def main() -> None:
    init_none_hash(sha256)
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    mamba = MambaSpec(block_size=2, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    manager = KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["mamba"], mamba)]),
        max_model_len=64,
        scheduler_block_size=4,
        hash_block_size=1,
    )
    # A leaves the state after two tokens in the prefix cache.
    manager.new_step_starts()
    first = request("A", [1, 2, 9])
    assert manager.allocate_slots(first, 2) is not None
    first.num_computed_tokens = 2
    manager.free(first)

    manager.new_step_starts()
    second = request("B", [1, 2, 3, 4, 5, 6, 7])
    assert manager.allocate_slots(second, 6) is not None
    computed = manager.get_block_ids("B")[0]

    third = request("C", [1, 2, 3, 4, 8])
    blocks, num_hit_tokens, *_ = manager.get_computed_blocks(third)
    assert manager.allocate_slots(third, 1, num_hit_tokens, blocks) is not None
    copies, _ = manager.take_kv_cache_block_copies()
    early = [copy for copy in copies if copy.src_block_id in computed]
    assert not early, (
        f"C hits {num_hit_tokens} tokens in a copy that is made before B's blocks {computed} are computed: {early}"
    )


if __name__ == "__main__":
    main()

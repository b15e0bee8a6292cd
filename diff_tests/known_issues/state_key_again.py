"""The key of a prompt's last state is given once more, to a block whose state has gone on.

The state after a prompt of 5 tokens lies inside a block. It is cached there, and in the next step a copy takes over the key
while the request goes on in its own block. With asynchronous scheduling the output of the prompt is not known yet in that
step, so the request still has 5 tokens, and the same key is linked to the request's own block as well, whose state is then
the one after 6 tokens. Once the copy is evicted, requests with the same prompt resume from the wrong state.

Run it with the vLLM in question: `python state_key_again.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 2
NUM_BLOCKS = 12


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )


def compute(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    manager.new_step_starts()
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens


def main() -> None:
    init_none_hash(sha256)
    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    mamba = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    manager = KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["mamba"], mamba)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=1,
    )
    first = request("A", [1, 2, 3, 4, 5])
    compute(manager, first, 4)
    compute(manager, first, 1)  # the state after 5 tokens
    compute(manager, first, 1)  # the next token, not known yet: the state after 6
    _, retained = manager.take_kv_cache_block_copies()
    manager.block_pool.free_blocks(retained)  # the copy has been made
    own_blocks = manager.get_block_ids("A")[1]

    # Somebody else takes all free blocks, the copy of the state after 5 tokens among them.
    num_free = manager.block_pool.get_num_free_blocks()
    manager.block_pool.get_new_blocks(num_free)

    blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request("B", [1, 2, 3, 4, 5, 6]))
    if num_hit_tokens == 5:
        (state,) = [block.block_id for block in blocks.blocks[1] if not block.is_null]
        assert state not in own_blocks, f"resumes from block {state} after 5 tokens, where A keeps its state after 6"


if __name__ == "__main__":
    main()

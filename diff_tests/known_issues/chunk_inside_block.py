"""A lookup counts tokens as found that the next token attends to, though nothing is cached.

Tokens attend within chunks of 6, in blocks of 4. For a prompt of 11 tokens the chunk of the last one begins at token 6, and
the blocks before it count as found without being looked up. Token 6 lies inside block 1, so that is block 0: 4 tokens count
as computed. But the token at 4, which is computed next, is in the chunk of tokens [0, 6) and attends to the first four.

Run it with the vLLM in question: `python chunk_inside_block.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_SIZE = 4
CHUNK_SIZE = 6


def main() -> None:
    init_none_hash(sha256)
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, attention_chunk_size=CHUNK_SIZE
    )
    manager = KVCacheManager(
        KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    request = Request(
        request_id="A",
        prompt_token_ids=list(range(11)),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    _, num_computed_tokens, *_ = manager.get_computed_blocks(request)
    # The next token's chunk begins here; what lies before is not needed any more.
    chunk_start = num_computed_tokens // CHUNK_SIZE * CHUNK_SIZE
    assert chunk_start >= num_computed_tokens, (
        f"nothing is cached, yet {num_computed_tokens} tokens count as computed; the next one attends to tokens "
        f"[{chunk_start}, {num_computed_tokens})"
    )


if __name__ == "__main__":
    main()

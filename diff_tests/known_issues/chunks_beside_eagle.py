"""Chunked local attention beside EAGLE is accepted at start, and the first request ends the engine.

A configuration that cannot be served is to be refused when the engine starts. The manager takes this one, and asserts
that it is not so at its first lookup.

Run it with the vLLM in question: `python chunks_beside_eagle.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

BLOCK_SIZE = 4


def make_manager(use_eagle: bool) -> KVCacheManager:
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, attention_chunk_size=8
    )
    return KVCacheManager(
        KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        use_eagle=use_eagle,
    )


def main() -> None:
    init_none_hash(sha256)
    request = Request(
        request_id="A",
        prompt_token_ids=[1, 2, 3, 4, 5],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    make_manager(use_eagle=False).get_computed_blocks(request)
    try:
        manager = make_manager(use_eagle=True)
    except (ValueError, NotImplementedError, AssertionError):
        return  # refused in time
    try:
        manager.get_computed_blocks(request)
    except AssertionError as error:
        raise AssertionError(f"accepted at start, and then: {error}") from error


if __name__ == "__main__":
    main()

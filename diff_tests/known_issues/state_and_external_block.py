"""A Mamba group in mode `align` takes two blocks for an admission for which it counted one.

An admission with tokens from a KV connector takes a block for the state after those tokens, and another one for the
tokens that are computed behind them. The estimate of a first step is capped at one block, as if nothing came from outside.
So with one block free `allocate_slots` raises instead of saying that the request does not fit now.

Run it with the vLLM in question: `python state_and_external_block.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 16


def request(name: str, first_token: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first_token, first_token + 17)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def admit(manager: KVCacheManager, newcomer: Request) -> list[int] | None:
    """16 tokens come from the connector, the 17th is computed. Returns the request's blocks, None if they do not fit."""
    if manager.allocate_slots(newcomer, 1, num_external_computed_tokens=16) is None:
        return None
    return manager.get_block_ids(newcomer.request_id)[0]


def main() -> None:
    init_none_hash(sha256)
    spec = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    manager = KVCacheManager(
        KVCacheConfig(4, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    # Block 0 is the null block, so three are free. A takes two: the state after 16 tokens, and the one after 17.
    assert admit(manager, request("A", 0)) == [1, 2]
    # B needs two as well, and one is left.
    try:
        blocks = admit(manager, request("B", 100))
    except ValueError as error:
        raise AssertionError(f"no room for B is answered with an exception: {error}") from error
    assert blocks is None, "B cannot fit"


if __name__ == "__main__":
    main()

"""A checkpoint at a block's end gets the block's key, and the block is asserted to have none when its turn comes.

Beside a group with larger blocks, keys of whole blocks are given only up to the last token that is a multiple of all block
sizes. A checkpoint's key is not held back: here the block of the first 2 tokens has its key when 4 tokens are computed. At
token 6 all whole blocks are keyed; with asynchronous scheduling the first one is still held, and an assertion fails.

Run it with the vLLM in question: `python checkpoint_keyed_twice.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 2
LARGER_BLOCK_SIZE = 6


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 2} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
    )
    mamba = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        **alignment,
    )
    full = FullAttentionSpec(block_size=LARGER_BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return KVCacheManager(
        KVCacheConfig(16, [], [KVCacheGroupSpec(["full"], full), KVCacheGroupSpec(["mamba"], mamba)]),
        max_model_len=64,
        scheduler_block_size=LARGER_BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def main() -> None:
    init_none_hash(sha256)
    manager = make_manager()
    request = Request(
        request_id="A",
        prompt_token_ids=list(range(6)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    manager.new_step_starts()
    assert manager.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 4
    request.num_in_flight_tokens = 4  # their output has not arrived, so that no block is released yet
    manager.new_step_starts()
    try:
        manager.allocate_slots(request, 2)
    except AssertionError as error:
        raise AssertionError("the block of the checkpoint after 2 tokens was to get its key a second time") from error


if __name__ == "__main__":
    main()

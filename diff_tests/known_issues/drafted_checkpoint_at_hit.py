"""A step of drafts keys a checkpoint that nothing writes, where a hit would end.

Where a step is to leave a checkpoint is derived from all its tokens, drafts included, rounded down to where a hit may
end: here the second step covers the tokens [1, 4), two drafts among them, a hit ends at an even token, and the checkpoint
is the one after 2 tokens, all that are known. Workers write checkpoints in a prefill only. The block beside the one for
the last state has the key and no state, and will get that of a draft.

Run it with the vLLM in question: `python drafted_checkpoint_at_hit.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_BLOCKS = 16
LARGER_BLOCK_SIZE = 2
NUM_DRAFTS = 2


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 1} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
    )
    mamba = MambaSpec(
        block_size=1,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
        num_prefill_checkpoint_blocks=1,
        **alignment,
    )
    full = FullAttentionSpec(block_size=LARGER_BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["mamba"], mamba), KVCacheGroupSpec(["full"], full)]),
        max_model_len=64,
        scheduler_block_size=LARGER_BLOCK_SIZE,
        hash_block_size=1,
    )


def main() -> None:
    init_none_hash(sha256)
    manager = make_manager()
    request = Request(
        request_id="A",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )
    manager.new_step_starts()
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens = 1
    request.append_output_token_ids(2)
    manager.new_step_starts()
    try:
        blocks = manager.allocate_slots(request, 1 + NUM_DRAFTS)
    except AssertionError:
        return  # before 0.32 the position is not rounded to where hits end: see checkpoint_without_key.py
    assert blocks is not None
    beside_last = manager.get_blocks("A").blocks[0][2]
    assert beside_last.block_hash is None, (
        f"block {beside_last.block_id} has the key of {beside_last.block_hash_num_tokens} tokens, and no state"
    )


if __name__ == "__main__":
    main()

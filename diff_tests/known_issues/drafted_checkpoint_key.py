"""A step of drafts keys a checkpoint that nothing writes.

Where a step is to leave a checkpoint is derived from all its tokens, drafts included. With EAGLE, which drops the last
block of a hit, that may be behind a token that is known: here the second step covers the tokens [1, 4), two drafts among
them, and the checkpoint is the one after 2 tokens. Workers write checkpoints in a prefill only. The block beside the one
for the last state has the key and no state, and will get that of a draft.

Run it with the vLLM in question: `python drafted_checkpoint_key.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_BLOCKS = 7
NUM_DRAFTS = 2


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 1} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
    )
    spec = MambaSpec(
        block_size=1,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
        num_prefill_checkpoint_blocks=1,
        **alignment,
    )
    return KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)], prefix_cache_retention_interval=0),
        max_model_len=64,
        scheduler_block_size=1,
        hash_block_size=1,
        use_eagle=True,
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
    assert manager.allocate_slots(request, 1 + NUM_DRAFTS) is not None
    beside_last = manager.get_blocks("A").blocks[0][2]
    assert beside_last.block_hash is None, (
        f"block {beside_last.block_id} has the key of {beside_last.block_hash_num_tokens} tokens, and no state"
    )


if __name__ == "__main__":
    main()

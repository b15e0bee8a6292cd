"""A step of a Mamba group with checkpoint blocks does not fit by blocks that it would not take.

Such a step takes a block for its state and one for its checkpoint; blocks for the states of drafts are there from the first
step on, and the table's other new entries are null. For a request's later steps the scheduler counts those, too. In the
smallest pool that is accepted the request, alone there, preempts itself, starts again where nothing in between is cached,
and so on for ever.

Run it with the vLLM in question: `python checkpoint_counts_nulls.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_BLOCKS = 7
NUM_DRAFTS = 3


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 2} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
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
        KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=1,
        hash_block_size=1,
    )


def main() -> None:
    init_none_hash(sha256)
    manager = make_manager()
    request = Request(
        request_id="A",
        prompt_token_ids=list(range(19)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )
    manager.new_step_starts()
    assert manager.allocate_slots(request, 16, num_lookahead_tokens=NUM_DRAFTS) is not None
    request.num_computed_tokens = 16
    manager.new_step_starts()
    blocks = manager.allocate_slots(request, 3, num_lookahead_tokens=NUM_DRAFTS)
    num_free = manager.block_pool.get_num_free_blocks()
    assert blocks is not None, f"3 more tokens need a state and a checkpoint, and do not fit into {num_free} free blocks"


if __name__ == "__main__":
    main()

"""A step with fewer drafts than the one before gets no block for its state.

Where a step's drafts can pass the end of a block, the entries between the last state and the one after the step are nulled,
and the running state lives behind them. If most drafts were wrong and the next step gets fewer, its last token lies in an
entry that was nulled, and the worker computes the request's state in the null block, as does every other such request.

Run it with the vLLM in question: `python null_state.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_DRAFTS = 3


def main() -> None:
    init_none_hash(sha256)
    spec = MambaSpec(
        block_size=1,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
    )
    manager = KVCacheManager(
        KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=1,
        hash_block_size=1,
    )
    request = Request(
        request_id="A",
        prompt_token_ids=[1],
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )
    assert manager.allocate_slots(request, 1) is not None
    request.num_computed_tokens = 1
    request.append_output_token_ids(2)
    assert manager.allocate_slots(request, 1 + NUM_DRAFTS) is not None  # tokens [1, 5), of which one draft is right
    request.num_computed_tokens = 3
    request.append_output_token_ids([3, 4])
    assert manager.allocate_slots(request, 1) is not None  # token 3; the budget leaves no room for drafts
    blocks = manager.get_block_ids("A")[0]
    assert blocks[3] != 0, f"the state after token 3 belongs into entry 3 of {blocks}, which is the null block"


if __name__ == "__main__":
    main()

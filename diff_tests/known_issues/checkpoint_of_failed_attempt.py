"""The place of a checkpoint that no step has written gets the checkpoint's key.

Where a step is to leave a checkpoint is noted when its blocks are counted. The first step here computes a prompt of two
tokens. The second one, with a token and a draft, does not fit, and the request waits with the first one's output on its
way. When that comes, what it has computed is cached, and with it the checkpoint that is still noted, after 3 tokens: the
key goes to a block meant for the states of drafts. Once there is room the same key is to be linked in earnest, and an
assertion fails.

Run it with the vLLM in question: `python checkpoint_of_failed_attempt.py`. It fails where vLLM has the issue.
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
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(1, sha256),
    )
    manager.new_step_starts()
    assert manager.allocate_slots(request, 2) is not None
    request.num_computed_tokens = request.num_in_flight_tokens = 2
    manager.new_step_starts()
    if manager.allocate_slots(request, 2) is not None:
        return  # 0.29 keeps no room for a checkpoint here
    # That step's output arrives, and what it has computed is cached.
    request.num_in_flight_tokens = 0
    request.append_output_token_ids(3)
    manager.cache_blocks(request, request.num_computed_tokens)
    keyed = manager.get_blocks("A").blocks[0][2]
    assert keyed.block_hash is None, f"block {keyed.block_id} has the key of 3 tokens, of which 2 have been computed"


if __name__ == "__main__":
    main()

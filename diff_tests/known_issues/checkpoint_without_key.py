"""A step of drafts leaves a checkpoint of the Mamba state behind the last token that has a key.

The position of the checkpoint inside a step is derived from all tokens of the step, drafts included. Drafts belong to no
prefix key, so a position among them has none, and an assertion fails in the block pool.

Run it with the vLLM in question: `python checkpoint_without_key.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 2
NUM_DRAFTS = 3


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 2} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
    )
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
        num_prefill_checkpoint_blocks=1,
        **alignment,
    )
    return KVCacheManager(
        KVCacheConfig(16, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def main() -> None:
    init_none_hash(sha256)
    manager = make_manager()
    request = Request(
        request_id="A",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    manager.allocate_slots(request, 2)  # the prompt
    request.num_computed_tokens = 2
    request.append_output_token_ids(3)
    # The next step is to compute token 3 and three drafts: tokens [2, 6). One key exists, that of the first two tokens.
    try:
        manager.allocate_slots(request, 1 + NUM_DRAFTS)
    except AssertionError as error:
        raise AssertionError("a state among the drafts, at token 4, was to be cached") from error


if __name__ == "__main__":
    main()

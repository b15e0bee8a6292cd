"""The end of a prompt gets its key on the block of a checkpoint that is elsewhere.

A step that computes a whole prompt leaves a checkpoint before its end, where a hit may end: here after 4 or 8 of 11 tokens,
as the blocks of the other group hold 4. States are cached up to where a hit may end, the prompt's last ones thus when its
output has filled a larger block. If outputs were awaited, the checkpoint's block is still in the table then, where the
state after 10 tokens would be: it gets that key, and loses its own.

Run it with the vLLM in question: `python checkpoint_keyed_as_end.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

NUM_BLOCKS = 10
BLOCK_SIZE, LARGER_BLOCK_SIZE = 2, 4
PROMPT = list(range(11))


def make_manager() -> KVCacheManager:
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 1} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
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
    groups = [KVCacheGroupSpec(["mamba"], mamba), KVCacheGroupSpec(["full"], full, is_eagle_group=True)]
    return KVCacheManager(
        KVCacheConfig(NUM_BLOCKS, [], groups),
        max_model_len=64,
        scheduler_block_size=LARGER_BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        use_eagle=True,
    )


def main() -> None:
    init_none_hash(sha256)
    manager = make_manager()
    request = Request(
        request_id="A",
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    manager.new_step_starts()
    assert manager.allocate_slots(request, len(PROMPT)) is not None
    block = manager.get_blocks("A").blocks[0][4]  # beside the one for the step's last state
    if block.is_null or block.block_hash is None:
        return  # no checkpoint
    checkpoint = block.block_hash_num_tokens
    request.num_computed_tokens = request.num_in_flight_tokens = len(PROMPT)
    manager.new_step_starts()
    assert manager.allocate_slots(request, 2) is not None  # the output that is awaited, and a draft
    request.append_output_token_ids([101, 102])
    manager.cache_blocks(request, len(PROMPT) + 1)
    assert block.block_hash_num_tokens == checkpoint, (
        f"block {block.block_id} got the state after {checkpoint} tokens, and has the key of {block.block_hash_num_tokens}"
    )


if __name__ == "__main__":
    main()

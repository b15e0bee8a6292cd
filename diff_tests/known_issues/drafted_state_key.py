"""Where more drafts than a block holds tokens are right at once, a block of states gets a key that is not its state's.

The states of right drafts lie in the speculative blocks. When the output is known, the worker puts one of them into place:
the last that ends a block (`aligned_new_computed` of vLLM's `mamba_utils`). Here a step that begins at token 1 gets six
drafts right and so passes two ends of blocks, after tokens 4 and 8. The state after 8 is put into place; the first block
still holds the state after the prompt's only token when the scheduler gives it the key of the first 4 tokens.

Run it with the vLLM in question: `python drafted_state_key.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 4
NUM_DRAFTS = 6
OUTPUT = list(range(100, 108))


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=16),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> None:
    init_none_hash(sha256)
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
    )
    manager = KVCacheManager(
        KVCacheConfig(40, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    first = request("A", [1])
    assert manager.allocate_slots(first, 1) is not None
    first.num_computed_tokens = 1
    first.append_output_token_ids(OUTPUT[:1])
    block_of_prompt = manager.get_block_ids("A")[0][0]  # with the state after one token

    # Token 1 and its drafts: tokens [1, 8), whose states go to the second block and to speculative ones. All are right.
    assert manager.allocate_slots(first, 1 + NUM_DRAFTS) is not None
    assert manager.get_block_ids("A")[0][0] == block_of_prompt
    first.num_computed_tokens = 8
    first.append_output_token_ids(OUTPUT[1:])
    manager.cache_blocks(first, 8)  # as the scheduler does when the output has arrived

    blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request("B", [1, *OUTPUT[:4]]))
    state = blocks.blocks[0][-1].block_id if num_hit_tokens else 0
    assert (num_hit_tokens, state) != (4, block_of_prompt), "B is to go on after token 4 from A's state after token 1"


if __name__ == "__main__":
    main()

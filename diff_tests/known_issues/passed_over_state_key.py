"""Blocks meant for the states of drafts get keys of states that no step wrote.

A step leaves speculative blocks behind its state's block. A step that writes a checkpoint is not cut at the ends of blocks:
here the second one covers the tokens [4, 17), and its states are the checkpoint after 16 tokens and the one after 17. The
speculative blocks stay where they are, which is where the states after 8 and after 12 tokens would be, and are cached as
such. Later releases take them along to the table's end.

Run it with the vLLM in question: `python passed_over_state_key.py`. It fails where vLLM has the issue.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

BLOCK_SIZE = 4
NUM_DRAFTS = 2
PROMPT = list(range(17))


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> None:
    if "prefill_checkpoint_alignment" not in MambaSpec.__dataclass_fields__:
        return  # in 0.29 checkpoints have no positions, and are cached by their own step
    init_none_hash(sha256)
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=BLOCK_SIZE,
    )
    manager = KVCacheManager(
        KVCacheConfig(40, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=64,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    first = request("A", PROMPT)
    assert manager.allocate_slots(first, 4) is not None
    speculative_blocks = manager.get_block_ids("A")[0][1:]
    first.num_computed_tokens = 4
    assert manager.allocate_slots(first, 13) is not None  # the tokens [4, 17)
    blocks, num_hit_tokens, *_ = manager.get_computed_blocks(request("B", PROMPT[:13]))
    state = blocks.blocks[0][-1].block_id if num_hit_tokens else 0
    assert state not in speculative_blocks, (
        f"B is to go on after token {num_hit_tokens} from block {state}, which A held for the states of drafts"
    )


if __name__ == "__main__":
    main()

"""A block of states gets the key of its last token though no step left the state there.

The state after 24 tokens lies inside a block of 16 and is hit. The request goes on from a copy of it. Since the state at
the prompt's last hash boundary is written inside the step as a checkpoint, the step is not cut at the block's end: it
covers the tokens [24, 49). Its states are the checkpoint after 48 tokens and the one after 49. The block with the copy
still holds the state after 24 tokens when it gets the key of the first 32, and others resume from it behind those 32.

Run it with the vLLM in question: `python skipped_state_key.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
HASH_BLOCK_SIZE = 8
NUM_BLOCKS = 16
SHARED = list(range(32))
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 128,
}


def make_scheduler(folder: str) -> Scheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=128),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=128, max_model_len=128, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
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
    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            NUM_BLOCKS,
            [],
            [KVCacheGroupSpec(["mamba"], mamba), KVCacheGroupSpec(["full"], full)],
            prefix_cache_retention_interval=0,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=HASH_BLOCK_SIZE,
    )


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
    )


def step(scheduler: Scheduler) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Schedules a step and answers it. Returns the scheduled tokens, and the state blocks, of each request."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name)[0] for name in names}
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    answer = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
    )
    scheduler.update_from_output(output, answer)
    return output.num_scheduled_tokens, tables


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", SHARED))
    while "A" in scheduler.requests:
        step(scheduler)
    scheduler.add_request(request("B", SHARED + list(range(100, 117))))
    scheduled, tables = step(scheduler)
    if scheduled["B"] != 25:
        return  # the step ends where the block does, or begins elsewhere
    blocks, num_hit_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request("C", [*SHARED, 999]))
    state = blocks.blocks[0][-1].block_id if num_hit_tokens else 0
    assert (num_hit_tokens, state) != (32, tables["B"][1]), (
        f"B went from token 24 to 49 in one step, and C is to go on after token 32 from block {state}, from which B began"
    )


if __name__ == "__main__":
    main()

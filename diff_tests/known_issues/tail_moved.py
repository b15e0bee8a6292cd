"""A request that had to wait is looked for in a block that it has left, and an assertion fails.

The state inside a prompt's last block is cached there, and when the request goes on a copy takes the key over. With
asynchronous scheduling the next step knows no new token yet and links the key to the request's own block again, so the step
after that is to leave the state in another copy. Here the two steps in flight reach as far as the model's length, and the
request waits for an output. A right draft lets it leave the block, and the next attempt asserts that the block is still at
its place. A request that waits for room, as 0.30 and 0.31 let it, comes to the same end.

Run it with the vLLM in question: `python tail_moved.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from collections import deque
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 2
HASH_BLOCK_SIZE = 1
NUM_BLOCKS = 9
NUM_DRAFTS = 2
MAX_MODEL_LEN = 5
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 64,
}


def make_scheduler(folder: str) -> AsyncScheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=2),
    )
    # No draft model lies around here; all that the scheduler asks is the name of the method.
    config.speculative_config.method = "draft_model"
    config.scheduler_config.max_num_scheduled_tokens = 64
    config.scheduler_config.async_scheduling = True  # builds for CPU switch it off
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    states = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
    )
    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            NUM_BLOCKS,
            [],
            [KVCacheGroupSpec(["layer0"], full), KVCacheGroupSpec(["layer1"], states)],
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=HASH_BLOCK_SIZE,
    )


def schedule(scheduler: AsyncScheduler) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """A step, and its answer: one draft is right."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[1] * (2 if name in output.scheduled_spec_decode_tokens else 1) for name in names]
    indexes = {name: i for i, name in enumerate(names)}
    return output, ModelRunnerOutput(req_ids=names, req_id_to_index=indexes, sampled_token_ids=sampled)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=[0],
            sampling_params=SamplingParams(max_tokens=4),
            pooling_params=None,
            block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
        )
    )
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    while scheduler.requests:
        in_flight.append(schedule(scheduler))
        if len(in_flight) == 2:
            scheduler.update_from_output(*in_flight.popleft())


if __name__ == "__main__":
    main()

"""A request that hits a part of a block waits for ever in the smallest pool that is accepted, though it would run without.

Beside a Mamba group in mode `align` hits may end inside a block. The block is then copied, so that for a while the request
holds it and its copy: a block more than the start-up check counts for the longest request. Where the pool has no such
block, the scheduler waits for one. All blocks are free and nothing runs, so none ever comes.

Run it with the vLLM in question: `python copy_over_promise.py`. It fails where vLLM has the issue.
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
HASH_BLOCK_SIZE = 4
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


def make_scheduler(folder: str) -> Scheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            prefix_match_unit=HASH_BLOCK_SIZE,
        ),
        device_config=DeviceConfig("cpu"),
    )
    specs = [
        FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16),
        MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"),
    ]
    # The least that the start-up check accepts, and the null block.
    num_blocks = 1 + sum(spec.max_memory_usage_bytes(config) // spec.page_size_bytes for spec in specs)
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks,
            [],
            [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=HASH_BLOCK_SIZE,
    )


def run(scheduler: Scheduler, name: str, prompt: list[int]) -> bool:
    """Adds a request and lets the engine go on for ten steps. Returns whether the request has ended."""
    scheduler.add_request(
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
        )
    )
    for _ in range(10):
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
        indexes = {name: i for i, name in enumerate(names)}
        answer = ModelRunnerOutput(req_ids=names, req_id_to_index=indexes, sampled_token_ids=sampled)
        scheduler.update_from_output(output, answer)
    return name not in scheduler.requests


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    assert run(scheduler, "C", list(range(100, 117))), "the pool is too small for a request that hits nothing"
    assert run(scheduler, "A", list(range(5))), "the pool is too small for a short request"
    num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert run(scheduler, "B", list(range(17))), f"B hits 4 tokens and waits for ever, {num_free} blocks being free"


if __name__ == "__main__":
    main()

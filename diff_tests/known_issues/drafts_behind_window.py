"""In the smallest pool that is accepted, a lone request of a sliding window waits for ever once a draft model drafts.

The start-up check counts, for a sliding window, the window, the tokens of a step, and a block more. Each step also takes
slots behind its tokens, for what the draft model writes there. Where those are more than fit into that block, no step of a
long prompt finds room. All blocks are free and nothing runs.

Run it with the vLLM in question: `python drafts_behind_window.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
BUDGET = 16
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
    "max_position_embeddings": 64,
}


def make_scheduler(folder: str) -> Scheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=60),
        scheduler_config=SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=BUDGET,
            max_model_len=60,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=11, prompt_lookup_max=2),
    )
    # No draft model lies around here; all that the scheduler asks is the name of the method.
    config.speculative_config.method = "draft_model"
    config.scheduler_config.max_num_scheduled_tokens = BUDGET
    spec = SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=BLOCK_SIZE
    )
    # The least that the start-up check accepts, and the null block.
    num_blocks = spec.max_memory_usage_bytes(config) // spec.page_size_bytes + 1
    config.cache_config.num_gpu_blocks = num_blocks
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def step(scheduler: Scheduler) -> None:
    """A step of the engine: a token for each request whose prompt is computed by it."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    indexes = {name: i for i, name in enumerate(names)}
    answer = ModelRunnerOutput(req_ids=names, req_id_to_index=indexes, sampled_token_ids=sampled)
    scheduler.update_from_output(output, answer)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(40)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    for _ in range(20):
        step(scheduler)
    num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert "A" not in scheduler.requests, f"A, alone, waits for ever, {num_free} blocks being free"


if __name__ == "__main__":
    main()

"""A block keeps its key though its request was preempted before the block was computed.

Blocks get their keys when slots are allocated. With priorities, a request that was scheduled earlier in the same call of
`schedule` may be the victim when another needs room. Its tokens are taken back, but its block stays in the prefix cache:
whoever has the same prefix finds a block that nobody ever computed.

Run it with the vLLM in question: `python cached_then_preempted.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 8
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=12,
            max_model_len=32,
            is_encoder_decoder=False,
            long_prefill_token_threshold=8,
            policy="priority",
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def request(name: str, first_token: int, num_tokens: int, max_tokens: int, priority: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first_token, first_token + num_tokens)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        arrival_time=float(priority),
        priority=priority,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def step(scheduler: Scheduler) -> list[str]:
    """Schedules and answers with a token for each request whose prompt is computed. Returns who was scheduled."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    answer = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
    )
    scheduler.update_from_output(output, answer)
    return names


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", 0, 25, max_tokens=1, priority=1))
    scheduler.add_request(request("C", 200, 1, max_tokens=1, priority=2))  # the threshold is for more than one request
    assert step(scheduler) == ["A", "C"]  # tokens [0, 8) of A in blocks 1 and 2; C in block 3, which is free again
    scheduler.add_request(request("B", 100, 4, max_tokens=2, priority=0))
    assert step(scheduler) == ["A", "B"]  # tokens [8, 16) of A in blocks 3 and 4, all of B in block 5
    # Tokens [16, 24) of A get blocks 6 and 7, the last ones. Then B needs a second block, and A has to go.
    assert step(scheduler) == ["B"]
    assert scheduler.requests["A"].num_preemptions == 1

    _, num_hit_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request("D", 0, 25, max_tokens=1, priority=1))
    assert num_hit_tokens <= 16, f"16 tokens of A were computed, a request with the same prompt hits {num_hit_tokens}"


if __name__ == "__main__":
    main()

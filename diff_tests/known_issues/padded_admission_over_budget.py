"""A request is never admitted, as its padded admission is larger than what a step can take.

With drafts, a request whose prompt a connector brings is admitted with a slot for each draft: 1 + 3 tokens here. The budget
of 4 tokens is accepted at start, but one row of it is set aside for the draft model. The padded admission does not fit into
the other three, in no step ever, and the scheduler waits for a better one although unpadded it would fit.

Run it with the vLLM in question: `python padded_admission_over_budget.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 8
NUM_BLOCKS = 60
BUDGET = 4
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
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64)
    speculative = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=3,
        prompt_lookup_max=2,
        prompt_lookup_min=1,
        target_model_config=model,
        target_parallel_config=ParallelConfig(),
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=2, max_num_batched_tokens=BUDGET, max_model_len=64, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative,
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    # No draft model lies around here; all that the scheduler asks is the name of the method.
    speculative.method = "draft_model"
    config.scheduler_config.max_num_scheduled_tokens = BUDGET
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def step(scheduler: Scheduler) -> dict[str, int]:
    """Schedules and answers with a token for each request whose prompt is computed. Returns the scheduled tokens."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    answer = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
    )
    scheduler.update_from_output(output, answer)
    return output.num_scheduled_tokens


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(20)),
            sampling_params=SamplingParams(max_tokens=3),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    num_tokens = [step(scheduler).get("A", 0) for _ in range(6)]
    assert any(num_tokens), f"A waits, nothing runs, and nothing is ever scheduled; tokens by step: {num_tokens}"


if __name__ == "__main__":
    main()

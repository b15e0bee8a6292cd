"""An admission that is padded to the shape of a decode step is then cut by the long-prefill threshold.

With speculative decoding, a request whose prompt is cached up to its last token is admitted with that token and a slot
for each draft: 1 + 3 tokens here. The cut to `long_prefill_token_threshold`, 2 tokens here, comes after the padding, and
`schedule` asserts that the padded shape is still there. The engine dies on a valid request.

Run it with the vLLM in question: `python padded_admission_cut.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
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

BLOCK_SIZE = 4
NUM_BLOCKS = 16
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


def make_scheduler(folder: str, threshold: int) -> Scheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32)
    config = VllmConfig(
        model_config=model,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=32,
            is_encoder_decoder=False,
            long_prefill_token_threshold=threshold,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        speculative_config=SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=3,
            prompt_lookup_max=2,
            prompt_lookup_min=1,
            target_model_config=model,
            target_parallel_config=ParallelConfig(),
        ),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def request(name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(9)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
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


def admit_beside_another(threshold: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder, threshold)
    scheduler.add_request(request("A"))
    for _ in range(6):
        step(scheduler)
    scheduler.add_request(request("B"))  # 8 of its 9 tokens are cached: A computed them
    return step(scheduler)


def main() -> None:
    init_none_hash(sha256)
    assert admit_beside_another(threshold=0) == {"A": 1, "B": 4}  # B's last token and three drafts
    try:
        admit_beside_another(threshold=2)
    except AssertionError as error:
        raise AssertionError("a padded admission above the threshold ends the engine") from error


if __name__ == "__main__":
    main()

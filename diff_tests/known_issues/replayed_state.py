"""Tokens that were hit are computed again on top of the state after them.

Where a sliding window with bounded replay is not cached, the last tokens of a hit are computed again for its sake. A Mamba
group in mode `align` beside it has the state after the whole hit, and no other. The step begins at an earlier token, whose
state is in no block; and if it ends within the hit, the place of its own state is null or shared.

Run it with the vLLM in question: `python replayed_state.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowMLASpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 32
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
            max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec(["mamba"], MambaSpec(BLOCK_SIZE, ((1, 32),), (torch.bfloat16,), mamba_cache_mode="align")),
        KVCacheGroupSpec(["window"], SlidingWindowMLASpec(**sizes, sliding_window=BLOCK_SIZE, bounded_replay=True)),
    ]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> None:
    if "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__:
        return  # before 0.31 there is no such group
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", list(range(9))))
    while "A" in scheduler.requests:
        output = scheduler.schedule()
        sampled = [[] if scheduler.requests["A"].is_prefill_chunk else [1]]
        answer = ModelRunnerOutput(req_ids=["A"], req_id_to_index={"A": 0}, sampled_token_ids=sampled)
        scheduler.update_from_output(output, answer)
    scheduler.add_request(request("B", [*range(8), 100, 101, 102, 103, 104]))
    (new,) = scheduler.schedule().scheduled_new_reqs
    states, start = new.block_ids[1], new.num_computed_tokens
    state = states[(start - 1) // BLOCK_SIZE] if start else None  # floors: of the state after `start` tokens
    assert state != 0, f"B computes from token {start} on, but of its states {states} the first is the one after 8 tokens"


if __name__ == "__main__":
    main()

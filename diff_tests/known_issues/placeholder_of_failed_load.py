"""A request whose load failed waits for ever for a token that nobody computes.

With asynchronous scheduling a request counts, when a step is scheduled, the token that the step will bring. If the step's
load fails, the policy `recompute` takes the request back and drops the token, but goes on counting it. The request then
computes its prompt and one token more, which is not there. Where both do not fit into one step, the prompt counts as
unfinished at its end, no token is sampled, and the scheduler takes the request for one whose last token is on its way.

Run it with the vLLM in question: `python placeholder_of_failed_load.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 8
NUM_BLOCKS = 10
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


def make_scheduler(folder: str) -> AsyncScheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64),
        scheduler_config=SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=9, max_model_len=64, is_encoder_decoder=False, async_scheduling=True
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def step(scheduler: AsyncScheduler, load_fails: bool = False) -> None:
    """A step of the engine: a token for each request whose prompt is computed by it."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    invalid = set(scheduler.kv_cache_manager.get_block_ids("A")[0][:1]) if load_fails else set()
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names],
        kv_connector_output=KVConnectorOutput(invalid_block_ids=invalid),
    )
    scheduler.update_from_output(output, answer)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(9)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    step(scheduler, load_fails=True)
    for _ in range(20):
        step(scheduler)
    assert "A" not in scheduler.requests, "the load of A failed, and A, alone, waits for ever"


if __name__ == "__main__":
    main()

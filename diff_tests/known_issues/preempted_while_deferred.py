"""Two requests that do not fit beside each other preempt each other, and themselves, for ever.

With asynchronous scheduling and a connector the blocks of a preempted request come back when the step in flight is through.
The scheduler looks for them at once, does not find them, and preempts the next request, and in the end the one for which it
wanted them. All start again in the same step, and come to the same point. Each alone would run.

Run it with the vLLM in question: `python preempted_while_deferred.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from collections import deque
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 2
NUM_BLOCKS = 4
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=5),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=5, is_encoder_decoder=False, async_scheduling=True
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    config.scheduler_config.async_scheduling = True  # builds for CPU switch it off
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    scheduler = AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (0, False)
    return scheduler


def request(name: str, num_tokens: int) -> Request:
    first = 100 * ord(name)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first, first + num_tokens)),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def schedule(scheduler: AsyncScheduler) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """A step, and its answer: a token for each request."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    indexes = {name: i for i, name in enumerate(names)}
    return output, ModelRunnerOutput(req_ids=names, req_id_to_index=indexes, sampled_token_ids=[[1] for _ in names])


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", 2))
    scheduler.add_request(request("B", 3))
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    num_preemptions = 0
    for _ in range(40):
        in_flight.append(schedule(scheduler))
        num_preemptions += len(in_flight[-1][0].preempted_req_ids or ())
        if len(in_flight) == 2:
            scheduler.update_from_output(*in_flight.popleft())
    unfinished = sorted(scheduler.requests)
    assert not unfinished, f"after 40 steps and {num_preemptions} preemptions {unfinished} have not ended"


if __name__ == "__main__":
    main()

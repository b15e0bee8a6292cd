"""A lone request of a Mamba group in mode `align` preempts itself for ever in the smallest pool that is accepted.

The start-up check asks for two blocks of states per request. With asynchronous scheduling the state that the step in flight
reads is kept until its output arrives, beside the one that it writes, so that the next step needs a third block. Nobody
else is there to be preempted: the request itself is. It starts again behind its cached state, of which there is none in the
middle of a prompt by default, and comes to the same point.

Run it with the vLLM in question: `python states_in_flight.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from collections import deque
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 1
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8),
        scheduler_config=SchedulerConfig(
            max_num_seqs=1, max_num_batched_tokens=2, max_model_len=8, is_encoder_decoder=False, async_scheduling=True
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
    )
    spec = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    # The least that the start-up check accepts, and the null block.
    num_blocks = spec.max_memory_usage_bytes(config) // spec.page_size_bytes + 1
    config.cache_config.num_gpu_blocks = num_blocks
    return AsyncScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks,
            [],
            [KVCacheGroupSpec(["layer"], spec)],
            prefix_cache_retention_interval=config.cache_config.prefix_cache_retention_interval,
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def schedule(scheduler: Scheduler) -> tuple[SchedulerOutput, ModelRunnerOutput]:
    """A step, and its answer: a token for each request whose prompt is computed by it."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    indexes = {name: i for i, name in enumerate(names)}
    return output, ModelRunnerOutput(req_ids=names, req_id_to_index=indexes, sampled_token_ids=sampled)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=[1, 2, 3, 4, 5, 6],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    num_preemptions = 0
    for _ in range(40):
        in_flight.append(schedule(scheduler))
        num_preemptions += len(in_flight[-1][0].preempted_req_ids or ())
        if len(in_flight) == 2:
            scheduler.update_from_output(*in_flight.popleft())
        if "A" not in scheduler.requests:
            return
    raise AssertionError(f"A, alone, was preempted {num_preemptions} times in 40 steps and never ended")


if __name__ == "__main__":
    main()

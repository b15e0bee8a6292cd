"""A request whose load has arrived waits for ever behind one that comes before it and needs its blocks.

Only the head of the waiting requests is looked at, by priority and arrival, in later releases among those that hold blocks.
Here A was preempted and has loaded its first tokens again. The rest of it does not fit beside the blocks that were loaded
for B, and B is never looked at, though it needs no more than a step to end and give them back.

Run it with the vLLM in question: `python loaded_behind_priority.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 7
MAX_MODEL_LEN = 24
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=MAX_MODEL_LEN),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            policy="priority",
            scheduler_reserve_full_isl=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # The first 4 tokens of A come later, and all 5 of B.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (
        (4, True) if request.request_id == "A" else (5, True)
    )
    scheduler.connector.update_state_after_alloc = lambda *args: None
    return scheduler


def request(name: str, num_tokens: int, max_tokens: int) -> Request:
    first = 100 * ord(name)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first, first + num_tokens)),
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def step(scheduler: Scheduler, arrived: set[str] | None = None) -> None:
    """A step of the engine, in which the worker may report loads that have arrived."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[1] for _ in names],
        kv_connector_output=KVConnectorOutput(finished_recving=arrived),
    )
    scheduler.update_from_output(output, answer)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", 12, max_tokens=6))
    scheduler.add_request(request("B", 5, max_tokens=1))
    step(scheduler)
    step(scheduler, arrived={"A"})
    for _ in range(7):
        step(scheduler)  # A decodes, until there is no block for its 17th token but those that are loaded for B
    if scheduler.running:
        return  # there is a block for it
    step(scheduler, arrived={"A", "B"})
    for _ in range(20):
        step(scheduler)
    unfinished = sorted(scheduler.requests)
    assert not unfinished, f"nothing runs, all loads have arrived, and {unfinished} wait for ever"


if __name__ == "__main__":
    main()

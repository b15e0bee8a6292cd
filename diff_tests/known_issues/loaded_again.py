"""A prompt of one token that a load brings whole is loaded again and again, and its request never runs.

When a load has brought a whole prompt, the last token is to be computed again, so that the request counts one token less.
Of a prompt of one token nothing is left. The scheduler then takes the request for one that it has not looked at yet, asks
the connector, which has the token, and loads it again.

Run it with the vLLM in question: `python loaded_again.py`. It fails where vLLM has the issue.
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
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 8
NUM_BLOCKS = 6
MAX_MODEL_LEN = 40
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
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
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
    # All tokens come later.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (request.num_tokens - num_computed, True)
    scheduler.connector.update_state_after_alloc = lambda request, blocks, num_external: None
    return scheduler


def step(scheduler: Scheduler) -> int:
    """A step of the engine, with which all loads arrive. Returns how many have."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    loading = {name for name, it in scheduler.requests.items() if it.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[1] for _ in names],
        kv_connector_output=KVConnectorOutput(finished_recving=loading),
    )
    scheduler.update_from_output(output, answer)
    return len(loading)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=[1],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    num_loads = sum(step(scheduler) for _ in range(20))
    assert "A" not in scheduler.requests, f"A was loaded {num_loads} times in 20 steps and never ran"


if __name__ == "__main__":
    main()

"""Requests whose loads have arrived hold all blocks, and wait for ever for the blocks to which their states are copied.

Where hits may end inside a block of states, a request that goes on from a state inside its block leaves it to the prefix
cache and goes on in a copy. A load that arrives later is granted if the prompts of all that load or prefill still fit. The
copies are not counted, so that loads can take blocks which the next step of each needs for its copy. None can take a step,
and none is preempted, since none runs.

Run it with the vLLM in question: `python loads_hold_copies.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
HASH_BLOCK_SIZE = 2
NUM_BLOCKS = 7
MAX_MODEL_LEN = 4
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
        cache_config=CacheConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            mamba_cache_mode="align",
            prefix_match_unit=HASH_BLOCK_SIZE,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    specs = [
        MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"),
        FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16),
    ]
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            NUM_BLOCKS, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=HASH_BLOCK_SIZE,
    )
    # All tokens but the last come later.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (
        request.num_tokens - 1 - num_computed,
        True,
    )
    return scheduler


def request(name: str) -> Request:
    first = 100 * ord(name)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(first, first + 3)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(HASH_BLOCK_SIZE, sha256),
    )


def step(scheduler: Scheduler) -> None:
    """A step of the engine, with which all loads arrive."""
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


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    for name in "ABC":
        scheduler.add_request(request(name))
    for _ in range(20):
        step(scheduler)
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests}
    assert not tables, f"loads have arrived, nothing runs, and the requests hold {tables} for ever"


if __name__ == "__main__":
    main()

"""Two requests whose loads have arrived hold all blocks but two, and wait for ever for the blocks that their drafts need.

A load that arrives later is granted if the prompts of all that load or prefill still fit. The tokens that a draft model
writes behind them are not counted, or (0.31) counted for one group where there are three. So two loads can take blocks
which the next step of each needs for its drafts. Neither can take a step, and none is preempted, since none runs. Later
releases keep blocks for such a step in each group.

Run it with the vLLM in question: `python loads_hold_all.py`. It fails where vLLM has the issue.
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
    SpeculativeConfig,
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
NUM_BLOCKS = 15
NUM_GROUPS = 3
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
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=1, prompt_lookup_max=2),
    )
    # No draft model lies around here; all that the scheduler asks is the name of the method.
    config.speculative_config.method = "draft_model"
    config.scheduler_config.max_num_scheduled_tokens = 64
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i in range(NUM_GROUPS)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
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
        prompt_token_ids=list(range(first, first + 16)),
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
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
    scheduler.add_request(request("A"))
    scheduler.add_request(request("B"))
    for _ in range(20):
        step(scheduler)
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests}
    assert not tables, f"loads have arrived, nothing runs, and the requests hold {tables} for ever"


if __name__ == "__main__":
    main()

"""A request whose late load failed waits for ever for the blocks that are reserved for itself.

Late loads may not take blocks that requests in their prefill still need, those that load among them. Once its load has
failed, a request is asked about again, but still counts as one of them: what it needs is free, and reserved for it.

Run it with the vLLM in question: `python failed_load_reserves_itself.py`. It fails where vLLM has the issue.
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

BLOCK_SIZE = 8
NUM_BLOCKS = 3  # two and the null block, as many as one request takes
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=16, max_model_len=16, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
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


def answer(arrived: set[str], invalid: set[int]) -> ModelRunnerOutput:
    """A step without tokens, with the news of loads."""
    news = KVConnectorOutput(finished_recving=arrived, invalid_block_ids=invalid)
    return ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=news)


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    # The connector offers what it always does, to be loaded later, and whenever it is asked.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_local: (request.num_tokens - num_local - 1, True)
    request = Request(
        request_id="A",
        prompt_token_ids=list(range(15)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )
    scheduler.add_request(request)
    output = scheduler.schedule()
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("A")
    scheduler.update_from_output(output, answer({"A"}, set(blocks)))
    for _ in range(10):
        scheduler.update_from_output(scheduler.schedule(), answer(set(), set()))
        if any(scheduler.kv_cache_manager.get_block_ids("A")):
            return
    num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    raise AssertionError(f"A, alone, needs {len(blocks)} blocks, {num_free} are free, and it gets none")


if __name__ == "__main__":
    main()

"""Blocks whose load failed stay in the prefix cache when their request is gone.

With the policy `recompute`, blocks whose synchronous load failed keep their keys, since the request is to compute them in
its next step. If it is aborted before that, nobody computes them, and the next request with the same prefix hits blocks
that hold nothing.

Run it with the vLLM in question: `python failed_load_keys.py`. It fails where vLLM has the issue.
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
from vllm.v1.request import Request, RequestStatus
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


def make_scheduler(folder: str) -> Scheduler:
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False
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


def request(name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(17)),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A"))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"A": 1}  # the connector brings the 16 before it
    (blocks,) = scheduler.kv_cache_manager.get_block_ids("A")
    failed = KVConnectorOutput(invalid_block_ids=set(blocks[:2]))
    answer = ModelRunnerOutput(req_ids=["A"], req_id_to_index={"A": 0}, sampled_token_ids=[[1]], kv_connector_output=failed)
    scheduler.update_from_output(output, answer)
    scheduler.finish_requests("A", RequestStatus.FINISHED_ABORTED)

    _, num_hit_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request("B"))
    assert num_hit_tokens == 0, f"the load of A's blocks failed and A is gone, B hits {num_hit_tokens} tokens in them"


if __name__ == "__main__":
    main()

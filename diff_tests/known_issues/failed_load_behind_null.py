"""A request whose load failed goes on from a block whose window it does not have.

With the policy `recompute`, a request is to compute again what is behind the first block that was not loaded. In a sliding
window no more than the last tokens are loaded, the entries before are null. The token that begins the failed block attends
to tokens before it, which are in no block of the request.

Run it with the vLLM in question: `python failed_load_behind_null.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 8
WINDOW = 8
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
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    spec = SlidingWindowSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=WINDOW
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(33)),
            sampling_params=SamplingParams(max_tokens=2),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"A": 1}  # the connector brings the 32 before it
    (blocks,) = scheduler.kv_cache_manager.get_blocks("A").blocks
    loaded = [index for index, block in enumerate(blocks) if not block.is_null and index < 4]
    failed = KVConnectorOutput(invalid_block_ids={blocks[index].block_id for index in loaded})
    answer = ModelRunnerOutput(req_ids=["A"], req_id_to_index={"A": 0}, sampled_token_ids=[[1]], kv_connector_output=failed)
    scheduler.update_from_output(output, answer)

    output = scheduler.schedule()
    first = 33 - output.num_scheduled_tokens["A"]  # the first token that is computed again
    (blocks,) = scheduler.kv_cache_manager.get_blocks("A").blocks
    missing = [token for token in range(max(0, first - WINDOW + 1), first) if blocks[token // BLOCK_SIZE].is_null]
    assert not missing, f"token {first} is computed again and attends to tokens {missing}, whose blocks are null"


if __name__ == "__main__":
    main()

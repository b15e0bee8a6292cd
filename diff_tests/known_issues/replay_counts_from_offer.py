"""DecodeBenchConnector fills blocks behind the tokens that the scheduler has granted.

Beside a group with bounded replay the scheduler rounds what a connector offers down to whole blocks: of 7 tokens offered
for a prompt of 8 it grants 4, and computes the other 4. The connector derives which tokens it fills from the length of the
request instead of from what was granted, so it fills the blocks of the tokens [3, 7). The second one holds none that was
granted: its tokens are computed in this very step, and written over by the fill, or the fill by them.

Run it with the vLLM in question: `python replay_counts_from_offer.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowMLASpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 16
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=32),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=32, max_model_len=32, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    groups = [
        KVCacheGroupSpec(["full"], FullAttentionSpec(**sizes)),
        KVCacheGroupSpec(["window"], SlidingWindowMLASpec(**sizes, sliding_window=1, bounded_replay=True)),
    ]
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


def main() -> None:
    if "bounded_replay" not in SlidingWindowMLASpec.__dataclass_fields__:
        return  # before 0.31 there is no such group
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(8)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    output = scheduler.schedule()
    selected, num_granted = output.kv_connector_metadata.reqs_to_fill["A"]
    blocks = scheduler.kv_cache_manager.get_block_ids("A")[0]
    right = blocks[: -(-num_granted // BLOCK_SIZE)]  # rounds up
    assert selected[0] == right, f"tokens [0, {num_granted}) were granted, in {right}; {selected[0]} are to be filled"


if __name__ == "__main__":
    main()

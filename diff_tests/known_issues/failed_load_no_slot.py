"""A step that computes again what a failed load lacks has no block for its state.

In mode `align` a request's table holds its last state, and null where earlier ones were. With the policy `recompute`, a
request whose synchronous load failed keeps the table of the step that relied on it. Where a step cannot compute all of
those tokens again, it ends at an entry that is null: its state goes into the null block.

Run it with the vLLM in question: `python failed_load_no_slot.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 8
BUDGET = 16
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
            max_num_seqs=4, max_num_batched_tokens=BUDGET, max_model_len=64, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    spec = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 32),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # The connector brings the first block's tokens.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (BLOCK_SIZE, False)
    scheduler.connector.update_state_after_alloc = lambda *args: None
    return scheduler


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(
        Request(
            request_id="A",
            prompt_token_ids=list(range(25)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
    )
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"A": BUDGET}  # tokens [4, 20)
    loaded = scheduler.kv_cache_manager.get_block_ids("A")[0][0]
    failed = KVConnectorOutput(invalid_block_ids={loaded})
    answer = ModelRunnerOutput(req_ids=["A"], req_id_to_index={"A": 0}, sampled_token_ids=[[]], kv_connector_output=failed)
    scheduler.update_from_output(output, answer)

    output = scheduler.schedule()
    end = output.num_scheduled_tokens["A"]  # from the first token on
    (blocks,) = scheduler.kv_cache_manager.get_blocks("A").blocks
    state = blocks[(end - 1) // BLOCK_SIZE]
    assert not state.is_null, f"the step computes the tokens [0, {end}) again, and the block of its state is null"


if __name__ == "__main__":
    main()

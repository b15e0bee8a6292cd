"""The block of a load that failed gets the key of a state that no step has left.

The state after the first 7 tokens of A is to be loaded, and the load fails. With the policy `recompute` A computes on
behind the 4 tokens before the block that was to hold it. Since the state at the prompt's last block end is written inside
the step as a checkpoint, the step is not cut at the ends of blocks: it covers the tokens [4, 14), and its states are the
checkpoint after 12 tokens and the one after 14. The block of the load lies where the state after 8 tokens would be, and is
cached as that. Others resume from it.

Run it with the vLLM in question: `python failed_load_passed_over.py`. It fails where vLLM has the issue.
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
PROMPT = list(range(14))
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
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=24),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, max_model_len=24, is_encoder_decoder=False
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector", kv_role="kv_both", kv_load_failure_policy="recompute"
        ),
    )
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    # Where a checkpoint may lie is a field of the spec since 0.30; before, checkpoints had no positions.
    alignment = (
        {"prefill_checkpoint_alignment": 1} if "prefill_checkpoint_alignment" in MambaSpec.__dataclass_fields__ else {}
    )
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        **alignment,
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # The first 7 tokens of A come later.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (7, True)
    scheduler.connector.update_state_after_alloc = lambda *args: None
    return scheduler


def request(name: str, tokens: list[int]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A", PROMPT))
    output = scheduler.schedule()
    assert not output.num_scheduled_tokens  # A waits for its load
    null, loaded = scheduler.kv_cache_manager.get_block_ids("A")[0]
    report = KVConnectorOutput(finished_recving={"A"}, invalid_block_ids={loaded})
    answer = ModelRunnerOutput(req_ids=[], req_id_to_index={}, sampled_token_ids=[], kv_connector_output=report)
    scheduler.update_from_output(output, answer)

    output = scheduler.schedule()
    if output.num_scheduled_tokens != {"A": 10}:
        return  # A begins elsewhere, or its step ends where a block does
    blocks, num_hit_tokens, *_ = scheduler.kv_cache_manager.get_computed_blocks(request("B", PROMPT[:9]))
    state = blocks.blocks[0][-1].block_id if num_hit_tokens else null
    assert state != loaded, (
        f"A computes the tokens [4, 14) in one step, and B is to go on after token {num_hit_tokens} from block {state}, "
        "into which nothing was loaded"
    )


if __name__ == "__main__":
    main()

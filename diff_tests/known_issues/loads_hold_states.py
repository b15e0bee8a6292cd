"""Two requests whose loads have arrived hold all blocks, and the first waits for ever for one for the states of its drafts.

A load that arrives later is granted if a step with drafts would still find blocks in each group. Groups of states are not
counted: they have blocks for the states of drafts. But a request that was preempted goes on with drafts at once, and where
these go beyond its last block, the step takes one block more. Nobody runs, so nobody is preempted.

Run it with the vLLM in question: `python loads_hold_states.py`. It fails where vLLM has the issue.
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
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 2
NUM_BLOCKS = 7
NUM_DRAFTS = 2
MAX_MODEL_LEN = 16
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
        cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True, mamba_cache_mode="align"),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(kv_connector="DecodeBenchConnector", kv_role="kv_both"),
        speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=2),
    )
    # No draft model lies around here; all that the scheduler asks is the name of the method.
    config.speculative_config.method = "eagle"
    config.scheduler_config.max_num_scheduled_tokens = 64
    config.cache_config.num_gpu_blocks = NUM_BLOCKS
    spec = MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((1, 32),),
        dtypes=(torch.bfloat16,),
        mamba_cache_mode="align",
        num_speculative_blocks=NUM_DRAFTS,
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)], prefix_cache_retention_interval=0
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
    )
    # All tokens of A come later, of B the first.
    scheduler.connector.get_num_new_matched_tokens = lambda request, num_computed: (
        max(0, (request.num_tokens if request.request_id == "A" else 1) - num_computed),
        True,
    )
    scheduler.connector.update_state_after_alloc = lambda *args: None
    return scheduler


def request(name: str) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[ord(name), 2],
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
    )


def step(scheduler: Scheduler, arriving: set[str]) -> None:
    """A step of the engine, with which loads arrive, and after which drafts are proposed."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    loading = {name for name, it in scheduler.requests.items() if it.status == RequestStatus.WAITING_FOR_REMOTE_KVS}
    answer = ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=[[1] for _ in names],
        kv_connector_output=KVConnectorOutput(finished_recving=arriving & loading),
    )
    scheduler.update_from_output(output, answer)
    scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * NUM_DRAFTS for _ in names]))


def main() -> None:
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(folder)
    scheduler.add_request(request("A"))
    step(scheduler, {"A"})
    scheduler.add_request(request("B"))
    # A runs, is preempted for want of a block, loads again; so does B, and both loads arrive.
    for arriving in (set(), {"B"}, set(), set(), set(), {"A", "B"}):
        step(scheduler, arriving)
    for _ in range(20):
        step(scheduler, set())
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in scheduler.requests}
    assert len(tables) < 2, f"loads have arrived, nothing runs, and the requests hold {tables} for ever"


if __name__ == "__main__":
    main()

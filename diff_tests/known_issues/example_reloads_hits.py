"""ExampleConnector loads a prompt from its first block on, also into blocks that were found in the prefix cache.

The first four tokens of request B are a local hit: their block is shared through the prefix cache, and may be read by
others. The connector answers with the eight tokens after them, but then has the worker load all twelve, the shared block
included. A note in its source says so. The bytes are the same as long as whoever stored them computed the same.

Run it with the vLLM in question: `python example_reloads_hits.py`. It fails where vLLM has the issue.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 4
NUM_BLOCKS = 30
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


class Engine:
    """A scheduler and the worker's side of the connector, with the memory of one layer."""

    def __init__(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        config = VllmConfig(
            model_config=ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64),
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="ExampleConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"shared_storage_path": folder},
            ),
        )
        config.cache_config.num_gpu_blocks = NUM_BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=32, dtype=torch.bfloat16)
        blocks = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=blocks,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
        )
        self.worker = ExampleConnector(config, KVConnectorRole.WORKER, blocks)
        self.memory = torch.zeros(NUM_BLOCKS, 1, BLOCK_SIZE, 64, dtype=torch.bfloat16)

    def run(self, name: str, tokens: list[int]) -> tuple[list[int], list[int]]:
        """Runs a request of one output token. Returns its block IDs, and those that the worker was told to load."""
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
            )
        )
        output = self.scheduler.schedule()
        metadata = output.kv_connector_metadata
        self.worker.bind_connector_metadata(metadata)
        self.worker.save_kv_layer("layer", self.memory, None)
        self.worker.clear_connector_metadata()
        answer = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=[[1]])
        self.scheduler.update_from_output(output, answer)
        slots = [slot for part in metadata.requests if not part.is_store for slot in part.slot_mapping.tolist()]
        (new,) = output.scheduled_new_reqs
        return new.block_ids[0], list(dict.fromkeys(slot // BLOCK_SIZE for slot in slots))


def main() -> None:
    init_none_hash(sha256)
    shared = list(range(100, 112))
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(folder)
        engine.run("A", [*shared, 1, 2, 3])  # stored
        assert engine.scheduler.reset_prefix_cache()
        engine.run("X", [*shared[:4], 4, 5])  # its first block goes to the prefix cache
        table, loaded = engine.run("B", [*shared, 6, 7, 8])
    # Of B's table, block 0 is X's; blocks 1 and 2 are to be loaded, block 3 is computed.
    assert loaded == table[1:3], f"blocks {table[1:3]} are to be loaded; the worker was told to load {loaded}"


if __name__ == "__main__":
    main()

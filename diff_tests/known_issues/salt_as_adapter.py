"""A cache salt and a LoRA adapter of the same name give the same prefix key.

What tells requests apart goes into a block's key as a bare list of names: a request salted with `x` and one that uses the
adapter `x` have equal keys for their first block, so each gets cache hits on blocks that the other computed.

Run it with the vLLM in question: `python salt_as_adapter.py`. It fails where vLLM has the issue.
"""

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request


def request(name: str, salt: str | None, adapter: LoRARequest | None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(16)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=adapter,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(16, sha256),
    )


def main() -> None:
    init_none_hash(sha256)
    salted = request("A", "x", None)
    adapted = request("B", None, LoRARequest(lora_name="x", lora_int_id=1, lora_path="adapters/x"))
    assert salted.block_hashes[0] != adapted.block_hashes[0], "salt x and adapter x have the same key"


if __name__ == "__main__":
    main()

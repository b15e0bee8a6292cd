"""What the probe reads of KV memory, on a device: it has no word of CUDA, and only reads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diff_tests.vllm_target.kvprobe import Memory
from gpu_tests.conftest import DEVICES

NUM_BLOCKS = 100
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows_per_block", [1, 2])
def test_what_a_load_changed_is_told_block_by_block(device, dtype, rows_per_block, monkeypatch):
    monkeypatch.setattr(Memory, "_CHUNK_BYTES", 10_000)
    bytes_of_row = torch.arange(256, dtype=torch.uint8, device=device).repeat(NUM_BLOCKS * rows_per_block, 2)
    # Heads outside of tokens: no row is one run of memory.
    cache = bytes_of_row.view(dtype).view(NUM_BLOCKS * rows_per_block, 4, 2, -1).transpose(1, 2)
    config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=["a"])])
    memory = Memory({"a": cache}, config, "all")
    assert memory.about()[0][5:] == [str(cache.device), rows_per_block]
    before = memory.look([[3, 5, 8, 9]])
    value = torch.tensor([1.0], device=device).to(dtype)
    for block in (3, 5, 60):
        cache[block * rows_per_block : (block + 1) * rows_per_block] = value
    cache[9 * rows_per_block, 1, 2, 0] = value[0]
    unseen = cache.clone()
    (seen,) = memory.compare(before)
    assert (seen["changed"], seen["equal"]) == ([3, 5, 9], [8])
    assert seen["values"] == [[bytes(value.view(torch.uint8).tolist()).hex(), [3, 5]]]
    assert seen["mixed"] == [8, 9]
    assert set(seen["outside"]) <= {60}
    assert seen["num_others"] == 16
    assert torch.equal(cache.view(torch.uint8), unseen.view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_changed_unasked_is_told_where_it_was_looked_at(device):
    cache = torch.zeros(NUM_BLOCKS, 64, device=device)
    config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[SimpleNamespace(layer_names=["a"])])
    memory = Memory({"a": cache}, config, "sample")
    before = memory.look([[1]])
    cache[50:70] = 1.0
    (seen,) = memory.compare(before)
    assert seen["outside"]
    assert set(seen["outside"]) <= set(range(50, 70))

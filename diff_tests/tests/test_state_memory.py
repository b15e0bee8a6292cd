"""States that are kept as tensors: the memory that a worker registers, and what is said of each way to fill it wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diff_tests.vllm_target.state_memory import StateMemory
from oracle.values import FillValue, encode
from sim.scenario import loads

SCENARIO = loads("""
kvoracle: 1
engine: {blocks: 9}
connector: null
groups:
  - {kind: full, block: 8}
  - {kind: mamba, block: 8, layers: 3, unknown: [object], states: [{shape: [4, 6]}, {dtype: float32, shape: [3]}]}
steps: []
""")
NAMES = [["f"], ["no", "a", "b"]]
VALUES = [[], [FillValue(encode(0.5, "bfloat16"), "bfloat16", 0.5), FillValue(encode(0.5, "float32"), "float32", 0.5)]]


def _whole(memory: StateMemory) -> None:
    for layer in memory.tensors.values():
        for tensor in layer:
            tensor.fill_(0.5)


def _one_layer(memory: StateMemory) -> None:
    for tensor in memory.tensors["a"]:
        tensor.fill_(0.5)


def _other_number(memory: StateMemory) -> None:
    _whole(memory)
    memory.tensors["b"][1].fill_(0.25)


def _beyond_the_end(memory: StateMemory) -> None:
    _whole(memory)
    memory.buffer[-1] ^= 0xFF


@pytest.mark.parametrize(
    ("fill", "asked", "expected"),
    [
        (_whole, True, {("filled", "a", 0), ("filled", "a", 1), ("filled", "b", 0), ("filled", "b", 1)}),
        (_one_layer, True, {("filled", "a", 0), ("filled", "a", 1), ("unwritten", "b", 0), ("unwritten", "b", 1)}),
        (_one_layer, False, {("outside", "a", 0), ("outside", "a", 1)}),
        (_other_number, True, {("filled", "a", 0), ("filled", "a", 1), ("filled", "b", 0), ("wrong_value", "b", 1)}),
        (
            _beyond_the_end,
            True,
            {("filled", "a", 0), ("filled", "a", 1), ("filled", "b", 0), ("filled", "b", 1), ("padding", "", None)},
        ),
    ],
)
def test_what_a_fill_did(
    fill: Callable[[StateMemory], None], asked: bool, expected: set[tuple[str, str, int | None]]
) -> None:
    memory = StateMemory(SCENARIO, NAMES, VALUES, "cpu")
    assert list(memory.tensors) == ["a", "b"]
    assert [tensor.dtype for tensor in memory.tensors["a"]] == [torch.bfloat16, torch.float32]
    memory.paint()
    fill(memory)
    found = memory.verify([[[3], [5] if asked else []]])
    assert {(entry.state, entry.layer, entry.tensor) for entry in found} == expected
    assert all(entry.blocks == [] for entry in found)

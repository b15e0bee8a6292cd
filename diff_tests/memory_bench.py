"""How fast KV memory is verified, against a copy of the same memory on the same device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from oracle.fill import FillCheck, LayerView
from oracle.values import FillValue, encode

NUM_BYTES = {"cpu": 1 << 28, "cuda": 1 << 33}
NUM_LAYERS = 32
PAGE_BYTES = 1 << 14
"""Of one layer and block: 16 tokens of 4 heads of 64 numbers, keys and values, in bfloat16."""
NUM_ROUNDS = 9

_MEAN = FillValue(encode(0.015, "bfloat16"), "bfloat16")


class Figures:
    """What was measured, in bytes a second: of a copy, and of verification by what was filled."""

    def __init__(self, copy: float, verified: dict[str, float], ratios: dict[str, float]) -> None:
        self.copy = copy
        self.verified = verified
        self.ratios = ratios


def measure_verification(device: str, num_bytes: int | None = None, num_rounds: int = NUM_ROUNDS) -> Figures:
    """Copies and verifications in turn; medians. A sixteenth of the blocks is filled: as one run, and scattered. On a CPU
    both have one thread, so that other work there slows neither more than the other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(device, num_bytes or _most_bytes(device), num_rounds)
    finally:
        torch.set_num_threads(num_threads)


def _most_bytes(device: str) -> int:
    """Of a GPU, a quarter of what is free: the copy takes as much again."""
    if device != "cuda":
        return NUM_BYTES[device]
    num_free, _ = torch.cuda.mem_get_info()
    return min(NUM_BYTES[device], num_free // 4)  # floors


def _measure(device: str, num_bytes: int, num_rounds: int) -> Figures:
    num_blocks = num_bytes // (NUM_LAYERS * PAGE_BYTES)  # floors
    buffer = torch.zeros(NUM_LAYERS * num_blocks * PAGE_BYTES, dtype=torch.uint8, device=device)
    other = torch.empty_like(buffer)
    layers = buffer.view(torch.bfloat16).view(NUM_LAYERS, num_blocks, PAGE_BYTES // 2)
    check = FillCheck(buffer, [LayerView(0, f"layer {i}", layers[i]) for i in range(NUM_LAYERS)], [_MEAN])
    num_filled = num_blocks // 16  # floors
    fills = {"one run": range(1, 1 + num_filled), "scattered": range(1, num_blocks, num_blocks // num_filled)}
    copies: list[float] = []
    verified: dict[str, float] = {}
    ratios: dict[str, float] = {}
    for name, ids in fills.items():
        _fill(check, layers, ids)
        verify, copy = partial(_verify, check, ids), partial(other.copy_, buffer)
        rounds = [(_seconds(device, copy), _seconds(device, verify)) for _ in range(num_rounds)]
        copies += [seconds for seconds, _ in rounds]
        verified[name] = buffer.numel() / median(seconds for _, seconds in rounds)
        ratios[name] = median(copied / seconds for copied, seconds in rounds)
    return Figures(buffer.numel() / median(copies), verified, ratios)


def _fill(check: FillCheck, layers: torch.Tensor, ids: Sequence[int]) -> None:
    check.paint()
    layers[:, torch.tensor(list(ids), device=layers.device)] = 0.015


def _verify(check: FillCheck, ids: Sequence[int]) -> None:
    states = {entry.state for entry in check.verify([list(ids)])}
    assert states == {"filled"}, states


def _seconds(device: str, work: Callable[[], object]) -> float:
    """Of work on a device, all of it done, and nothing of what was asked for before."""
    wait = torch.cuda.synchronize if device == "cuda" else _go_on
    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started


def _go_on() -> None:
    """A CPU has done its work when it returns."""

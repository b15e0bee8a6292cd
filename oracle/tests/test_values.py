"""Numbers as bytes: the same as torch encodes them, without torch."""

from __future__ import annotations

import random
from statistics import fmean, pstdev

import pytest
import torch

from oracle.values import ELEMENT_BYTES, clamp, clamped_moments, encode

TORCH = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("dtype", TORCH)
def test_elements_are_those_of_torch(dtype: str) -> None:
    info = torch.finfo(TORCH[dtype])
    chooser = random.Random(7)
    numbers = [0.0, -0.0, 0.015, -2.0, 1e6, -1e39, info.max, info.tiny, info.tiny / 2, 2**-9, 3 * 2**-10, 447.0]
    numbers += [chooser.gauss(0, 1) * 10 ** chooser.randint(-9, 6) for _ in range(2000)]
    for number in numbers:
        element = torch.full((1,), min(max(number, info.min), info.max), dtype=TORCH[dtype])
        assert encode(number, dtype) == bytes(element.view(torch.uint8).tolist()), number


def test_the_values_that_fills_use() -> None:
    assert encode(0.015, "bfloat16").hex() == "763c"
    assert encode(0.015, "float16").hex() == "ae23"
    assert encode(0.015, "fp8_e4m3").hex() == "08"
    assert encode(0.015, "fp8_e5m2").hex() == "24"
    assert encode(1e6, "float16").hex() == "ff7b"
    assert encode(0.015, "raw") == b"\0"
    assert all(len(encode(1.0, dtype)) == size for dtype, size in ELEMENT_BYTES.items())


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode(float("nan"), "bfloat16")


def test_clamping() -> None:
    assert clamp(1e6, "float16") == 65504.0
    assert clamp(-500.0, "fp8_e4m3") == -448.0
    assert clamp(0.015, "float32") == 0.015


@pytest.mark.parametrize(("mean", "std"), [(0.015, 1.0), (400.0, 100.0), (-500.0, 100.0), (1e6, 0.25)])
def test_moments_of_clamped_draws(mean: float, std: float) -> None:
    chooser = random.Random(3)
    draws = [clamp(chooser.gauss(mean, std), "fp8_e4m3") for _ in range(40_000)]
    right_mean, right_std = clamped_moments(mean, std, "fp8_e4m3")
    assert fmean(draws) == pytest.approx(right_mean, abs=0.03 * std)
    assert pstdev(draws) == pytest.approx(right_std, abs=0.03 * std)

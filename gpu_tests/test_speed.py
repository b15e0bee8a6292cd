"""The benchmark of verification runs on a device. How fast it is there, `kvoracle bench --only memory --device` says."""

from __future__ import annotations

import pytest

from diff_tests.memory_bench import measure_verification
from gpu_tests.conftest import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_verification_is_held_against_a_copy_on_the_same_device(device):
    figures = measure_verification(device, num_bytes=1 << 26, num_rounds=3)
    assert set(figures.ratios) == {"one run", "scattered"}
    assert all(ratio > 0.01 for ratio in figures.ratios.values())

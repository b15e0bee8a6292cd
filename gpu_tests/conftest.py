"""Devices: what runs on CUDA runs on a CPU too, so that nothing here is untested where there is no GPU."""

from __future__ import annotations

import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")),
]

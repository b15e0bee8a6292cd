"""What this machine, and a build of vLLM, can compute on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from diff_tests.vllm_target.releases import Source


def has_gpu() -> bool:
    """Asks the driver's management library: what asks the driver itself keeps forked children from using the device."""
    import torch

    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return torch.cuda.is_available()


def lacks_kernels(source: Source) -> bool:
    """Whether it has to run on a CPU and is no build for one: an official wheel, or sources that nobody compiled."""
    if source.folder is None or (source.folder / "vllm" / "_C.abi3.so").exists():
        return False
    return not has_gpu()


@functools.cache
def device_of_vllm() -> str:
    """What the installed vLLM computes on, in torch's word. A process of its own asks, in which vLLM may do as it likes."""
    code = "from vllm.platforms import current_platform; print(current_platform.device_type)"
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()[-1]


def look_at_models_here() -> None:
    """vLLM looks at a model's class in a process of its own, so that nothing touches a GPU in this one. Without a GPU that
    is a whole import for nothing."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda fn: fn()

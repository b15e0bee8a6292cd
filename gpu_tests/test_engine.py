"""The real engine on the device that the installed vLLM computes on: the request matrix, judged byte by byte."""

from __future__ import annotations

import importlib.util

import pytest

from diff_tests.e2e.matrix import matrix
from diff_tests.e2e.models import MODELS
from diff_tests.e2e.runs import DEFAULT_CONNECTOR, ENGINE_TIMEOUT_S, run_model
from diff_tests.vllm_target.platforms import device_of_vllm
from diff_tests.vllm_target.target import Target
from gpu_tests.conftest import DEVICES

# Windows and rings in one engine; attention that is really computed is the CPU's part in the tests of `e2e`.
ON = {"cpu": ("rings",), "cuda": ("qwen3", "rings")}


@pytest.fixture(params=DEVICES)
def device(request):
    """Skips where the installed vLLM computes on another one: its build decides, not the test."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    computes_on = device_of_vllm()
    if computes_on != request.param:
        pytest.skip(f"the installed vLLM computes on {computes_on}")
    return request.param


@pytest.mark.parametrize("name", ON["cuda"])
def test_the_whole_matrix_is_as_the_laws_want(device, name):
    if name not in ON[device]:
        pytest.skip(f"computed on a {device} in the tests of e2e")
    with Target(timeout_s=ENGINE_TIMEOUT_S, for_engines=True) as target:
        run = run_model(target, MODELS[name], DEFAULT_CONNECTOR, http=False)
    assert run.checked is not None, run.error
    assert run.verdict == "same", [judged.finding.message for judged in run.checked.findings]
    assert run.platform == device
    assert {row.act for row in run.rows} == {act.name for act in matrix(MODELS[name].tokens_per_entry)}
    assert all(row.selected == row.received == row.written for row in run.rows)

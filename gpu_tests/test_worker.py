"""The worker side of the connector on a device's KV memory, below vLLM's real scheduler: same scenarios, same laws."""

from __future__ import annotations

import importlib.util

import pytest

from diff_tests.corpus import CORPUS
from diff_tests.generate import SeededChooser, case_seed, generate
from diff_tests.loading import load_scenario
from diff_tests.run import run_on
from diff_tests.vllm_target.target import Target
from gpu_tests.conftest import DEVICES
from sim.history import Scheduled

NUM_GENERATED = 60
_CONNECTOR_LAWS = (4, 5, 6)
SHARED = CORPUS / "shared-tokens-end-inside-a-block.yaml"


@pytest.fixture(scope="module", params=DEVICES)
def device(request):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    return request.param


@pytest.fixture(scope="module")
def target(device):
    with Target(device=device) as started:
        yield started


def test_generated_scenarios_are_filled_as_the_laws_say(target):
    rules = target.info.rules
    num_written = 0
    for index in range(NUM_GENERATED):
        outcome = run_on(target, generate(SeededChooser(case_seed(7, index)), rules))
        wrong = [finding.message for finding in outcome.new_findings if finding.law in _CONNECTOR_LAWS]
        assert not wrong, wrong[0]
        num_written += sum(bool(record.written) for record in outcome.observed if isinstance(record, Scheduled))
    assert num_written > NUM_GENERATED // 2


def test_a_byte_outside_the_selection_is_found(device):
    with Target(defect="write_outside", device=device) as target:
        outcome = run_on(target, load_scenario(SHARED))
    assert any(finding.law == 6 for finding in outcome.new_findings)

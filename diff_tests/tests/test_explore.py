"""Hypothesis explores the generator's space on the real vLLM; what it finds, it shrinks by itself."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diff_tests.generate import HypothesisChooser, generate
from diff_tests.run import run_on
from diff_tests.vllm_target.target import Target
from sim.scenario import dump

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(st.data())
def test_the_model_and_the_installed_vllm_stay_in_step(target: Target, data: st.DataObject) -> None:
    scenario = data.draw(st.composite(lambda draw: generate(HypothesisChooser(draw), target.info.rules))())
    outcome = run_on(target, scenario)
    found = outcome.new_findings
    assert not found, f"{found[0].message}\n{dump(scenario)}"


def test_hypothesis_finds_a_planted_defect(target: Target) -> None:
    """A search that cannot fail proves nothing."""
    target.defect = "leak_reference"
    try:
        with pytest.raises(AssertionError):
            test_the_model_and_the_installed_vllm_stay_in_step(target)
    finally:
        target.defect = None

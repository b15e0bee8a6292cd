"""What a release refuses by design, before anything runs."""

from __future__ import annotations

from sim.history import Refusal
from sim.releases import Rules
from sim.scenario import Scenario


def refusal(scenario: Scenario, rules: Rules) -> Refusal | None:
    """The refusal that vLLM answers the scenario's configuration with, or None if it accepts it."""
    return None

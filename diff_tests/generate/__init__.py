"""Makes valid scenarios: one generator, written against a tiny chooser.

A seeded chooser drives campaigns at full speed, a Hypothesis chooser the pytest suites, so that both explore the same
space. It is a swarm: each case switches a random subset of FEATURES on; sizes sit at and beside block boundaries; pools
are tight often enough that eviction, refusal and preemption are common. A new kind of group is one entry of KINDS, a new
setting one entry of FEATURES and the line that reads it.
"""

from __future__ import annotations

from collections.abc import Collection

from diff_tests.generate.chooser import Chooser, HypothesisChooser, Lineage, LineageChooser, SeededChooser, case_seed
from diff_tests.generate.draft import FEATURES, Draft
from diff_tests.generate.drivers import direct_scenario, scheduler_scenario
from diff_tests.generate.engine import (
    choose_max_model_len,
    choose_speculative,
    make_connector,
    make_engine,
    refused,
)
from diff_tests.generate.kinds import KINDS, choose_kinds, label, make_groups
from diff_tests.generate.requests import make_requests
from sim.releases import Rules
from sim.scenario import Scenario

__all__ = [
    "FEATURES",
    "KINDS",
    "Chooser",
    "HypothesisChooser",
    "Lineage",
    "LineageChooser",
    "SeededChooser",
    "case_seed",
    "generate",
    "label",
]


def generate(chooser: Chooser, rules: Rules, features: Collection[str] = tuple(FEATURES)) -> Scenario:
    """A valid scenario for a release. `features`: names out of FEATURES that may be switched on."""
    on = frozenset(name for name in features if FEATURES[name].allowed(rules) and chooser.flag(FEATURES[name].probability))
    if "encoder" in on:  # vLLM turns these settings so where a model has an encoder
        on = (on | {"no_prefix_caching", "chunked_off"}) - {"connector", "direct", "dcp", "long_prefill", "refused"}
    draft = Draft(chooser=chooser, rules=rules, on=on)
    draft.base_block = chooser.one_of((16, 4, 8, 2, 16, 4, 3, 1))
    draft.dcp = chooser.one_of((2, 2, 4)) if "dcp" in on else 1
    draft.speculative = choose_speculative(draft)
    kinds = choose_kinds(draft)
    make_requests(draft)
    draft.max_model_len = choose_max_model_len(draft)
    draft.groups = make_groups(draft, kinds)
    scenario = Scenario(
        driver="direct" if "direct" in on else "scheduler",
        engine=make_engine(draft),
        connector=make_connector(draft),
        groups=draft.groups,
        steps=(),
    )
    scenario = direct_scenario(draft, scenario) if "direct" in on else scheduler_scenario(draft, scenario)
    return refused(draft, scenario) if "refused" in on else scenario

"""What a gate runs: the corpus, the smallest scenario of every known issue, then seeded cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from diff_tests.corpus import CORPUS, find_cases
from diff_tests.generate import SeededChooser, case_seed, generate
from oracle.known_issues import load as known_issues
from sim.releases import RELEASES, Rules
from sim.scenario import Scenario
from sim.scenario import load as load_scenario

SEED = 1
"""Of the seeded cases. Fixed, so that the same gate gives the same verdict."""
NUM_CASES = 2500
"""Seeded cases of a gate, unless told otherwise."""
CHUNK = 100
"""Seeded cases after which a candidate that has failed is let go."""
NOT_SEEDED = -1

Concerns = Callable[[Scenario], bool]

_ROOT = Path(__file__).parents[2]


class GateCase(NamedTuple):
    """A case. name: the corpus case's, the known issue's, or `case-000012`. case_index: of the generator, or
    NOT_SEEDED."""

    name: str
    scenario: Scenario
    case_index: int = NOT_SEEDED


def corpus_cases(concerns: Concerns) -> list[GateCase]:
    """The corpus, and the smallest scenarios of the known issues, as far as they concern the candidate."""
    cases = [GateCase(case.name, case.scenario) for case in find_cases([CORPUS])]
    cases += [GateCase(issue.id, load_scenario(_ROOT / issue.scenario)) for issue in known_issues()]
    return [case for case in cases if concerns(case.scenario)]


def seeded_cases(seed: int, rules: Rules, concerns: Concerns) -> Iterator[GateCase]:
    """Generated cases without end, valid for a release, as far as they concern the candidate."""
    case_index = 0
    while True:
        scenario = generate(SeededChooser(case_seed(seed, case_index)), rules)
        if concerns(scenario):
            yield GateCase(f"case-{case_index:06d}", scenario, case_index)
        case_index += 1


def concerns_all(scenario: Scenario) -> bool:
    """Of another vLLM everything may be different."""
    return True


def concerns_connector(scenario: Scenario, replaces: str | None) -> bool:
    """Of another connector only the cases that have it. replaces: the connector whose place it takes; None: any."""
    return scenario.connector is not None and replaces in (None, scenario.connector.name)


def older(one: Rules, other: Rules) -> Rules:
    """The rules of the older of two releases: what it can express, the newer one can too."""
    order = list(RELEASES)
    return min(one, other, key=lambda rules: order.index(rules.release))

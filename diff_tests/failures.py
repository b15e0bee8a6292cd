"""A saved failure: everything needed to look at it again, on disk as one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from diff_tests.run import Outcome
from oracle.findings import Finding
from sim.history import Record
from sim.releases import RELEASES
from sim.scenario import Scenario, ScenarioError, parse, plain

VERSION = 1


class SavedFinding(Struct, frozen=True, omit_defaults=True):
    """A finding and the id of the known issue that explains it."""

    finding: Finding
    issue: str | None = None


class SavedFailure(Struct, kw_only=True, omit_defaults=True):
    """A failing case of a campaign.

    vllm, connector: as they were asked for; release: whose rules judged. seed and case repeat the generator's choices.
    scenario, reduced: as plain data; reduced is the smallest scenario with the fault that the campaign first saw here,
    reduced_findings what it shows, reduced_observed its history. Histories are left out of all but the first failures of
    a fault.
    """

    kvoracle_failure: int
    vllm: str
    release: str
    connector: str | None = None
    seed: int
    case: int
    findings: list[SavedFinding]
    scenario: dict[str, Any]
    reduced: dict[str, Any] | None = None
    reduced_findings: list[SavedFinding] = []
    reduced_observed: list[Record] | None = None
    predicted: list[Record] | None = None
    observed: list[Record] | None = None

    @property
    def smallest(self) -> Scenario:
        """The reduced scenario, or the original one if there is none."""
        return parse(self.reduced or self.scenario)

    @property
    def is_of_changed_code(self) -> bool:
        """Whether a connector of the user's, or a vLLM that is no release, was under test."""
        return self.connector is not None or self.vllm not in ("current", *RELEASES)

    @property
    def smallest_findings(self) -> list[SavedFinding]:
        """The findings of `smallest`."""
        return self.reduced_findings if self.reduced else self.findings

    @property
    def headline(self) -> Finding:
        """The first finding that no known issue explains, else the first."""
        findings = self.smallest_findings
        return next((saved.finding for saved in findings if saved.issue is None), findings[0].finding)


def saved_findings(outcome: Outcome) -> list[SavedFinding]:
    """An outcome's findings in the form in which they are saved."""
    return [SavedFinding(j.finding, j.issue.id if j.issue else None) for j in outcome.findings]


def failure_of(outcome: Outcome, *, vllm: str, release: str, connector: str | None, seed: int, case: int) -> SavedFailure:
    """The failure to save for an outcome."""
    return SavedFailure(
        kvoracle_failure=VERSION,
        vllm=vllm,
        release=release,
        connector=connector,
        seed=seed,
        case=case,
        findings=saved_findings(outcome),
        scenario=plain(outcome.scenario),
        predicted=outcome.predicted,
        observed=outcome.observed,
    )


def save(failure: SavedFailure, path: Path) -> None:
    """Writes one failure. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(failure))


def load_failure(path: str | Path) -> SavedFailure:
    """Reads a saved failure. Raises ScenarioError if the file is something else, OSError if it cannot be read."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=SavedFailure)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ScenarioError("$", f"not a saved failure: {error}") from None

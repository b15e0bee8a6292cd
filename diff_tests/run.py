"""One scenario, both sides: predict, observe, compare, judge."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from oracle.compare import compare
from oracle.contracts import contract_for, keeps_content
from oracle.findings import Finding
from oracle.known_issues import KnownIssue, match
from oracle.laws import judge
from sim.connector import GivenAnswers
from sim.history import History, Refusal, Scheduled, Updated
from sim.refusals import refusal
from sim.releases import Rules
from sim.scenario import Scenario
from sim.simulator import Simulator

if TYPE_CHECKING:
    from diff_tests.vllm_target.target import Target

Verdict = Literal["same", "different", "known", "refused"]


@dataclass(frozen=True)
class Judged:
    """A finding, and the known issue that explains it, if any."""

    finding: Finding
    issue: KnownIssue | None = None


@dataclass
class Outcome:
    """What running one scenario on both sides showed.

    predicted is None where the model does not predict: the direct driver, and connectors without a contract. notes say
    what was not judged.
    """

    scenario: Scenario
    verdict: Verdict
    observed: History
    predicted: History | None = None
    findings: list[Judged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def new_findings(self) -> list[Finding]:
        """The findings that no known issue explains, in the order in which they count."""
        return [judged.finding for judged in self.findings if judged.issue is None]

    @property
    def num_steps(self) -> int:
        return sum(isinstance(record, Scheduled) for record in self.observed)


def predict(scenario: Scenario, rules: Rules) -> History | None:
    """What the model says will happen; None where it has nothing to say."""
    contract = contract_for(scenario, rules)
    rule = contract.rule() if contract is not None else None
    if scenario.driver == "scheduler" and (scenario.connector is None or rule is not None):
        return Simulator(scenario, rules, rule).history()
    refused = refusal(scenario, rules)
    return [refused] if refused is not None else None


def follow(scenario: Scenario, observed: History, rules: Rules) -> History | None:
    """What the model says where only the connector's answers, and when its loads arrived, are taken from the observed
    history; None where its contract does not say how it loads."""
    contract = contract_for(scenario, rules)
    if not keeps_content(contract) or scenario.driver == "direct":
        return None
    asked = [question for record in observed if isinstance(record, Scheduled) for question in record.asked or ()]
    arrived = {record.step: record.arrived for record in observed if isinstance(record, Updated)}
    answers = GivenAnswers(asked, contract.loads_later, contract.requires_kv_delivery)
    return Simulator(scenario, rules, answers, arrived=arrived).history()


def run_on(target: Target, scenario: Scenario) -> Outcome:
    """Runs one scenario on a target and judges it by the target's rules."""
    history = target.run(scenario)
    return judge_run(target.effective(scenario), history, target.info.rules)


def judge_run(scenario: Scenario, observed: History, rules: Rules) -> Outcome:
    """Compares an observed history with the prediction and puts it before the laws."""
    predicted = predict(scenario, rules) or follow(scenario, observed, rules)
    if _same_refusal(predicted, observed):
        return Outcome(scenario, "refused", observed, predicted)
    findings: list[Finding] = []
    if predicted is not None and (divergence := compare(predicted, observed)) is not None:
        findings.append(divergence)
    contract = contract_for(scenario, rules)
    findings += judge(scenario, observed, rules, contract)
    judged = explain_known(findings, scenario, rules)
    return Outcome(scenario, verdict_of(judged), observed, predicted, judged, _notes(scenario, contract is not None))


def _same_refusal(predicted: History | None, observed: History) -> bool:
    """The configuration was refused on both sides, with the same type of exception; the words are free."""
    if not predicted or not observed:
        return False
    foreseen, seen = predicted[0], observed[0]
    return isinstance(foreseen, Refusal) and isinstance(seen, Refusal) and foreseen.type == seen.type


def explain_known(findings: Iterable[Finding], scenario: Scenario, rules: Rules) -> list[Judged]:
    """Each finding with its known issue; those without one come first, so that a new finding takes the headline."""
    judged = [Judged(finding, match(finding, scenario, rules)) for finding in findings]
    return sorted(judged, key=lambda j: j.issue is not None)


def verdict_of(judged: list[Judged]) -> Verdict:
    """same: nothing found; known: known issues only; different: anything else."""
    if not judged:
        return "same"
    return "known" if all(j.issue is not None for j in judged) else "different"


def _notes(scenario: Scenario, has_contract: bool) -> list[str]:
    if scenario.connector is None or has_contract:
        return []
    return [f"no contract for connector {scenario.connector.name}: selection, routing and fills were not judged"]

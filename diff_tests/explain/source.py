"""What is explained: a scenario, a saved failure, a recorded history or trace. Runs nothing but the model."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from diff_tests.failures import SavedFailure, load_failure
from diff_tests.loading import is_failure
from diff_tests.run import Judged, Outcome, judge_run, predict, verdict_of
from oracle.known_issues import load as load_issues
from sim.history import STATE_FIELDS, Acted, History, Scheduled, Start, StateRecord, Updated, from_lines
from sim.releases import NEWEST, RELEASES, Rules, rules_of
from sim.scenario import Scenario, ScenarioError

if TYPE_CHECKING:
    from diff_tests.live.check import Checked


class Case(NamedTuple):
    """A run to explain: what it showed, the rules that judged, and a line that says what ran."""

    outcome: Outcome
    rules: Rules
    title: str


def predicted_case(scenario: Scenario, rules: Rules) -> Case:
    """What the model says alone. Raises ScenarioError where it has nothing to say."""
    history = predict(scenario, rules)
    if history is None:
        reason = "the direct driver shows hand-made tables" if scenario.driver == "direct" else "its answers are unknown"
        raise ScenarioError("$", f"the model has nothing to say here: {reason}")
    title = f"The model, by the rules of vLLM {rules.release}; {_connector(scenario)}"
    return Case(Outcome(scenario, "same", history, history), rules, title)


def recorded_case(scenario: Scenario, history: History, rules: Rules, title: str) -> Case:
    """A history that is there already, judged anew."""
    return Case(judge_run(scenario, history, rules), rules, f"{title}; {_connector(scenario)}")


def history_case(scenario: Scenario, path: Path, release: str | None) -> Case:
    """A history of the scenario in a file of JSON lines. Raises ScenarioError, OSError."""
    try:
        history = from_lines(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ScenarioError("$", f"not a history: {error}") from None
    start = history[0] if history else None
    if start is None:
        raise ScenarioError("$", "the history is empty")
    known = start.release if isinstance(start, Start) else NEWEST
    rules = rules_of(release or (known if known in RELEASES else NEWEST))
    source = start.source if isinstance(start, Start) else "refusal"
    return recorded_case(scenario, history, rules, f"History of {source}, {known}, in {path.name}")


def saved_case(failure: SavedFailure, path: Path) -> Case | None:
    """A saved failure, from the history that was saved with its smallest scenario; None where there is none."""
    observed = failure.reduced_observed if failure.reduced else failure.observed
    if observed is None:
        return None
    rules, scenario = rules_of(failure.release), failure.smallest
    case = recorded_case(scenario, observed, rules, f"vLLM {failure.vllm}, as saved in {path.name}")
    if case.outcome.findings:
        return case
    issues = {issue.id: issue for issue in load_issues()}  # the fault shows in no single history
    judged = [Judged(s.finding, issues.get(s.issue) if s.issue else None) for s in failure.smallest_findings]
    outcome = Outcome(scenario, verdict_of(judged), observed, case.outcome.predicted, judged, case.outcome.notes)
    return case._replace(outcome=outcome)


def trace_case(checked: Checked, title: str) -> Case:
    """What the probe recorded of a live server, as it was judged. What a trace cannot see, the prefix cache and the free
    queue, is the model's word for as long as it could follow."""
    rebuilt = checked.rebuilt
    notes = list(checked.notes)
    if checked.num_followed < checked.num_steps:
        why = f": {checked.gap}" if checked.gap else ""
        notes.append(f"the model followed {checked.num_followed} of {checked.num_steps} steps{why}")
    observed = _seen_with(rebuilt.history, checked.predicted, checked.num_followed)
    outcome = Outcome(rebuilt.scenario, checked.verdict, observed, checked.predicted or None, checked.findings, notes)
    return Case(outcome, rebuilt.geometry.rules, title)


def _seen_with(observed: History, predicted: History, num_followed: int) -> History:
    """The observed records with the model's state behind the tables, through the steps that it followed."""
    seen: History = []
    for record, foreseen in zip_longest(observed, predicted[: len(observed)]):
        if isinstance(record, Start) and isinstance(foreseen, Start):
            sees = tuple(dict.fromkeys([*record.sees, *foreseen.sees]))
            record = replace(record, sees=sees, **_hidden_state(foreseen))
        elif isinstance(foreseen, (Scheduled, Updated, Acted)) and foreseen.step <= num_followed:
            record = replace(record, **_hidden_state(foreseen))
        seen.append(record)
    return seen


def _hidden_state(record: StateRecord) -> dict[str, Any]:
    return {field: getattr(record, field) for field in STATE_FIELDS if field != "tables"}


def is_trace(path: Path) -> bool:
    """Whether a path is what the probe wrote: its folder, or a file of it. Raises OSError."""
    if path.is_dir():
        return next(path.rglob("case-*.json"), None) is None and next(path.glob("*.jsonl"), None) is not None
    with path.open("rb") as file:
        return file.read(6).replace(b" ", b"").startswith(b'{"t":')


def failure_in(path: Path) -> Path:
    """The saved failure that a path names: the file, or the first one in a folder that `fuzz` wrote, a reduced one where
    there is any. Raises ScenarioError, OSError."""
    if not path.is_dir():
        return path
    failures = sorted(file for file in path.rglob("case-*.json") if is_failure(file))
    if not failures:
        raise ScenarioError("$", "no saved failure in this folder; name a scenario, a failure, or a run folder of `fuzz`")
    return next((file for file in failures if load_failure(file).reduced is not None), failures[0])


def _connector(scenario: Scenario) -> str:
    return scenario.connector.name if scenario.connector is not None else "no connector"

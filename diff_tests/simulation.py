"""The model alone, as a document and as text. Needs neither torch nor vLLM."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from oracle.contracts import Contract, contract_for
from sim.history import Acted, Failure, Refusal, Scheduled, State, Updated, resolve
from sim.releases import Rules
from sim.scenario import Scenario, ScenarioError
from sim.simulator import Simulator


def predicted_document(scenario: Scenario, rules: Rules) -> dict[str, Any]:
    """The JSON document of `simulate --json`.

    steps: per engine step what was scheduled, tables after scheduling, hits and external tokens of its admissions, what
    the connector has to fill, and the free queue after scheduling and after the update. Besides: `refusal` or `failure`
    where the release refuses the configuration or raises, and `actions` outside steps.
    Raises ScenarioError where the model has nothing to say.
    """
    if scenario.driver == "direct":
        raise ScenarioError("$.driver", "the direct driver shows hand-made tables; there is nothing to simulate")
    contract = contract_for(scenario, rules)
    if scenario.connector is not None and contract is None:
        raise ScenarioError("$.connector.name", f"no contract for {scenario.connector.name}: its answers are unknown")
    simulator = Simulator(scenario, rules, contract.rule() if contract is not None else None)
    document: dict[str, Any] = {"release": rules.release, "steps": [], "actions": []}
    for record, state in resolve(simulator.history()):
        if isinstance(record, Refusal):
            document["refusal"] = {"type": record.type, "message": record.message}
        elif isinstance(record, Failure):
            document["failure"] = {"step": record.step, "type": record.type, "message": record.message}
        elif isinstance(record, Scheduled):
            document["steps"].append(_step_document(record, state, contract))
        elif isinstance(record, Updated):
            document["steps"][-1]["free_after"] = state.free
        elif isinstance(record, Acted):
            document["actions"].append(
                {"after_step": record.step, "action": record.action, "request": record.request, "result": record.result}
            )
    return document


def _step_document(record: Scheduled, state: State, contract: Contract | None) -> dict[str, Any]:
    tables = state.tables or {}
    expected = {
        request_id: contract.loads(tables[request_id], record.hits.get(request_id, 0), num_external)
        for request_id, num_external in record.external.items()
        if contract is not None and num_external
    }
    return {
        "step": record.step,
        "scheduled": record.scheduled,
        "preempted": record.preempted,
        "tables": tables,
        "hits": record.hits,
        "external": record.external,
        "expected": expected,
        "free": state.free,
        "free_after": state.free,
    }


def print_prediction(console: Console, document: dict[str, Any]) -> None:
    """The same for a person."""

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    for step in document["steps"]:
        say(f"step {step['step']}")
        for name, num_tokens in step["scheduled"].items():
            extra = "".join(
                f", {step[key][name]} {label}"
                for key, label in (("hits", "local"), ("external", "external"))
                if step[key].get(name)
            )
            say(f"  {name}: {num_tokens} tokens{extra}")
        for name, tables in step["tables"].items():
            for group, table in enumerate(tables):
                fill = step["expected"].get(name)
                filled = f"  fill {fill[group]}" if fill is not None else ""
                say(f"  {name} group {group}: {table}{filled}")
        for name in step["preempted"]:
            say(f"  {name}: preempted")
    for action in document["actions"]:
        subject = f" {action['request']}" if action["request"] else ""
        say(f"after step {action['after_step']}: {action['action']}{subject}: {action['result']}")
    for end in ("refusal", "failure"):
        if end in document:
            say(f"{end}: {document[end]['type']}: {document[end]['message']}")

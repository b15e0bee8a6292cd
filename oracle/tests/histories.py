"""Histories for the tests: the model's, completed with what a faultless connector and worker would add."""

from __future__ import annotations

from oracle.contracts import contract_for
from oracle.findings import Finding
from oracle.laws import judge
from sim.history import STATE_FIELDS, History, Scheduled, Selection, Selections, Start, Written, pack, unpack
from sim.releases import NEWEST, rules_of
from sim.scenario import Scenario, loads
from sim.simulator import Simulator

RULES = rules_of(NEWEST)


def scenario(engine: str, groups: str, steps: str, connector: str = "{name: DecodeBenchConnector}") -> Scenario:
    """A scenario from YAML fragments in flow style."""
    return loads(f"kvoracle: 1\nengine: {engine}\nconnector: {connector}\ngroups: {groups}\nsteps: {steps}\n")


def history_of(case: Scenario) -> History:
    """What a faultless vLLM does, with every state field spelled out in every record, free to be tampered with."""
    contract = contract_for(case, RULES)
    history = Simulator(case, RULES, contract.rule() if contract else None).history()
    state: dict[str, object] = {}
    for record in history:
        for field in STATE_FIELDS if hasattr(record, "tables") else ():
            if getattr(record, field) is not None:
                state[field] = getattr(record, field)
            else:
                setattr(record, field, state.get(field))
        if isinstance(record, Scheduled) and contract is not None:
            assert record.tables is not None
            selected = {
                request: Selection(contract.loads(record.tables[request], record.hits[request], num), num)
                for request, num in record.external.items()
                if num
            }
            record.selected = selected
            record.received = selected
            record.written = filled(case, selected)
        elif isinstance(record, Start) and contract is not None:
            record.written = []
    return unpack(pack(history))  # nothing is shared any more


def filled(case: Scenario, received: Selections) -> list[Written]:
    """A fill as it should be: every layer of every group."""
    contract = contract_for(case, RULES)
    assert contract is not None
    entries = []
    for group, spec in enumerate(case.groups):
        blocks = [block for selection in received.values() for block in selection.groups[group]]
        for layer in range(spec.layers if blocks else 0):
            entries.append(Written(group, f"g{group}.l{layer}", blocks, "filled", contract.values[group].element.hex(), 1))
    return entries


def scheduled(history: History, step: int) -> Scheduled:
    """The schedule record of an engine step."""
    return next(record for record in history if isinstance(record, Scheduled) and record.step == step)


def verdicts(case: Scenario, history: History) -> list[Finding]:
    """What the laws say, by the newest release's rules and the connector's contract."""
    return judge(case, history, RULES, contract_for(case, RULES))


def causes(case: Scenario, history: History, law: int | None = None) -> list[str]:
    """Slugs of the findings, of one law or of all."""
    return [finding.cause for finding in verdicts(case, history) if law in (None, finding.law)]

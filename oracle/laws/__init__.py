"""The laws: what must hold of any correct allocator, scheduler, connector and worker, whatever vLLM does about it.

Each law has a number, a sentence and a check: a short function that looks at one record of a history and reports what
breaks it. The checks share a `Trial`: what the replay of the history shows so far, and the contract of the connector.
"""

from __future__ import annotations

from functools import cache

from oracle.contracts import Contract
from oracle.findings import Finding
from oracle.laws import answers, connector, content, events, kept, order, pool, progress
from oracle.laws.progress import same_history
from oracle.laws.trial import LAWS, Check, End, Law, Trial
from sim.history import History
from sim.releases import Rules
from sim.scenario import Scenario

__all__ = [
    "LAWS",
    "Law",
    "answers",
    "connector",
    "content",
    "events",
    "judge",
    "kept",
    "order",
    "pool",
    "progress",
    "same_history",
    "sentence",
]

LAWS.sort(key=lambda law: law.number)


def judge(scenario: Scenario, history: History, rules: Rules, contract: Contract | None) -> list[Finding]:
    """All breaks of the laws in a history, in the order in which they happen.

    Without a contract laws 4 and 6 are off; of a history of the direct driver only the laws about connectors judge.
    """
    trial = Trial(scenario, rules, contract)
    checks = _checks_by_record(scenario.driver == "direct")
    advance = trial.replay.advance
    for record in history:
        advance(record)
        for check in checks.get(type(record), ()):
            check(trial, record)
    for check in checks[End] if history else ():
        check(trial, End(history[-1]))
    return trial.findings


@cache
def _checks_by_record(is_direct: bool) -> dict[type, list[Check]]:
    checks: dict[type, list[Check]] = {}
    for law in LAWS:
        for record_type in law.looks_at if law.judges_direct or not is_direct else ():
            checks.setdefault(record_type, []).append(law.check)
    return checks


def sentence(number: int) -> str:
    """What a law says. Raises StopIteration for a number that no law has."""
    return next(law.sentence for law in LAWS if law.number == number)

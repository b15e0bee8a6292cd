"""Runs to explain: what a faultless vLLM does, tampered with as an old connector would."""

from __future__ import annotations

from diff_tests.explain.story import Story
from diff_tests.run import Outcome, judge_run
from oracle.contracts import contract_for
from oracle.tests.histories import RULES, filled, history_of, scenario, scheduled
from sim.history import History, Selection
from sim.scenario import Scenario

PREFIX_STEPS = """[
  {add: {id: A, prompt: [[sys, 1616], [a, 5]], max_tokens: 8}}, {step: 2},
  {add: {id: B, prompt: [[sys, 1616], [b, 5]], max_tokens: 8}}, {run: 50}]"""


def prefix_case(steps: str = PREFIX_STEPS) -> Scenario:
    """A prompt that shares 1,616 of its 1,621 tokens with a request that still runs."""
    return scenario("{blocks: 300, max_model_len: 2048}", "[{kind: full, block: 16}]", steps)


def overwriting(case: Scenario, step: int, request: str, blocks: list[int]) -> History:
    """The connector selects these blocks of group 0 instead, and the worker fills what it is told to."""
    history = history_of(case)
    record = scheduled(history, step)
    assert record.selected is not None
    wrong = Selection([blocks, *record.selected[request].groups[1:]], record.selected[request].tokens)
    record.selected = record.received = record.selected | {request: wrong}
    record.written = filled(case, record.received)
    return history


def prefix_outcome() -> Outcome:
    """The prefix bug of 0.29.0: the fill starts at block 0 of the table, which A and B share."""
    case = prefix_case()
    return judge_run(case, overwriting(case, 3, "B", [1]), RULES)


def story_of(case: Scenario, history: History | None = None) -> Story:
    """The story of a history, by default of a faultless one."""
    return Story(case, history if history is not None else history_of(case), RULES, contract_for(case, RULES))

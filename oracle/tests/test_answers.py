"""Law 4, answers: how many external tokens the connector says it has, from both sides."""

from __future__ import annotations

import pytest

from oracle.tests.histories import causes, history_of, scenario, scheduled, verdicts
from sim.history import Acted

# A replays itself under the same ID, is sent back once by a reset, and somebody else's answer is asked for between.
LIVES = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[s, 13]], max_tokens: 2}}, {run: 50}, {add: {id: B, prompt: [[b, 9]], max_tokens: 8}}, "
    "{step: 3}, {reset_prefix_cache: {running: true}}, {add: {id: A, prompt: [[t, 21]], max_tokens: 2}}, {run: 50}]",
)
_SECOND_LIFE = 6  # the engine step in which A is asked about again


def test_a_contracts_own_answers_keep_the_law():
    history = history_of(LIVES)
    asked = [record.asked for record in history if getattr(record, "asked", None)]
    assert asked == [[("A", 0, 12)], [("B", 0, 8)], [("B", 0, 0), ("A", 0, 20)]]
    assert verdicts(LIVES, history) == []


@pytest.mark.parametrize(
    ("answer", "cause"), [(0, "request_not_forgotten"), (19, "too_few_external"), (21, "too_many_external")]
)
def test_a_wrong_answer_is_named(answer, cause):
    history = history_of(LIVES)
    record = scheduled(history, _SECOND_LIFE)
    assert record.asked is not None
    record.asked[1] = ("A", 0, answer)
    (finding,) = [found for found in verdicts(LIVES, history) if found.kind == "hit"]
    assert (finding.law, finding.cause, finding.request) == (4, cause, "A")
    assert (finding.expected, finding.observed) == (20, answer)
    assert "21 tokens, 0 of them local" in finding.message


def test_a_request_that_was_sent_back_gets_nothing_again():
    history = history_of(LIVES)
    record = scheduled(history, _SECOND_LIFE)
    assert record.asked is not None
    record.asked[0] = ("B", 0, 11)
    assert causes(LIVES, history, law=4) == ["too_many_external"]


def test_blocks_that_nobody_would_ever_free():
    case = scenario(
        "{blocks: 40, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 13]], max_tokens: 9}}, {step: 1}, {abort: A}, {run: 50}]",
    )
    history = history_of(case)
    record = next(r for r in history if isinstance(r, Acted) and r.action == "abort")
    record.result = "delayed"
    assert causes(case, history, law=8) == ["blocks_kept"]

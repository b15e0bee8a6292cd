"""What a person reads: one screen, 80 columns, the same words with and without colour."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from diff_tests.explain.actual import Checked, check_pasted, parse_pasted
from diff_tests.explain.document import document
from diff_tests.explain.explanation import Explanation, explain
from diff_tests.explain.rules import RULES as WORDED_RULES
from diff_tests.explain.rules import deciding
from diff_tests.explain.text import print_checked, print_explanation
from diff_tests.run import Judged, Outcome, judge_run
from diff_tests.tests.explain_cases import overwriting, prefix_case, prefix_outcome, story_of
from oracle.findings import Finding
from oracle.tests.histories import RULES, history_of, scenario, scheduled
from sim.history import Failure, Selection, Written
from sim.refusals import refusal
from sim.releases import RELEASES

ROOT = Path(__file__).resolve().parents[2]


def _text(explanation: Explanation, colour: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, highlight=False, color_system="standard" if colour else None)
    print_explanation(console, explanation)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _explained(outcome: Outcome, request: str | None = None, step: int | None = None) -> Explanation:
    return explain(outcome, RULES, "a test", request, step)


PREFIX_HEAD = """\
Step 3, request B, group 0 (full): the connector overwrote block 1 (position 0),
which A and B share and which holds tokens [0, 16) of A; block 103 (position
101), meant for external tokens [1616, 1620), stayed empty.

B, group 0 (full, 16 tokens a block), after step 3
position block  tokens       from              E S R W
0        1      [0, 16)      shared with A     - S R W  OVERWRITTEN
1..100   2..101 [16, 1616)   shared with A     - - - -
101      103    [1616, 1621) fresh, never used E - - -  STAYED EMPTY
E expected, S selected, R received, W written; - not, ? not known

  step 1 A admitted: 0 hit + 1620 external, 1 computed
  step 2 A computes 1
> step 3 A computes 1; B admitted: 1616 hit + 4 external, 1 computed
  step 4 A and B compute 1
  step 5 A and B compute 1

Lookup of B in step 3: 1616 of 1621 tokens are hit
  group 0: as far as a hit may go: the last token is always computed anew, and
           the 4 before it fill no block of 16

Law 4: Per group exactly the blocks that the connector's contract derives, token
by token, from the external tokens and the block table are selected, in the step
of the admission.
Rule 7.2: Of each group the blocks that hold external tokens, and no others:"""


def test_the_prefix_bug_is_understood_without_scrolling():
    """Request, group, position, the shared block that was overwritten, who shares it, and the block that stayed empty."""
    text = _text(_explained(prefix_outcome()))
    assert text.startswith(PREFIX_HEAD)
    assert len(text.splitlines()) <= 28
    assert all(len(line) <= 80 for line in text.splitlines())


def test_colour_adds_nothing_to_the_words():
    explanation = _explained(prefix_outcome())
    coloured = _text(explanation, colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == _text(explanation).splitlines()


def test_a_run_without_faults_says_so():
    case = prefix_case()
    text = _text(_explained(judge_run(case, history_of(case), RULES)))
    assert text.startswith("Nothing is wrong in 10 steps: the model and vLLM agree, and no law is broken.")
    assert "E S R W  right" in text


def test_a_request_and_a_step_can_be_chosen():
    explanation = _explained(prefix_outcome(), request="A", step=2)
    assert [(table.request, table.step) for table in explanation.tables] == [("A", 2)]
    with pytest.raises(ValueError, match="request Z: not in this history; it has A and B"):
        _explained(prefix_outcome(), request="Z")
    with pytest.raises(ValueError, match="it has steps 1 to 10"):
        _explained(prefix_outcome(), step=99)


TWO_GROUPS = scenario(
    "{blocks: 60, max_model_len: 256}",
    "[{kind: full, block: 16}, {kind: sliding_window, block: 16, window: 32}]",
    "[{add: {id: A, prompt: [[a, 100]], max_tokens: 4}}, {run: 9}]",
)


def _tampered(change) -> Explanation:
    history = history_of(TWO_GROUPS)
    change(scheduled(history, 1))
    return _explained(judge_run(TWO_GROUPS, history, RULES))


def _rows(explanation: Explanation, group: int) -> list[tuple[object, ...]]:
    (table,) = [table for table in explanation.tables if table.group == group]
    return [(row.position, row.block, row.verdict) for row in table.rows if row.is_wrong]


def test_selected_nulls_stand_at_their_positions():
    def select_nulls(record):
        groups = record.selected["A"].groups
        record.selected = record.received = {"A": Selection([groups[0], [0, 0, 0, 0, *groups[1]]], 99)}

    explanation = _tampered(select_nulls)
    assert "selected the null block (positions 0..3)" in explanation.headline
    assert _rows(explanation, 1) == [(position, 0, "null selected") for position in range(4)]


def test_a_block_of_the_other_group_is_named_with_its_place():
    def route_to_the_other_group(record):
        groups = record.selected["A"].groups
        record.selected = record.received = {"A": Selection([groups[0], groups[0][:3]], 99)}

    explanation = _tampered(route_to_the_other_group)
    strangers = [row for table in explanation.tables for row in table.rows if row.position is None]
    assert [(row.block, row.origin, row.verdict) for row in strangers] == [
        (block, "A's, group 0", "not in this table") for block in (1, 2, 3)
    ]


def test_what_did_not_arrive_and_what_was_written_wrongly():
    def lose_the_last(record):
        groups = record.selected["A"].groups
        record.received = {"A": Selection([groups[0][:-1], groups[1]], 99)}
        record.written = [Written(0, "g0.l0", groups[0][:-1], "filled", "763c", 1), record.written[1]]

    assert _rows(_tampered(lose_the_last), 0) == [(6, 7, "stayed empty")]

    def write_another_value(record):
        record.written = [Written(0, "g0.l0", [1, 2], "wrong_value", "0000", 8), *record.written]

    assert _rows(_tampered(write_another_value), 0) == [(0, 1, "wrong value"), (1, 2, "wrong value")]


def test_another_requests_fill_of_a_shared_block_is_no_fault():
    case = prefix_case("[{add: {id: A, prompt: [[s, 64], [a, 5]]}}, {add: {id: B, prompt: [[s, 64], [b, 5]]}}, {run: 40}]")
    explanation = _explained(judge_run(case, history_of(case), RULES), request="B")
    assert not [row for table in explanation.tables for row in table.rows if row.is_wrong]


def test_a_divergence_shows_the_models_block_beside():
    case = prefix_case()
    history = history_of(case)
    for record in history:
        for table in (getattr(record, "tables", None) or {}).get("B", ()):
            table[101] = 250
    explanation = _explained(judge_run(case, history, RULES))
    text = _text(explanation)
    assert "position 101: the model says block 103, vLLM has block 250" in " ".join(text.split())
    assert re.search(r"101 +250 +103 .*NOT AS PREDICTED", text)
    assert "Rule 1.3: New blocks come from the head of the free queue" in text


def test_an_exception_ends_the_story():
    case = prefix_case()
    history = history_of(case)[:4]
    history.append(Failure(step=2, type="ValueError", phase="schedule", message="Cannot get 3 free blocks"))
    text = _text(_explained(judge_run(case, history, RULES)))
    assert "ValueError" in text.splitlines()[0] + text.splitlines()[1]
    assert "Note: ended by ValueError: Cannot get 3 free blocks" in text


def test_a_refusal_has_no_steps_to_show():
    case = scenario("{blocks: 40, dcp: 2}", "[{kind: circular, block: 16}]", "[{step: 1}]")

    rules = RELEASES["0.29.0"]
    refused = refusal(case, rules)
    assert refused is not None
    text = _text(explain(judge_run(case, [refused], rules), rules, "a test"))
    assert refused.type in text


# ------------------------------------------------------------------------------------------------------------ the rules


def test_every_rule_names_the_line_of_the_code_that_carries_it_out():
    for rule in WORDED_RULES.values():
        path, _, line = rule.place.partition(":")
        text = (ROOT / path).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        assert any(f"def {rule.function.__name__}(" in candidate for candidate in text[:8]), rule.section


def test_every_cause_of_a_divergence_has_a_rule_of_its_own():
    from oracle import compare

    tables = (compare._SCHEDULED, compare._ACTED_UPON, compare._UPDATED, compare._STATE)
    for kind, cause in {entry for table in tables for entry in table.values()}:
        (first, *_) = deciding(Finding(kind=kind, cause=cause, message=""))
        assert first.section != "9", cause


# ---------------------------------------------------------------------------------------------------------- pasted lists


def _checked(text: str, step: int | None = None) -> Checked:
    return check_pasted(story_of(prefix_case()), parse_pasted(text), step)


def test_a_pasted_fill_list_is_held_against_the_blocks_to_be_filled():
    assert _checked("B:0=[103]").is_right
    assert _checked("B:0=[103]").headline == "The list is right: the blocks to be filled in step 3."


def test_a_pasted_table_is_held_against_the_table():
    ids = [*range(1, 102), 103]
    assert _checked(f"B:0={ids}").against == "the block table after step 3"
    assert _checked(f"B:0={ids}").is_right


def test_each_wrong_id_says_what_it_is():
    ids = [*range(1, 100), 102, 0, 103, 999, 250]
    checked = _checked(f"B:0={ids}")
    assert not checked.is_right
    kinds = {one.block: (one.kind, one.words) for one in checked.ids[99:]}
    assert kinds == {
        102: ("foreign", "foreign: A's, group 0, position 101"),
        0: ("null", "the null block"),
        103: ("right", "right"),
        999: ("unknown", "no block of this pool of 300"),
        250: ("foreign", "foreign: free, never used"),
    }
    assert checked.missing == [100, 101]


def test_a_shifted_list_says_by_how_much():
    checked = _checked(f"A:0={[*range(2, 103)]}")
    assert {(one.kind, one.shift) for one in checked.ids} == {("shifted", -1)}
    assert checked.headline.endswith("; shifted by -1; missing: 1.")
    file = io.StringIO()
    print_checked(Console(file=file, width=80, highlight=False), checked)
    assert "shifted by -1: belongs at index 1" in file.getvalue()


def test_own_blocks_that_are_not_to_be_filled():
    """The list that the connector of 0.29.0 selects."""
    checked = _checked("B:0=[1]")
    assert checked.against == "the blocks to be filled in step 3"
    assert [(one.kind, one.words) for one in checked.ids] == [
        ("own", "B's own, position 0 (shared with A), but not in this list")
    ]
    assert checked.headline == "0 of 1 ID right, held against the blocks to be filled in step 3; missing: 103."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("B=[1]", "is not of the form"),
        ("B:0=[1, x]", "'x' is not a block ID"),
        ("B:7=[1]", "there are groups 0 to 0"),
        ("Z:0=[1]", "request Z: holds no blocks; there is A and B"),
    ],
)
def test_a_list_that_cannot_be_read(text: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        _checked(text)


def test_lists_are_read_as_logs_print_them():
    assert parse_pasted("cmpl-1:0-0:1=\n[ 1  2\n 3]").ids == [1, 2, 3]
    assert parse_pasted("cmpl-1:0-0:1=[]") == ("cmpl-1:0-0", 1, [])
    assert parse_pasted("A:0=(4, 5,)").ids == [4, 5]


# -------------------------------------------------------------------------------------------------------------- document


def test_the_document_says_the_same_as_the_text():
    explanation = _explained(prefix_outcome())
    raw = document(explanation, [_checked("B:0=[103]")])
    assert raw["headline"] == explanation.headline
    (table,) = raw["tables"]
    assert table["rows"][0] == {
        "position": 0,
        "block": 1,
        "predicted": 1,
        "tokens": [0, 16],
        "from": "shared with A",
        "expected": False,
        "selected": True,
        "received": True,
        "written": True,
        "verdict": "overwritten",
    }
    assert raw["blocks"]["1"][0]["words"].startswith("A takes it")
    assert raw["lookups"][0]["groups"][0]["fate"]["kind"] == "limit"
    assert raw["actual"][0]["ids"][0]["kind"] == "right"


def test_overwriting_for_real_needs_the_tampering():
    """The helper that plants the bug does plant it: without it the same run is clean."""
    case = prefix_case()
    assert judge_run(case, history_of(case), RULES).findings == []
    assert judge_run(case, overwriting(case, 3, "B", [1]), RULES).findings[0].finding.cause == "starts_early"


@pytest.mark.parametrize(
    ("kind", "law", "cause", "words"),
    [
        ("selection", 4, "starts_early", "are selected, in the step of the admission"),
        ("hit", 4, "wrong_answer", "Every question of the scheduler"),
        ("fill", 6, "wrong_value", "A fill leaves the contract's value in every byte"),
        ("fill", 6, "wrong_distribution", "Values that are drawn at random"),
        ("routing", 5, "wrong_order", "exactly what the scheduler selected"),
    ],
)
def test_of_a_law_with_several_sentences_the_right_one_is_said(kind: str, law: int, cause: str, words: str):
    outcome = prefix_outcome()
    finding = Finding(kind=kind, law=law, cause=cause, step=3, request="B", group=0, message="a fault")  # type: ignore[arg-type]
    outcome.findings = [Judged(finding)]
    (said, *_) = [sentence for title, sentence, _ in _explained(outcome).decided_by if title == f"law {law}"]
    assert words in said

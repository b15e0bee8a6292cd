"""Mutants: every kind of change is made, each alone, and the tester finds what it should."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from diff_tests.mutants import (
    Equivalent,
    Run,
    Subject,
    Trial,
    directed_cases,
    document,
    installed_source,
    load_equivalent,
    named_subjects,
    stale,
    subjects_of,
)
from diff_tests.mutation import mutants
from diff_tests.shard import Cases
from diff_tests.vllm_target.defects import DEFECTS
from diff_tests.vllm_target.target import Target
from sim.releases import rules_of
from sim.scenario import Mamba

SOURCE = '''
"""A docstring stays."""
import logging
logger = logging.getLogger()

def f(a: int, b=2, *c):
    """So does this."""
    logger.info("and log lines %d", 3)
    if a < b and c:
        a += 1
    for x in c[1:]:
        g(a, x)
    return a // 2, True
'''


def changes(operator: str) -> set[tuple[str, str]]:
    return {(m.before.strip(), m.after.strip()) for m in mutants(SOURCE) if m.operator == operator}


@pytest.mark.parametrize(
    ("operator", "before", "after"),
    [
        ("comparison", "if a < b and c:", "if a <= b and c:"),
        ("arithmetic", "a += 1", "a -= 1"),
        ("arithmetic", "return (a // 2, True)", "return (a * 2, True)"),
        ("boundary", "for x in c[1:]:", "for x in c[2:]:"),
        ("constant", "return (a // 2, True)", "return (a // 2, False)"),
        ("condition", "if a < b and c:", "if a < b or c:"),
        ("condition", "if a < b and c:", "if c:"),
        ("condition", "if a < b and c:", "if not (a < b and c):"),
        ("statement deletion", "g(a, x)", "pass"),
        ("slice", "for x in c[1:]:", "for x in c[:]:"),
        ("loop", "for x in c[1:]:", "for x in ():"),
        ("loop", "", "break"),
        ("return", "return (a // 2, True)", "return None"),
        ("swapped argument", "g(a, x)", "g(x, a)"),
    ],
)
def test_every_kind_of_change_is_made(operator: str, before: str, after: str) -> None:
    assert (before, after) in changes(operator)


def test_each_mutant_is_one_change_that_parses_and_says_where() -> None:
    found = mutants(SOURCE)
    original = ast.unparse(ast.parse(SOURCE))
    assert len({m.source for m in found}) == len({m.key for m in found}) == len(found)
    for mutant in found:
        ast.parse(mutant.source)
        assert mutant.source != original
        assert mutant.line > 5
        assert mutant.scope == "f"
        assert "docstring" not in mutant.diff
        assert "log lines" not in mutant.diff


def test_changes_that_read_alike_have_keys_of_their_own() -> None:
    twice = mutants(
        "def f(a):\n    for x in a:\n        if x:\n            continue\n        if g(x):\n            continue\n"
    )
    alike = [m for m in twice if m.operator == "statement deletion" and m.before.strip() == "continue"]
    assert [m.nth for m in alike] == [0, 1]
    assert len({m.key for m in twice}) == len(twice)


def test_the_same_source_gives_the_same_keys_wherever_it_stands() -> None:
    moved = SOURCE.replace("import logging", "import logging\n\n\n")
    assert [m.key for m in mutants(SOURCE)] == [m.key for m in mutants(moved)]


def test_what_is_judged_equivalent_is_checked_against_the_text() -> None:
    found = mutants(SOURCE)
    one = found[0]
    entries = {
        one.key: Equivalent(one.key, one.scope, one.operator, "because"),
        "gone": Equivalent("gone", one.scope, one.operator, "because"),
        found[1].key: Equivalent(found[1].key, "another function", found[1].operator, "because"),
    }
    assert stale(entries, found) == ["gone", found[1].key]


def test_no_entry_of_the_list_is_stale_on_the_release_it_was_made_for(target: Target) -> None:
    if target.info.version != "0.32.0":
        pytest.skip("the list was made for the connector of 0.32.0")
    source = installed_source(target, "DecodeBenchConnector")
    assert stale(load_equivalent(), mutants(source)) == []


def test_an_entry_listed_twice_is_an_error(tmp_path: Path) -> None:
    entry = '[[mutant]]\nkey = "k"\nfunction = "a"\noperator = "b"\nreason = "r"\n'
    path = tmp_path / "list.toml"
    path.write_text(2 * entry)
    with pytest.raises(ValueError, match="listed twice: k"):
        load_equivalent(path)


def test_directed_cases_come_first_and_the_largest_last() -> None:
    first = directed_cases("DecodeBenchConnector", "0.32.0")
    assert len(first) > 20
    assert all(scenario.connector is not None and scenario.connector.name == "DecodeBenchConnector" for scenario in first)
    cases = Cases(1, connector="DecodeBenchConnector", first=first)
    rules = rules_of("0.32.0")
    assert [cases.case(i, rules) for i in range(len(first))] == list(first)
    assert cases.case(len(first), rules) == Cases(1, connector="DecodeBenchConnector").case(0, rules)
    assert any(isinstance(group, Mamba) and group.states for group in first[-1].groups)


def test_every_named_defect_says_what_is_wrong_and_is_found(target: Target) -> None:
    info = target.info
    named = named_subjects(installed_source(target, "DecodeBenchConnector"))
    assert {subject.name for subject in named} >= DEFECTS.keys()
    assert all(len(subject.about) > 40 for subject in named)
    first = directed_cases("DecodeBenchConnector", info.rules.release)
    trial = Trial("current", "DecodeBenchConnector", seed=1, num_cases=120, jobs=2, first=first)
    results = Run(trial, named).results()
    assert [result.subject.name for result in results if not result.killed] == []


def test_the_original_survives_and_a_mutant_of_the_selection_does_not(target: Target) -> None:
    source = installed_source(target, "DecodeBenchConnector")
    wrong = next(m for m in mutants(source) if m.scope.endswith("update_state_after_alloc") and m.operator == "arithmetic")
    broken = Subject("broken", "does not import", "import nothing_like_this\n" + source)
    trial = Trial("current", "DecodeBenchConnector", seed=1, num_cases=24, jobs=2)
    results = Run(trial, [Subject("original", "as it is", source), *subjects_of([wrong]), broken]).results()
    assert [(r.killed, r.at_import) for r in results] == [(False, False), (True, False), (True, True)]
    assert results[1].finding is not None
    shown = document(trial, results, {})
    assert shown["verdict"] == "fail"
    assert [s["name"] for s in shown["survivors"]] == ["original"]
    assert shown["by_law"]["import"] == 1

"""Known issues: the list is well formed, and an entry explains its own findings only."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle.findings import Finding
from oracle.known_issues import KnownIssue, explains, load, match, parse
from oracle.laws import LAWS
from oracle.tests.histories import scenario
from sim.releases import RELEASES, rules_of
from sim.scenario import load as load_scenario

ROOT = Path(__file__).parents[2]
CASE = scenario(
    "{blocks: 20, max_model_len: 64}",
    "[{kind: full, block: 4, kernel_block: 2, dtype: fp8_e4m3}, {kind: full, block: 4, dtype: bfloat16}]",
    "[{add: {id: A, prompt: [[a, 9]]}}]",
    "{name: DecodeBenchConnector, extra: {fill_std: 0.5}}",
)
ENTRY = """
[[issue]]
id = "one"
title = "a title"
reason = "a reason"
releases = ["0.30.0"]
law = 6
cause = "wrong_value"
scenario = "a.yaml"
script = "a.py"
"""


def finding(law: int | None = 6, cause: str = "wrong_value", group: int | None = 0) -> Finding:
    kind = CASE.groups[group].kind if group is not None else None
    return Finding(kind="fill", law=law, cause=cause, message="", group=group, group_kind=kind)


def entry(more: str = "") -> KnownIssue:
    (issue,) = parse(ENTRY + more)
    return issue


def explained(issue: KnownIssue, found: Finding, release: str = "0.30.0") -> bool:
    return explains(issue, found, CASE, rules_of(release))


@pytest.mark.parametrize("issue", load(), ids=lambda issue: issue.id)
def test_every_entry_points_at_what_is_there(issue: KnownIssue) -> None:
    assert (ROOT / issue.script).is_file()
    assert load_scenario(ROOT / issue.scenario).steps
    assert set(issue.releases) <= RELEASES.keys()
    assert issue.law in {law.number for law in LAWS}
    assert "vllm" in (ROOT / issue.script).read_text()
    assert not {"sim", "oracle", "diff_tests"} & {
        line.split()[1].split(".")[0]
        for line in (ROOT / issue.script).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }


def test_the_bugs_that_are_to_be_found_are_not_known_issues() -> None:
    for cause in ("starts_early", "null_selected", "wrong_block_size"):
        for issue in load():
            assert not explains(issue, finding(4, cause), CASE, rules_of("0.29.0"))
    assert match(finding(6, "wrong_layers", 1), CASE, rules_of("0.29.0")) is None
    assert match(finding(6, "wrong_value", 1), CASE, rules_of("0.29.0")) is None


def test_release_law_and_cause_must_fit() -> None:
    assert explained(entry(), finding())
    assert not explained(entry(), finding(), "0.31.0")
    assert not explained(entry(), finding(law=4))
    assert not explained(entry(), finding(law=None))
    assert not explained(entry(), finding(cause="wrong_rows"))


@pytest.mark.parametrize(
    ("condition", "group", "fits"),
    [
        ('groups = ["full"]', 0, True),
        ('groups = ["circular"]', 0, False),
        ('groups = ["full"]', None, False),
        ("where = { kernel_block_smaller = true }", 0, True),
        ("where = { kernel_block_smaller = true }", 1, False),
        ('where = { dtype = ["fp8_e4m3"] }', 0, True),
        ('where = { dtype = ["fp8_e4m3"] }', 1, False),
        ('where = { connector_option = "fill_std" }', 1, True),
        ('where = { connector_option = "startup_fill" }', 1, False),
        ("where = { fill_out_of_range = true }", None, True),
        ("where = { context_parallel = true }", 0, False),
        ('where = { dtype = ["fp8_e4m3"], kernel_block_smaller = false }', 0, False),
    ],
)
def test_conditions(condition: str, group: int | None, fits: bool) -> None:
    assert explained(entry(condition), finding(group=group)) == fits


@pytest.mark.parametrize(
    ("group", "extra", "out_of_range"),
    [
        ("{kind: full, block: 4, dtype: float16}", "{fill_mean: 70000.0}", True),
        ("{kind: full, block: 4, dtype: float16}", "{fill_mean: 60000.0}", False),
        ("{kind: full, block: 4}", "{fill_std: 0.5}", False),
        ("{kind: full, block: 4, dtype: fp8_e5m2}", "{fill_mean: -2.0}", True),
        ("{kind: full, block: 4, dtype: fp8_e5m2}", "{fill_mean: 2.0}", False),
        ("{kind: mamba, block: 64}", "{fill_mean: 200.0}", True),
        ("{kind: mamba, block: 64}", "{fill_mean: -100.0}", False),
    ],
)
def test_fills_that_memory_cannot_take(group: str, extra: str, out_of_range: bool) -> None:
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        f"[{group}]",
        "[{add: {id: A, prompt: [[a, 9]]}}]",
        f"{{name: DecodeBenchConnector, extra: {extra}}}",
    )
    issue = entry("where = { fill_out_of_range = true }")
    assert explains(issue, finding(group=None), case, rules_of("0.30.0")) == out_of_range


def test_a_list_that_is_not_well_formed() -> None:
    with pytest.raises(ValueError, match="unknown condition"):
        entry('where = { colour = "red" }')
    with pytest.raises(ValueError, match="same id"):
        parse(ENTRY + ENTRY)
    with pytest.raises(ValueError, match="unknown field"):
        entry("colour = 1")

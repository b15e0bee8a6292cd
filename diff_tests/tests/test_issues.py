"""`kvoracle issues`: the list, and a page of evidence for each known issue."""

from __future__ import annotations

import json

import pytest

from diff_tests import cli, issues
from diff_tests.run import run_on
from diff_tests.tests.conftest import started
from diff_tests.tests.test_cli import _Shared
from diff_tests.vllm_target.releases import installed_version
from oracle.known_issues import load


def test_the_list_has_every_issue(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["issues"]) == 0
    shown = capsys.readouterr().out
    assert all(issue.id in shown for issue in load())
    assert cli.run_cli(["issues", "--json"]) == 0
    assert [issue["id"] for issue in json.loads(capsys.readouterr().out)["issues"]] == [issue.id for issue in load()]


@pytest.mark.parametrize("issue", load(), ids=lambda issue: issue.id)
def test_a_page_holds_the_evidence(issue) -> None:
    version = issues.affected_release(issue, installed_version(), issue.releases)
    found = issues.findings_of(issue, run_on(started(version), issues.scenario_of(issue)))
    text = issues.page(issue, version, found)
    assert found
    for finding in found:
        assert f"* {finding.message}\n" in text
    assert f"What must hold (law {issue.law}): " in text
    assert f"On vLLM {version}, with the scenario below:" in text
    assert f"Affected: vLLM {issue.releases[0]}" in text
    assert "```yaml\nkvoracle: 1\n" in text
    assert f"def test_{issue.id.replace('-', '_')}() -> None:" in text


def test_the_command_prints_a_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started()
    monkeypatch.setattr(cli, "_Started", _Shared)
    assert cli.run_cli(["issues", "kernel-rows", "--vllm", "current"]) == 0
    assert capsys.readouterr().out.startswith("# Block IDs are taken for rows of kernel blocks\n")
    assert cli.run_cli(["issues", "kernel-rows", "--vllm", "current", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["id"], shown["vllm"]) == ("kernel-rows", installed_version())
    assert shown["findings"][0]["cause"] == "wrong_rows"
    assert cli.run_cli(["issues", "nothing"]) == 2
    assert "no known issue 'nothing'; `kvoracle issues` lists them" in capsys.readouterr().err


def test_the_release_that_is_run() -> None:
    issue = issues.issue_named("fp8-as-integers")
    assert issues.affected_release(issue, "0.30.0", ["0.29.0"]) == "0.30.0"
    assert issues.affected_release(issue, "0.32.0", ["0.29.0", "0.30.0"]) == "0.30.0"
    with pytest.raises(ValueError, match=r"--vllm 0\.30\.0"):
        issues.affected_release(issue, "0.32.0", ["0.31.0"])
    on_fixed = issues.page(issue, "0.31.0", [])
    assert "vLLM 0.31.0 does not have it." in on_fixed

"""The gate: single edits of the connector, repaired issues, other releases, a checkout, and what it prints."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from diff_tests import cli
from diff_tests.connector_edits import EDITS, FREE_ORDER, REPAIR, edited_checkout, installed_vllm
from diff_tests.gate.cases import concerns_all, corpus_cases
from diff_tests.gate.report import document, print_result
from diff_tests.gate.running import Gate, Plan, Result
from diff_tests.loading import load_scenario
from diff_tests.tests.conftest import started
from diff_tests.vllm_target.releases import installed_version
from sim.releases import NEWEST

CONNECTOR = "distributed/kv_transfer/kv_connector/v1/decode_bench_connector.py"
ENOUGH = 100  # seeded cases


@pytest.fixture(scope="module")
def source() -> str:
    """The installed connector's."""
    if find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    return (installed_vllm() / CONNECTOR).read_text()


def gated(folder: Path, **plan) -> Result:
    return Gate(Plan(folder, **{"cases": ENOUGH, "max_reduced": 1, **plan})).run()


# ----------------------------------------------------------------------------------------------------------------- edits


@pytest.fixture(scope="module")
def edited(source: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One gate over all edits and two broken files."""
    folder = tmp_path_factory.mktemp("edits")
    for name, edit in EDITS.items():
        (folder / f"{name}.py").write_text(edit.applied_to(source))
    (folder / "broken.py").write_text("def broken(:\n")
    (folder / "raises.py").write_text(source + "\nraise RuntimeError('not today')\n")
    (folder / "unchanged.py").write_text(source)
    return gated(tmp_path_factory.mktemp("run"), connectors=(str(folder),))


@pytest.mark.parametrize("name", EDITS)
def test_a_single_edit_fails_with_its_cause_in_the_headline(edited: Result, name: str) -> None:
    candidate = next(candidate for candidate in edited.candidates if candidate.name == f"{name}.py")
    assert candidate.verdict == "fail"
    first = candidate.headline
    assert first is not None
    assert first.cause in EDITS[name].causes, first
    assert EDITS[name].words in first.message


def test_a_failed_candidate_is_let_go_and_its_scenario_shows_the_failure(edited: Result) -> None:
    candidate = next(candidate for candidate in edited.candidates if candidate.name == "start_at_block_0.py")
    first = candidate.new_failures[0]
    assert first.scenario is not None
    assert first.command == f"kvoracle run {first.scenario} --connector {candidate.connector}"
    small = load_scenario(first.scenario)
    assert len(small.groups) == 1
    assert small.about == first.finding.message
    assert candidate.num_cases == edited.num_corpus + ENOUGH


def test_a_broken_file_is_an_error_and_the_rest_go_on(edited: Result) -> None:
    verdicts = {candidate.name: candidate.verdict for candidate in edited.candidates}
    errors = {candidate.name: candidate.error for candidate in edited.candidates if candidate.error}
    assert errors.keys() == {"broken.py", "raises.py"}
    assert "line 1: invalid syntax" in errors["broken.py"]
    assert "RuntimeError: not today" in errors["raises.py"]
    assert verdicts["unchanged.py"] == "pass"
    assert edited.verdict == "fail"


def test_an_edit_that_finds_nothing_to_change_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 places changed"):
        EDITS["nulls_kept"].applied_to("class DecodeBenchConnectorScheduler:\n def update_state_after_alloc(self): pass")


# ------------------------------------------------------------------------------------------- the same, better, and other


def test_the_installed_connector_against_itself_shows_nothing(source: str, tmp_path: Path) -> None:
    file = tmp_path / "same.py"
    file.write_text(source)
    for connectors in ((), (str(file),)):
        result = gated(tmp_path / "run", connectors=connectors)
        assert result.verdict == "pass"
        assert result.changes == []
        # Whether what both sides show is a known issue is for campaigns to say; nothing of it is head's doing.
        assert {entry.word for entry in result.candidates[0].entries.values()} <= {"known", "same"}
        assert document(result, is_strict=True)["candidates"][0]["findings"] == []
        shown = StringIO()
        print_result(Console(file=shown), result, is_strict=True)
        assert f"\n{result.candidates[0].name}: same\n" in shown.getvalue()
        assert "kernel-rows" in shown.getvalue()


def test_a_repaired_known_issue_is_fixed(source: str, tmp_path: Path) -> None:
    file = tmp_path / "repaired.py"
    text = source
    for edit in REPAIR:
        text = edit.applied_to(text)
    file.write_text(text)
    result = gated(tmp_path / "run", connectors=(str(file),))
    assert result.verdict == "pass"
    (candidate,) = result.candidates
    fixed = [entry for entry in candidate.entries.values() if entry.word == "fixed"]
    assert {entry.known_issue for entry in fixed} == {"kernel-rows"}
    # What else both sides show, in cases without this connector's doing, stays as it was.
    assert {entry.word for entry in candidate.entries.values()} <= {"fixed", "known", "same"}
    assert not any(entry.known_issue == "kernel-rows" for entry in candidate.entries.values() if entry.word != "fixed")


def test_another_release(tmp_path: Path) -> None:
    for release in ("0.29.0", "0.30.0"):
        started(release)
    better = gated(tmp_path / "better", base="0.29.0", head="0.30.0", cases=0)
    fixed = [entry for entry in better.candidates[0].entries.values() if entry.word == "fixed"]
    assert {"starts_early", "null_selected", "wrong_block_size"} <= {entry.finding.cause for entry in fixed}
    assert better.verdict == "pass"
    # What 0.30 has broken anew are known issues of it.
    known = {entry.known_issue for entry in better.candidates[0].entries.values() if entry.word == "known"}
    assert "checkpoint-without-key" in known
    worse = gated(tmp_path / "worse", base="0.30.0", head="0.29.0", cases=0)
    assert worse.verdict == "fail"
    assert {"starts_early", "null_selected"} <= {entry.finding.cause for entry in worse.candidates[0].new_failures}


def test_a_checkout_that_takes_free_blocks_in_another_order_has_changed_and_passes(tmp_path: Path, source: str) -> None:
    checkout = edited_checkout(tmp_path / "checkout", "v1/core/block_pool.py", FREE_ORDER)
    result = gated(tmp_path / "run", head=str(checkout), base="current", as_release=installed_version(), cases=0)
    assert result.verdict == "pass"
    assert not result.head.known_release
    assert result.head.rules.release == installed_version()
    assert result.base.known_release
    changes = {(entry.finding.kind, entry.finding.cause) for _, entry in result.changes}
    assert ("allocation", "block_table") in changes
    shown = document(result, is_strict=False)
    assert shown["verdict"] == "pass"
    assert document(result, is_strict=True)["verdict"] == "fail"
    assert shown["changes"][0]["message"].startswith("step 1: request A, group ")
    assert "base says block" in shown["changes"][0]["message"]


def test_a_checkout_is_judged_by_the_newest_rules_unless_told(tmp_path: Path) -> None:
    plan = Plan(tmp_path, head=str(tmp_path))
    assert Gate(plan)._as_release_of(plan.head) is None
    assert installed_version() != NEWEST, "else this test shows nothing"
    assert Gate(Plan(tmp_path, as_release="0.31.0"))._as_release_of("current") is None
    assert Gate(Plan(tmp_path, as_release="0.31.0"))._as_release_of("./vllm") == "0.31.0"


# ------------------------------------------------------------------------------------------------------------ the command


def test_the_corpus_of_a_gate_has_every_known_issue() -> None:
    names = [case.name for case in corpus_cases(concerns_all)]
    assert {"kernel-rows", "dcp-2", "request-id-used-again"} <= set(names)
    assert len(set(names)) == len(names)


def test_the_command_says_the_same_twice_to_everybody(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("early, start.py").write_text(EDITS["start_at_block_0"].applied_to(source))
    args = ["gate", "--connector", "early, start.py", "--cases", "20", "--junit", "out/gate.xml", "--github"]
    texts = []
    for _ in range(2):
        assert cli.run_cli([*args, "--json"]) == 1
        captured = capsys.readouterr()
        shown = json.loads(captured.out)
        del shown["seconds"]
        texts.append((json.dumps(shown), captured.err))
    assert texts[0] == texts[1]
    assert shown["verdict"] == "fail"
    assert shown["repeat"] == "--cases 20 --seed 1"
    assert shown["candidates"][0]["headline"].startswith("selection, law 4, starts_early: step")
    assert "::error file=early%2C start.py,title=early%2C start.py%3A new failure" in texts[0][1]
    suite = ElementTree.parse("out/gate.xml").find("testsuite")
    assert suite is not None
    assert int(suite.attrib["failures"]) >= 3
    assert int(suite.attrib["tests"]) == shown["corpus"] + 20
    command = shown["candidates"][0]["findings"][0]["repeat"].split(maxsplit=3)
    assert cli.run_cli(["run", command[2], "--connector", "early, start.py"]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--connector", "{folder}"], "the folder holds no .py file"),
        (["--connector", "{folder}/none.py"], "none.py"),
        (["--head", "./nowhere"], "nowhere"),
        (["--as", "0.1.0"], "no rules for this release"),
        (["--cases", "-1"], "--cases"),
        (["--out", "{folder}/file/run"], "cannot be written"),
    ],
)
def test_bad_usage_is_exit_code_2(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started()  # skips where there is no vLLM
    (tmp_path / "file").write_text("")
    out = [] if "--out" in args else ["--out", os.fspath(tmp_path / "run")]
    assert cli.run_cli(["gate", "--cases", "0", *out, *(arg.format(folder=tmp_path) for arg in args)]) == 2
    captured = capsys.readouterr()
    assert message in captured.out + captured.err
    assert "Traceback" not in captured.err

"""`kvoracle explain` as a user meets it: what it takes, exit codes, errors, and the prefix bug on the real vLLM 0.29.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diff_tests import cli
from diff_tests.campaign import Campaign, Plan, prepare_folder
from diff_tests.corpus import CORPUS
from diff_tests.explain.source import trace_case
from diff_tests.failures import failure_of, load_failure, save
from diff_tests.live.check import Checked
from diff_tests.live.geometry import Geometry
from diff_tests.live.rebuild import Rebuilt
from diff_tests.tests.conftest import started
from diff_tests.tests.explain_cases import prefix_outcome
from oracle.contracts import contract_for
from oracle.tests.histories import RULES, history_of
from sim.history import to_lines
from sim.releases import NEWEST
from sim.scenario import dump, load, plain

PREFIX = CORPUS / "prefix-shared-with-a-live-request.yaml"


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a target fails the test."""

    def refuse(*args: object) -> None:
        raise AssertionError(f"a target was started: {args}")

    monkeypatch.setattr(cli, "_Started", refuse)


def _explain(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, str]:
    code = cli.run_cli(["explain", *map(str, args)])
    return code, capsys.readouterr().out


def _json(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, Any]:
    code, out = _explain(capsys, *args, "--json")
    return code, json.loads(out)


def _saved(folder: Path, *, is_reduced: bool = True, has_history: bool = True) -> Path:
    outcome = prefix_outcome()
    failure = failure_of(outcome, vllm=NEWEST, release=NEWEST, connector=None, seed=1, case=12)
    if is_reduced:
        failure.reduced, failure.reduced_findings = plain(outcome.scenario), failure.findings
        failure.reduced_observed = outcome.observed
    if not has_history:
        failure.observed = failure.reduced_observed = None
    path = folder / "failures" / "case-000012.json"
    save(failure, path)
    return path


@pytest.mark.parametrize("is_reduced", [True, False])
def test_a_saved_failure_is_explained_from_what_was_saved(
    is_reduced: bool, no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    code, out = _explain(capsys, _saved(tmp_path, is_reduced=is_reduced))
    assert code == 1
    assert "block 1 (position 0),\nwhich A and B share" in out
    assert f"vLLM {NEWEST}, as saved in case-000012.json; DecodeBenchConnector" in out


def test_a_run_folder_stands_for_its_first_failure(no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _saved(tmp_path)
    code, document = _json(capsys, tmp_path)
    assert (code, document["step"], document["requests"]) == (1, 3, ["B"])
    assert [event["kind"] for event in document["blocks"]["103"]] == ["taken", "computed", "left"]


def test_a_failure_without_a_history_runs_on_the_vllm_it_failed_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked: list[object] = []

    def start(*args: object) -> None:
        asked.extend(args)
        raise cli.StartError("stop here")

    monkeypatch.setattr(cli, "_Started", start)
    code, _ = _explain(capsys, _saved(tmp_path, has_history=False))
    assert (code, asked[0]) == (3, NEWEST)


def test_the_model_alone_needs_no_vllm(no_vllm: None, capsys: pytest.CaptureFixture[str]):
    code, out = _explain(capsys, PREFIX, "--model-only", "--request", "B")
    assert code == 0
    assert out.startswith(f"Predicted by the model for vLLM {NEWEST}: 10 steps")
    assert "E ? ? ?  to be filled" in out


def test_a_recorded_history_is_judged_and_explained(no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(to_lines(history_of(load_scenario_of(tmp_path))), encoding="utf-8")
    code, out = _explain(capsys, tmp_path / "case.yaml", "--history", trace)
    assert code == 0
    assert out.startswith("Nothing is wrong in 10 steps")
    assert "in trace.jsonl" in out


def load_scenario_of(folder: Path) -> Any:
    """The prefix case as a bare scenario in a file."""
    (folder / "case.yaml").write_text(dump(prefix_outcome().scenario), encoding="utf-8")
    return load(folder / "case.yaml")


def _checked_trace(num_followed: int) -> Checked:
    """The prefix bug as the probe sees it: tables and what was selected and received, but nothing of the pool."""
    outcome = prefix_outcome()
    hidden = {"free": None, "refs": None, "keys": None, "deferred": None}
    observed = [replace(record, **hidden) for record in outcome.observed]
    observed[0] = replace(observed[0], source="trace", sees=("tables",))
    scenario = outcome.scenario
    assert scenario.connector is not None
    geometry = Geometry(RULES, scenario.engine, scenario.groups, scenario.connector, [])
    rebuilt = Rebuilt(scenario, observed, [], geometry, contract_for(scenario, RULES))
    gap = None if num_followed == 10 else "a reason"
    assert outcome.predicted is not None
    return Checked(rebuilt, outcome.findings, 10, num_followed, gap, predicted=outcome.predicted)


@pytest.mark.parametrize("num_followed", [10, 2])
def test_a_trace_is_explained_with_the_models_word_for_what_it_cannot_see(
    num_followed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": "start"}\n', encoding="utf-8")
    checked = _checked_trace(num_followed)
    monkeypatch.setattr(cli, "_trace_to_explain", lambda path: trace_case(checked, f"Trace {path.name}"))
    code, document = _json(capsys, trace)
    assert code == 1
    assert document["headline"].startswith(
        "Step 3, request B, group 0 (full): the connector overwrote block 1 (position 0)"
    )
    if num_followed == 10:
        assert document["lookups"][0]["words"] == "1616 of 1621 tokens are hit"
        assert document["notes"] == []
    else:
        assert document["notes"] == ["the model followed 2 of 10 steps: a reason"]


def test_a_trace_of_a_real_server_tells_lookups_and_lives(
    no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "page.html"
    code, document = _json(capsys, Path(__file__).parent / "traces", "--html", page)
    assert code == 0
    assert document["headline"].startswith("Nothing is wrong in")
    assert all(lookup["found"] == lookup["hit"] for lookup in document["lookups"])
    assert document["lookups"]
    assert any(event["kind"] == "cached" for life in document["blocks"].values() for event in life)
    assert "Trace traces, vLLM" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [('{"t": "start"}\n', "trace.jsonl"), ('{"t": "sta', "no trace of a scheduler here")],
)
def test_a_broken_trace_is_one_message(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "trace.jsonl").write_text(text, encoding="utf-8")
    for path in (tmp_path, tmp_path / "trace.jsonl"):
        assert cli.run_cli(["explain", str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_a_pasted_list(no_vllm: None, capsys: pytest.CaptureFixture[str]):
    code, out = _explain(capsys, PREFIX, "--model-only", "--actual", "B:0=[1]")
    assert code == 1
    assert "B's own, position 0 (shared with A), but not in this list" in out
    code, out = _explain(capsys, PREFIX, "--model-only", "--actual", "B:0=[103]")
    assert (code, out.splitlines()[0]) == (0, "B, group 0: The list is right: the blocks to be filled in step 3.")


def test_a_page(no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.html"
    assert _explain(capsys, PREFIX, "--model-only", "--html", page)[0] == 0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.yaml"], "missing.yaml: cannot be read"),
        (["{folder}"], "no saved failure in this folder"),
        (["{case}", "--model-only", "--request", "Z"], "request Z: not in this history; it has A and B"),
        (["{case}", "--model-only", "--step", "11"], "step 11: not in this history; it has steps 1 to 10"),
        (["{case}", "--model-only", "--actual", "B=[1]"], "is not of the form REQUEST:GROUP=[1, 2, 3]"),
        (["{case}", "--model-only", "--as", "0.1.0"], "known: 0.29.0"),
        (["{case}", "--model-only", "--html", "{folder}/no/such/page.html"], "cannot be written"),
        (["{case}", "--history", "{case}"], "not a history: line 1"),
        (["{case}", "--history", "{folder}/none.jsonl"], "none.jsonl: cannot be read"),
        (["{direct}", "--model-only"], "the direct driver shows hand-made tables"),
        (["{case}", "--vllm", "0.1.0"], "0.1.0"),
    ],
)
def test_bad_input_is_one_message(args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    direct = CORPUS / "interval-starts-inside-a-block.yaml"
    filled = [arg.format(case=PREFIX, folder=tmp_path, direct=direct) for arg in args]
    assert cli.run_cli(["explain", *filled]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_campaign_saves_what_explain_needs(no_vllm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A defect in the target makes cases fail; the reduced one is explained from the run folder alone."""
    target = started()
    target.defect = "drop_last_selected"
    try:
        folder = tmp_path / "run"
        prepare_folder(folder)
        plan = Plan(seed=3, folder=folder, vllm="current", connector=None, as_release=None, cases=40, seconds=None)
        Campaign(plan, target, target.info).run()
    finally:
        target.defect = None
    failures = [load_failure(path) for path in sorted(folder.rglob("case-*.json"))]
    assert any(failure.reduced_observed for failure in failures)
    code, out = _explain(capsys, folder)
    assert code == 1
    assert "NOT RECEIVED" in out or "STAYED EMPTY" in out


def test_the_prefix_bug_of_0_29_0_in_one_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """On the real vLLM: request, group, position, the shared block, who shares it, the block that stayed empty."""
    from diff_tests.tests import test_cli

    started("0.29.0")
    monkeypatch.setattr(cli, "_Started", test_cli._Shared)
    code, out = _explain(capsys, PREFIX, "--vllm", "0.29.0")
    assert code == 1
    head = " ".join(out.split("\n\n")[0].split())
    assert head == (
        "Step 3, request B, group 0 (full): the connector overwrote block 1 (position 0), which A and B share and which "
        "holds tokens [0, 16) of A; block 103 (position 101), meant for external tokens [1616, 1620), stayed empty."
    )
    assert len(out.splitlines()) <= 28
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines())

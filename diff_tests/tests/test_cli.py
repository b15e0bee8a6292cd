"""The command line as a user meets it: messages, exit codes, JSON documents."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from diff_tests import cli, run
from diff_tests.corpus import CORPUS, find_cases
from diff_tests.tests.conftest import started
from diff_tests.vllm_target.target import Target, TargetInfo
from oracle.known_issues import load as known_issues
from sim.releases import RELEASES
from sim.scenario import load

PREFIX = CORPUS / "shared-tokens-end-inside-a-block.yaml"
GOOD = """
kvoracle: 1
engine: {blocks: 40, max_model_len: 256}
connector: {name: DecodeBenchConnector}
groups:
  - {kind: full, block: 16}
  - {kind: sliding_window, block: 16, window: 32}
steps:
  - add: {id: A, prompt: [[a, 100]], max_tokens: 4}
  - run: 50
"""


class _Shared:
    """Stands in for a target of the command's own: the one that all tests of the session share."""

    def __init__(self, vllm: str, connector: str | None = None, as_release: str | None = None) -> None:
        self._target = started(vllm)

    def __enter__(self) -> tuple[Target, TargetInfo]:
        return self._target, self._target.info

    def __exit__(self, *error: object) -> None:
        self._target.defect = None


@pytest.fixture
def shared_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_Started", _Shared)


def _file(folder: Path, text: str, name: str = "case.yaml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def _json(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    code = cli.run_cli([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------------ bad input

BAD_SCENARIOS = [
    ("blocks: 40", "blocks: 40, block_count: 3", "$.engine.block_count: unknown key"),
    ("kind: full, block: 16", "kind: full", "$.groups[0].block: missing"),
    ("window: 32", "window: 0", "$.groups[1].window"),
    ("blocks: 40", "blocks: 1", "$.engine.blocks"),
    ("kind: full,", "kind: fool,", "$.groups[0].kind: must be one of"),
    ("[a, 100]", "[a, 300]", "$.steps[0].add.prompt: 300 tokens leave no room under max_model_len 256"),
    ("run: 50", "abort: Z", "no request 'Z' was added"),
    ("kvoracle: 1", "kvoracle: 2", "$.kvoracle"),
    ("steps:", "steps: [", "not valid YAML in line"),
]


@pytest.mark.parametrize("command", ["simulate", "run", "reduce"])
@pytest.mark.parametrize(("old", "new", "message"), BAD_SCENARIOS)
def test_a_bad_scenario_is_one_message_that_names_the_place(
    command: str, old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(tmp_path, GOOD.replace(old, new, 1))
    assert cli.run_cli([command, path]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert path in captured.err
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["run", "{case}", "--vllm", "0.1.0"], "0.1.0"),
        (["run", "{case}", "--vllm", "./nowhere"], "nowhere"),
        (["run", "{case}", "--as", "0.1.0"], "0.1.0"),
        (["simulate", "{case}", "--as", "0.1.0"], "known: 0.29.0"),
        (["run", "missing.yaml"], "missing.yaml: cannot be read: No such file"),
        (["run", "{folder}"], "cannot be read: Is a directory"),
        (["keep", "{case}"], "not a saved failure"),
        (["replay", "missing.yaml"], "missing.yaml"),
        (["fuzz", "--cases", "0"], "--cases"),
        (["fuzz", "--minutes", "soon"], "--minutes"),
        (["fuzz", "--out", "{case}/run", "--cases", "1"], "cannot be written"),
        (["run", "{case}", "--connector", "{broken}"], "broken.py"),
        (["run", "{case}", "--connector", "{folder}/none.py"], "none.py"),
        (["vllm", "add", "0.1.0"], "0.1.0"),
        (["vllm", "remove", "../x"], "../x"),
        (["frobnicate"], "No such command"),
        (["simulate"], "Missing argument"),
    ],
)
def test_bad_usage_is_exit_code_2_with_one_message(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "case": _file(tmp_path, GOOD),
        "broken": _file(tmp_path, "def broken(:\n", "broken.py"),
        "folder": str(tmp_path),
    }
    assert cli.run_cli([arg.format(**places) for arg in args]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unwritable_run_folder_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("the target must not be started")

    monkeypatch.setattr(cli, "_Started", start)
    file = _file(tmp_path, "not a folder")
    assert cli.run_cli(["fuzz", "--cases", "1", "--out", f"{file}/run"]) == 2


# ------------------------------------------------------------------------------------------------------------- commands


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"kvoracle {importlib.metadata.version('kvoracle')}"
    assert f"msgspec {importlib.metadata.version('msgspec')}" in lines
    assert lines[-2] == f"rules for vLLM {', '.join(RELEASES)}"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["completion", shell]) == 0
    assert "_KVORACLE_COMPLETE" in capsys.readouterr().out


def test_releases_are_completed() -> None:
    asked = {"_KVORACLE_COMPLETE": "bash_complete", "COMP_WORDS": "kvoracle run --vllm 0.3", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", "from diff_tests.cli import run_cli; run_cli([])"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [f"plain,{release}" for release in RELEASES if release.startswith("0.3")]


@pytest.mark.parametrize("command", ["simulate", "run", "fuzz", "reduce", "keep", "replay", "bench"])
def test_help_has_purpose_options_and_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Examples:\n  kvoracle {command}" in text
    assert "Options:" in text


def test_simulate_needs_neither_torch_nor_vllm(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules.update(torch=None, vllm=None, numpy=None)\n"
        f"from diff_tests.cli import run_cli; sys.exit(run_cli(['simulate', {_file(tmp_path, GOOD)!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first = json.loads(done.stdout)["steps"][0]
    assert first["scheduled"] == {"A": 1}
    assert first["hits"] == {"A": 0}
    assert first["external"] == {"A": 99}
    assert first["tables"] == {"A": [[1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 8, 9, 10]]}
    assert first["expected"] == {"A": [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]}
    assert first["free"] == list(range(11, 40))
    assert first["free_after"] == first["free"]


def test_simulate_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["simulate", _file(tmp_path, GOOD)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == [
        "step 1",
        "  A: 1 tokens, 99 external",
        "  A group 0: [1, 2, 3, 4, 5, 6, 7]  fill [1, 2, 3, 4, 5, 6, 7]",
        "  A group 1: [0, 0, 0, 0, 8, 9, 10]  fill [8, 9, 10]",
    ]
    assert lines[-1] == "after step 4: run: idle"


@pytest.mark.usefixtures("shared_target")
def test_run_says_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "run", _file(tmp_path, GOOD))
    assert code == 0
    assert document["verdict"] == "same"
    assert document["target"]["connector"] == "DecodeBenchConnector"
    assert document["steps"] == 4
    assert document["findings"] == []


@pytest.mark.usefixtures("shared_target")
def test_run_reports_a_finding_to_programs_and_persons(capsys: pytest.CaptureFixture[str]) -> None:
    started().defect = "drop_last_selected"
    code, document = _json(capsys, "run", str(PREFIX))
    assert code == 1
    assert document["verdict"] == "different"
    finding = document["findings"][0]
    assert {"kind", "law", "cause", "step", "request", "group", "expected", "observed", "message"} <= finding.keys()
    started().defect = "drop_last_selected"
    assert cli.run_cli(["run", str(PREFIX)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1. ")
    assert lines[1] == f"   {finding['message']}"
    assert lines[-1].startswith("different: ")


@pytest.mark.usefixtures("shared_target")
def test_reduce_writes_a_smaller_scenario_that_fails_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started().defect = "leak_reference"
    small = tmp_path / "small.yaml"
    assert cli.run_cli(["reduce", str(CORPUS / "several-block-sizes.yaml"), "-o", str(small)]) == 1
    scenario = load(small)
    assert len(scenario.groups) == 1
    assert sum(type(step).__name__ == "Add" for step in scenario.steps) == 1
    assert scenario.engine.blocks <= 4
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("shared_target")
def test_reduce_keeps_to_what_no_known_issue_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started().defect = "leak_reference"
    issue = known_issues()[0]
    monkeypatch.setattr(run, "match", lambda finding, scenario, rules: issue if len(scenario.groups) < 3 else None)
    small = tmp_path / "small.yaml"
    assert cli.run_cli(["reduce", str(CORPUS / "several-block-sizes.yaml"), "-o", str(small)]) == 1
    assert len(load(small).groups) == 3


@pytest.mark.usefixtures("shared_target")
def test_reduce_of_a_scenario_that_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_cli(["reduce", str(PREFIX)]) == 0
    assert "nothing to reduce" in capsys.readouterr().err


@pytest.mark.usefixtures("shared_target")
def test_fuzz_then_run_keep_and_replay_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started().defect = "leak_reference"
    folder, corpus = tmp_path / "run", tmp_path / "corpus"
    code, document = _json(capsys, "fuzz", "--cases", "25", "--seed", "4", "--out", str(folder))
    assert code == 1
    assert document["verdict"] == "fail"
    assert document["cases"] == 25
    assert document["coverage"]["admissions"] > 25
    failure = document["findings"][0]["failure"]
    assert load(document["findings"][0]["scenario"]).groups
    assert json.loads((folder / "summary.json").read_text())["seed"] == 4

    assert cli.run_cli(["run", failure]) == 0, "without the defect it passes"
    assert cli.run_cli(["keep", failure, "--corpus", str(corpus)]) == 0
    assert cli.run_cli(["keep", failure, "--corpus", str(corpus)]) == 0
    assert "already covered by" in capsys.readouterr().out
    (kept,) = corpus.iterdir()
    everything = tmp_path / "everything"
    started().defect = "leak_reference"
    assert cli.run_cli(["keep", str(folder), "--corpus", str(everything), "--vllm", "current"]) == 0
    assert "kept as" in capsys.readouterr().out
    assert len(list(everything.iterdir())) < document["cases"], "failures of one cause are one case"
    assert all(case.expect[release].verdict == "different" for case in find_cases([everything]) for release in case.expect)
    assert cli.run_cli(["keep", str(everything)]) == 2, "no failure in there"

    code, document = _json(capsys, "replay", str(kept))
    assert code == 1, "the case says that this release fails, and it does not"
    assert [case["status"] for case in document["cases"]] == ["FIXED"]
    code, document = _json(capsys, "replay", failure)
    assert code == 0
    assert [case["status"] for case in document["cases"]] == ["FIXED"]
    started().defect = "leak_reference"
    assert cli.run_cli(["replay", failure]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.usefixtures("shared_target")
def test_fuzz_over_all_releases_gives_each_its_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed, old = started().info.version, started("0.29.0").info.version
    monkeypatch.setattr(cli, "_targets", lambda vllm: (["current", "0.29.0"], ["0.33.0"]))
    code, document = _json(capsys, "fuzz", "--vllm", "all", "--cases", "61", "--seed", "1", "--out", str(tmp_path))
    assert code == 1, "0.29.0 has faults"
    assert document["verdict"] == "fail"
    campaigns = document["campaigns"]
    assert [campaign["target"]["vllm"] for campaign in campaigns] == [installed, old]
    assert [campaign["cases"] for campaign in campaigns] == [30, 30]
    assert [campaign["verdict"] for campaign in campaigns] == ["pass", "fail"]
    assert all((tmp_path / name / "summary-1.json").is_file() for name in ("current", "0.29.0"))
    monkeypatch.setattr(cli, "_targets", lambda vllm: ([], ["0.33.0"]))
    assert cli.run_cli(["fuzz", "--vllm", "all", "--out", str(tmp_path)]) == 2
    assert "vllm add" in capsys.readouterr().err


def test_vllm_list_names_every_release_with_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code, document = _json(capsys, "vllm", "list")
    assert code == 0
    assert [row["release"] for row in document["releases"]] == ["0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"]


def test_a_run_as_a_process_of_its_own(tmp_path: Path) -> None:
    started()  # skips where there is no vLLM
    done = subprocess.run(
        [sys.executable, "-m", "diff_tests.cli", "run", _file(tmp_path, GOOD), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "same"


def _commands(command: click.Command, name: str = "kvoracle") -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for part, below in command.commands.items():
            yield from _commands(below, f"{name} {part}")
    else:
        yield name, command


@pytest.mark.parametrize(
    ("name", "command"), list(_commands(cli.cli)), ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_reads_like_a_manual_page(name: str, command: click.Command) -> None:
    """Purpose, every option in words, two examples that are commands of ours."""
    assert command.help
    assert all(option.help for option in command.params if isinstance(option, click.Option))
    examples = (command.epilog or "").strip().splitlines()
    assert len(examples) >= 2
    assert all(name in line for line in examples)

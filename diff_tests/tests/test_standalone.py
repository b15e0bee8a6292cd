"""`explain --pytest`: a module without anything of ours fails where the fault is, and passes where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diff_tests import cli
from diff_tests.explain.explanation import Explanation, explain
from diff_tests.explain.standalone import ROOT, module_of, module_of_issue
from diff_tests.loading import load_scenario
from diff_tests.run import Outcome, run_on
from diff_tests.tests.conftest import started
from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.releases import cache_root, installed_version, is_cached, release_folder
from oracle.known_issues import load
from sim.releases import NEWEST, rules_of

RULES = rules_of(installed_version() or NEWEST)
# By name: a case, and a release that fails it.
CASES = {
    "prefix": ("diff_tests/corpus/prefix-shared-with-a-live-request.yaml", "0.29.0"),
    "groups": ("diff_tests/corpus/full-and-sliding-window.yaml", "0.29.0"),
    "sharded": ("diff_tests/corpus/dcp-2.yaml", "0.29.0"),
    "hand_made": ("diff_tests/corpus/interval-starts-inside-a-block.yaml", "0.29.0"),
    "raises": ("diff_tests/known_issues/checkpoint_keyed_twice.yaml", "0.31.0"),
}


def explained(name: str) -> tuple[Outcome, Explanation]:
    """As if nobody knew the issue, if it is one."""
    path, release = CASES[name]
    outcome = run_on(started(release), load_scenario(ROOT / path))
    explanation = explain(outcome, rules_of(release), f"vLLM {release}")
    explanation.known_issue = None
    return outcome, explanation


def results(folder: Path, release: str) -> dict[str, str]:
    """What pytest says of the tests in the folder, by file, with nothing of ours to import."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment["VLLM_CACHE_ROOT"] = str(cache_root() / "state" / f"scripts-{release}")
    if release != installed_version():
        if not is_cached(release):
            pytest.skip(f"vLLM {release} is not in the cache; fetch it with `kvoracle vllm add {release}`")
        environment["PYTHONPATH"] = str(release_folder(release))
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--rootdir", ".", "."]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED", "ERROR"))]
    return {line.split(" ")[1].partition("::")[0]: line.split(" ")[0] + _assertion(line) for line in lines}


def _assertion(line: str) -> str:
    """Whether it was an assertion that failed."""
    return " an assertion" if " - assert" in line or " - AssertionError" in line else ""


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standalone")
    for name in CASES:
        outcome, explanation = explained(name)
        text = module_of(outcome, explanation, rules_of(CASES[name][1]))
        (folder / f"test_{name}.py").write_text(text)
    issue = next(issue for issue in load() if issue.id == "fp8-as-integers")
    (folder / "test_issue.py").write_text(module_of_issue(issue))
    return folder


FAILS_ON = {**{name: release for name, (_, release) in CASES.items()}, "issue": "0.29.0"}


@pytest.mark.parametrize("release", ["0.29.0", "0.31.0", "0.32.0"])
def test_it_fails_where_the_fault_is(modules: Path, release: str) -> None:
    found = results(modules, release)
    if release == "0.32.0":
        assert found == {f"test_{name}.py": "PASSED" for name in FAILS_ON}
    else:
        assert {file for file, result in found.items() if result == "FAILED an assertion"} >= {
            f"test_{name}.py" for name, fails_on in FAILS_ON.items() if fails_on == release
        }


def test_nothing_of_ours_and_every_id_has_a_comment(modules: Path) -> None:
    text = (modules / "test_prefix.py").read_text()
    assert "        103,  # position 101: tokens [1616, 1632)\n" in text
    assert "block 1 selected, which holds tokens [0, 16) of request A" in text
    for file in modules.iterdir():
        if file.suffix == ".py":
            lines = [line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))]
            assert all(
                line.split()[1].partition(".")[0] in ("json", "pathlib", "tempfile", "torch", "vllm") for line in lines
            )


@pytest.mark.parametrize("issue", load(), ids=lambda issue: issue.id)
def test_every_known_issue_has_a_test(issue) -> None:
    text = module_of_issue(issue)
    compile(text, issue.script, "exec")
    assert f"def test_{issue.id.replace('-', '_')}() -> None:" in text
    assert "__main__" not in text
    assert "`python " not in text


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    started()
    case = tmp_path / "case.yaml"
    case.write_text("kvoracle: 1\nengine: {blocks: 9}\ngroups: [{kind: full, block: 4}]\nsteps: [{run: 1}]\n")
    assert cli.run_cli(["explain", str(case), "--pytest", str(tmp_path / "test.py")]) == 2
    assert "nothing to write a test of: no finding" in capsys.readouterr().err
    assert not (tmp_path / "test.py").exists()


def test_a_fill_shows_in_no_value_that_vllm_hands_out() -> None:
    case = load_scenario(ROOT / "diff_tests/known_issues/kernel_rows.yaml")
    outcome = run_on(started(), case)
    explanation = explain(outcome, RULES, "")
    assert "def test_kernel_rows()" in module_of(outcome, explanation, RULES)
    explanation.known_issue = None
    with pytest.raises(ValueError, match=r"no test is written of law 6 \(fill\)"):
        module_of(outcome, explanation, RULES)


def test_speculative_decoding_is_not_written() -> None:
    outcome, explanation = explained("prefix")
    engine = {"speculative": {"method": "ngram", "tokens": 1, "accept": [1]}}
    outcome.scenario = scenario([add("A", ("a", 3))], [{"kind": "full", "block": 4}], None, **engine)
    with pytest.raises(ValueError, match="no test is written with speculative decoding"):
        module_of(outcome, explanation, rules_of("0.29.0"))

"""The list of known issues against the real thing: exactly the releases that an entry names have the issue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diff_tests.run import judge_run
from diff_tests.tests.conftest import started
from diff_tests.vllm_target.releases import cache_root, installed_version, is_cached, release_folder
from oracle.known_issues import KnownIssue, load
from sim.releases import RELEASES, rules_of
from sim.scenario import load as load_scenario

ROOT = Path(__file__).parents[2]
ISSUES = load()

# Runs every script with one import of vLLM and says which ones failed.
_RUN_SCRIPTS = """
import json, runpy, sys
failed = []
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="__main__")
    except AssertionError:
        failed.append(script)
print(json.dumps(failed))
"""


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("issue", ISSUES, ids=lambda issue: issue.id)
def test_the_smallest_scenario_shows_it(issue: KnownIssue, release: str) -> None:
    scenario = load_scenario(ROOT / issue.scenario)
    outcome = judge_run(scenario, started(release).run(scenario), rules_of(release))
    followed = {other.id for other in ISSUES if other.id in issue.follows and release in other.releases}
    expected = followed | ({issue.id} if release in issue.releases else set())
    assert outcome.verdict in (("known",) if expected else ("same", "refused"))
    assert {judged.issue.id for judged in outcome.findings if judged.issue} == expected


@pytest.mark.parametrize("release", RELEASES)
def test_the_scripts_show_it_without_us(release: str) -> None:
    environment = dict(os.environ, HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    # What vLLM remembers of model architectures; releases that shared a folder would evict each other's entries.
    environment["VLLM_CACHE_ROOT"] = str(cache_root() / "state" / f"scripts-{release}")
    if release != installed_version():
        if not is_cached(release):
            pytest.skip(f"vLLM {release} is not in the cache; fetch it with `kvoracle vllm add {release}`")
        environment["PYTHONPATH"] = str(release_folder(release))
    scripts = [str(ROOT / issue.script) for issue in ISSUES]
    done = subprocess.run(
        [sys.executable, "-c", _RUN_SCRIPTS, *scripts], env=environment, capture_output=True, text=True, check=True
    )
    failed = json.loads(done.stdout.splitlines()[-1])
    assert failed == [str(ROOT / issue.script) for issue in ISSUES if release in issue.releases]

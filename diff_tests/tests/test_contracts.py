"""Contracts against the real connectors: every registered one is covered or exempt, MultiConnector, one from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from diff_tests import cli
from diff_tests.run import run_on
from diff_tests.tests.conftest import started
from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.target import Target, TargetInputError
from oracle import contracts
from oracle.contracts import contract_for, covered, exemptions
from sim.history import Scheduled
from sim.releases import RELEASES, rules_of
from sim.scenario import dump

CHUNKED = "diff_tests.vllm_target.chunked:ChunkedConnector"
CONTRACT = "diff_tests.tests.chunked_contract:Chunked"
BENCH = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


def registered_connectors(release: str) -> set[str]:
    """What a release registers: it says so when asked for something that it does not know."""
    started(release)
    with pytest.raises(TargetInputError, match="not registered; known: ") as refused:
        Target(release, connector="?").start()
    return set(str(refused.value).partition("known: ")[2].split(", "))


@pytest.mark.parametrize("release", RELEASES)
def test_every_registered_connector_is_covered_or_exempt_with_a_reason(release: str) -> None:
    registered = registered_connectors(release)
    assert "DecodeBenchConnector" in registered
    assert registered <= {*covered(), *exemptions()}
    assert not set(covered()) & exemptions().keys()
    assert all(len(reason) > 20 for reason in exemptions().values())


def test_nothing_is_exempt_that_no_release_registers() -> None:
    registered = {name for release in RELEASES for name in registered_connectors(release)}
    assert exemptions().keys() <= registered


# -------------------------------------------------------------------------------------------------------- MultiConnector


def _multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {"name": "MultiConnector", "extra": {"connectors": list(children)}}


GROUPS = [{"kind": "full", "block": 16}, {"kind": "sliding_window", "block": 16, "window": 32}]
STEPS = [
    add("A", ("sys", 60)),
    {"step": 2},
    {"reset_prefix_cache": {"running": True}},
    add("B", ("sys", 40), ("b", 30)),
    {"run": 50},
    add("A", ("a", 40)),
    {"run": 50},
]


@pytest.mark.parametrize("release", RELEASES)
def test_multi_connector_over_two_children(release: str) -> None:
    case = scenario(STEPS, GROUPS, _multi(BENCH, BENCH))
    contract = contract_for(case, rules_of(release))
    assert contract is not None
    assert contract.name == "MultiConnector"
    outcome = run_on(started(release), case)
    assert outcome.predicted is not None
    assert all(j.issue is not None or release == "0.29.0" for j in outcome.findings), outcome.new_findings
    assert outcome.notes == []


def test_children_that_write_different_values_have_no_contract() -> None:
    other = {**BENCH, "kv_connector_extra_config": {"fill_mean": 2.0}}
    assert contract_for(scenario(STEPS, GROUPS, _multi(BENCH, other)), rules_of("0.32.0")) is None
    unknown = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert contract_for(scenario(STEPS, GROUPS, _multi(BENCH, unknown)), rules_of("0.32.0")) is None


# ---------------------------------------------------------------------------------------------------------- from outside


@pytest.fixture
def chunked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The toy connector with its contract."""
    started()
    monkeypatch.setattr(contracts, "_CONTRACTS", dict(contracts._CONTRACTS))
    monkeypatch.setattr(contracts, "_added", [])
    contracts.add(CONTRACT)
    with Target(connector=CHUNKED) as target:
        yield target


def _shared_prefix(**extra: Any):
    """B shares 400 tokens with A, which lives, and gets the rest of its second chunk of 256."""
    steps = [add("A", ("sys", 400), ("a", 8), max_tokens=20), {"step": 2}, add("B", ("sys", 400), ("b", 200)), {"run": 60}]
    return scenario(steps, connector={"name": "ChunkedConnector", "extra": extra})


def test_a_connector_from_outside_keeps_its_contract(chunked: Target) -> None:
    outcome = run_on(chunked, _shared_prefix())
    assert outcome.verdict == "same", outcome.new_findings
    assert outcome.notes == []
    steps = [record for record in outcome.observed if isinstance(record, Scheduled)]
    granted = [step.external["B"] for step in steps if "B" in step.external]
    assert granted == [112]


def test_a_start_that_is_rounded_down_into_shared_blocks_is_caught(chunked: Target) -> None:
    outcome = run_on(chunked, _shared_prefix(rounds_down=True))
    first = outcome.new_findings[0]
    assert (first.kind, first.law, first.cause, first.request) == ("selection", 4, "starts_early", "B")
    assert first.positions == list(range(16, 25))
    assert "which holds tokens [256, 272) of request A, shared by A and B" in first.message


def test_the_command_takes_a_contract(chunked: Target, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "case.yaml"
    file.write_text(dump(_shared_prefix(rounds_down=True)))
    assert cli.run_cli(["run", str(file), "--connector", CHUNKED, "--contract", CONTRACT]) == 1
    assert "starts_early" in capsys.readouterr().out
    assert cli.run_cli(["run", str(file), "--connector", CHUNKED, "--contract", "nowhere:Nothing"]) == 2
    assert "--contract nowhere:Nothing" in capsys.readouterr().err
    assert cli.run_cli(["run", str(file), "--connector", CHUNKED, "--contract", "json:loads"]) == 2

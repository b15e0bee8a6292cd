"""A share of a campaign, judged where it runs."""

from __future__ import annotations

from diff_tests.run import predict
from diff_tests.shard import MOST_GROWTH_BYTES, REPEAT_EVERY, CaseReport, Cases, Sample, Shard
from sim.history import History
from sim.releases import NEWEST, rules_of
from sim.scenario import Scenario

RULES = rules_of(NEWEST)
CASES = Cases(seed=5, kinds=("full",))


def model(scenario: Scenario) -> History:
    """The model in vLLM's place: nothing is found."""
    return predict(scenario, RULES) or []


def reports(run: object, index: int) -> tuple[list[CaseReport | Sample], Shard]:
    shard, sent = Shard(CASES, RULES, run), []  # type: ignore[arg-type, var-annotated]
    shard.run_cases(index, index + 1, sent.append)
    return sent, shard


def test_a_case_without_findings_is_only_counted() -> None:
    sent, shard = reports(model, 0)
    assert sent == []
    assert shard.num_cases == 1
    assert sum(count.cases for count in shard.coverage.kinds.values()) == 1


def test_a_case_with_findings_comes_with_both_histories() -> None:
    (report,), _ = reports(lambda scenario: model(scenario)[:-1], 0)
    assert isinstance(report, CaseReport)
    assert report.findings[0].finding.law is None
    assert report.predicted is not None
    assert report.observed == report.predicted[:-1]


def test_a_history_that_changes_when_repeated_is_a_finding() -> None:
    """Law 10: every so many cases one runs twice."""
    runs: list[Scenario] = []

    def forgetful(scenario: Scenario) -> History:
        runs.append(scenario)
        return model(scenario)[: -1 if len(runs) > 1 else None]

    report, sample = reports(forgetful, REPEAT_EVERY - 1)[0]
    assert isinstance(report, CaseReport)
    assert report.repeat
    assert report.findings[0].finding.fault[:3] == ("schedule", 10, "not_repeatable")
    assert isinstance(sample, Sample)


def test_a_case_after_which_the_process_is_much_larger_is_a_finding() -> None:
    kept: list[bytearray] = []

    def leaking(scenario: Scenario) -> History:
        kept.append(bytearray(b"x" * (MOST_GROWTH_BYTES + (64 << 20))))
        return model(scenario)

    (report,), _ = reports(leaking, 0)
    assert isinstance(report, CaseReport)
    assert report.findings[0].finding.cause == "memory_leaked"

"""The cases that the project was built for, on the real vLLM, with the right block IDs written out.

The installed release always runs; others where they are in the cache.
"""

from __future__ import annotations

import pytest

from diff_tests.corpus import CORPUS, CorpusCase, find_cases, load_case, replay_on
from diff_tests.run import Outcome, run_on
from diff_tests.tests.conftest import started
from sim.history import Scheduled
from sim.releases import RELEASES
from sim.scenario import Scenario

CORRECT = [release for release in RELEASES if release != "0.29.0"]
FIRST_102 = list(range(1, 103))
CASES = find_cases([CORPUS])


def _scenario(name: str) -> Scenario:
    return load_case(CORPUS / f"{name}.yaml").scenario


def _run(name: str, release: str) -> Outcome:
    return run_on(started(release), _scenario(name))


def _selections(outcome: Outcome) -> list[tuple[str, list[list[int]], int]]:
    """(request, blocks per group, external tokens) of every request the worker was told to fill, in order."""
    return [
        (request_id, selection.groups, record.external[request_id])
        for record in outcome.observed
        if isinstance(record, Scheduled)
        for request_id, selection in (record.received or {}).items()
    ]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_corpus_is_as_recorded(case: CorpusCase, release: str) -> None:
    assert release in case.expect, "a corpus case has a verdict for every release"
    target = started(release)
    (replayed,) = replay_on([case], target, target.info)
    assert replayed.status in ("OK", "KNOWN"), replayed.sentence


# name -> what the worker receives: request, blocks per group, external tokens.
EXPECTED: dict[str, list[tuple[str, list[list[int]], int]]] = {
    "prefix-shared-with-a-request-that-is-gone": [("A", [FIRST_102], 1620), ("B", [[102]], 4)],
    "prefix-shared-with-a-live-request": [("A", [FIRST_102], 1620), ("B", [[103]], 4)],
    "exact-replay": [("A", [FIRST_102], 1620), ("B", [[102]], 4)],
    "full-and-sliding-window": [("A", [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]], 99)],
    "full-and-circular": [("A", [[1, 2, 3], [4]], 39)],
    "full-and-mamba": [("A", [[1, 2, 3], [4]], 39)],
    "dcp-2": [("A", [[1]], 32)],
    "dcp-2-full-and-sliding-window": [("A", [[1, 2], [3, 4]], 64)],
    "shared-tokens-end-inside-a-block": [("A", [[1, 2, 3, 4]], 49), ("B", [[4, 5, 6]], 37)],
    "interval-starts-inside-a-block": [("A", [[3, 7, 2]], 29)],
    "sliding-window-whose-start-is-null": [("A", [[4, 9]], 63)],
    "several-block-sizes": [
        ("A", [[1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12]], 65),
        ("B", [[12, 9], [5, 13, 14], [15]], 19),
    ],
}
REFUSED = {("dcp-2-full-and-sliding-window", "0.30.0")}


@pytest.mark.parametrize("release", CORRECT)
@pytest.mark.parametrize("name", EXPECTED)
def test_the_right_blocks_reach_the_worker(name: str, release: str) -> None:
    outcome = _run(name, release)
    if (name, release) in REFUSED:
        assert outcome.verdict == "refused"
        return
    assert outcome.verdict == "same"
    assert _selections(outcome) == EXPECTED[name]


def test_0_29_fills_a_shared_prefix_again_and_the_finding_says_whose_tokens_it_overwrites() -> None:
    outcome = _run("prefix-shared-with-a-request-that-is-gone", "0.29.0")
    assert outcome.verdict == "different"
    finding = next(f for f in outcome.new_findings if f.cause == "starts_early")
    assert (finding.kind, finding.law, finding.request, finding.group) == ("selection", 4, "B", 0)
    assert finding.expected == [102]
    assert "request B" in finding.message
    assert "102" in finding.message
    assert "request A" in finding.message or "sys" in finding.message


@pytest.mark.parametrize(
    ("name", "kind", "cause", "group_kind"),
    [
        ("prefix-shared-with-a-live-request", "selection", "starts_early", "full"),
        ("full-and-sliding-window", "selection", "null_selected", "sliding_window"),
        ("full-and-sliding-window", "fill", "wrong_layers", "sliding_window"),
        ("full-and-circular", "fill", "wrong_layers", "circular"),
        ("dcp-2", "selection", "wrong_block_size", "full"),
    ],
)
def test_0_29_shows_each_of_its_faults(name: str, kind: str, cause: str, group_kind: str) -> None:
    faults = {(f.kind, f.cause, f.group_kind) for f in _run(name, "0.29.0").new_findings}
    assert (kind, cause, group_kind) in faults

"""A hybrid model at its real sizes: full attention beside three groups of states, blocks of 544 tokens.

A prompt of 3,088 tokens decodes 220 and leaves states at token 3,264 = 6 x 544. Two follow-ups over all 3,308 tokens
resume there: only the tokens between the state and the last one are external, one block in each group.
"""

from __future__ import annotations

from typing import Any

import pytest

from diff_tests.run import predict, run_on
from diff_tests.tests.conftest import started
from diff_tests.tests.target_cases import DECODE_BENCH, add
from sim.history import CachedKey, History, Scheduled, resolve
from sim.releases import RELEASES, rules_of
from sim.scenario import Scenario, parse

BLOCK = 544
NUM_PROMPT, NUM_DECODED = 3088, 220
CHECKPOINT = 6 * BLOCK
FOLLOW_UP = NUM_PROMPT + NUM_DECODED
FULL = {"kind": "full", "block": BLOCK}
STATES = {"kind": "mamba", "block": BLOCK, "mode": "align"}

# By request: the blocks of each group at position 6; B takes what A gave back, the last block first.
AT_POSITION_6 = {"B": [13, 12, 11, 10], "C": [14, 15, 16, 17]}
SHARED = [1, 2, 3, 4, 5, 6]


def _scenario(unit: int | None = None, checkpoint_alignment: int | None = None) -> Scenario:
    """unit: tokens of a hash block, None for whole blocks. With checkpoints kernels can leave a state inside a step."""
    states: dict[str, Any] = dict(STATES)
    if checkpoint_alignment is not None:
        states |= {"checkpoint_blocks": 1, "checkpoint_alignment": checkpoint_alignment}
    engine = {"blocks": 60, "max_model_len": 4096, "retention_interval": BLOCK, "prefix_match_unit": unit}
    steps = [
        add("A", ("a", NUM_PROMPT), max_tokens=NUM_DECODED),
        {"run": 300},
        add("B", ("a", NUM_PROMPT), ("A.out", NUM_DECODED)),
        add("C", ("a", NUM_PROMPT), ("A.out", NUM_DECODED)),
        {"run": 50},
    ]
    groups = [FULL, states, states, states]
    return parse({"kvoracle": 1, "engine": engine, "connector": DECODE_BENCH, "groups": groups, "steps": steps})


def _assert_resumes_at_the_checkpoint(history: History) -> None:
    states = [state for _, state in resolve(history)]
    (index,) = (i for i, record in enumerate(history) if isinstance(record, Scheduled) and "B" in record.admitted)
    admission, before = history[index], states[index - 1]
    assert isinstance(admission, Scheduled)
    kept = [key for key in before.keys or [] if key.group > 0]
    assert kept == [CachedKey(group, 0, CHECKPOINT, [block_id]) for group, block_id in ((1, 7), (2, 8), (3, 9))]
    num_external = FOLLOW_UP - 1 - CHECKPOINT  # tokens [3264, 3307)
    assert num_external == 43
    assert admission.admitted == ["B", "C"]
    assert admission.hits == {"B": CHECKPOINT, "C": CHECKPOINT}
    assert admission.external == {"B": num_external, "C": num_external}
    assert admission.scheduled == {"B": 1, "C": 1}
    assert admission.tables == {
        request_id: [[*SHARED, blocks[0]], *([0] * 6 + [block_id] for block_id in blocks[1:])]
        for request_id, blocks in AT_POSITION_6.items()
    }


def _cases(releases: list[str]) -> list[tuple[str, int | None, int | None]]:
    """(release, hash unit, checkpoint alignment). 16 divides the prompt: up to 0.31 the state after its last token is
    cached too, in one more block, and the IDs are others."""
    settings = [(None, None), (32, None), (32, 16), (16, None), (16, 16)]
    return [
        (release, unit, alignment)
        for release in releases
        for unit, alignment in settings
        if unit != 16 or rules_of(release).prompt_tail_excludes_last_token
    ]


@pytest.mark.parametrize(("release", "unit", "checkpoint_alignment"), _cases(list(RELEASES)))
def test_the_model_resumes_at_the_checkpoint(release: str, unit: int | None, checkpoint_alignment: int | None) -> None:
    history = predict(_scenario(unit, checkpoint_alignment), rules_of(release))
    assert history is not None
    _assert_resumes_at_the_checkpoint(history)


@pytest.mark.parametrize(
    ("release", "unit", "checkpoint_alignment"), _cases([release for release in RELEASES if release != "0.29.0"])
)
def test_so_does_vllm_and_one_block_a_group_is_filled(
    release: str, unit: int | None, checkpoint_alignment: int | None
) -> None:
    outcome = run_on(started(release), _scenario(unit, checkpoint_alignment))
    _assert_resumes_at_the_checkpoint(outcome.observed)
    received = [
        (request_id, selection.groups, selection.tokens)
        for record in outcome.observed
        if isinstance(record, Scheduled)
        for request_id, selection in (record.received or {}).items()
    ]
    assert received == [
        ("A", [SHARED, [7], [8], [9]], NUM_PROMPT - 1),
        *((request_id, [[block_id] for block_id in blocks], 43) for request_id, blocks in AT_POSITION_6.items()),
    ]
    assert outcome.verdict == "same"


def test_0_29_fills_the_checkpoint_of_others_again() -> None:
    outcome = run_on(started("0.29.0"), _scenario())
    _assert_resumes_at_the_checkpoint(outcome.observed)
    assert outcome.verdict == "different"
    assert "starts_early" in {finding.cause for finding in outcome.new_findings}

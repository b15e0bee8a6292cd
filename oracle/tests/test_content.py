"""The replay: common prefixes, and the words for what a block holds."""

from __future__ import annotations

import pytest

from oracle.content import Prefixes, Replay
from oracle.tests.histories import RULES, history_of, scenario
from sim.scenario import Scenario

ENGINE = "{blocks: 20, max_model_len: 64}"
FULL = "[{kind: full, block: 4}]"


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("[[s, 9]]", "[[s, 9]]", 9),  # outputs of different requests differ
        ("[[s, 9]]", "[[s, 6], [b, 3]]", 6),
        ("[[s, 9]]", "[[b, 9]]", 0),
        ("[[s, 4], [s, 4, 5]]", "[[s, 9]]", 9),  # the same tokens, spelled otherwise
        ("[[s, 4], [s, 5, 5]]", "[[s, 9]]", 4),
        ("[[s, 9]]", "[[s, 9], [A.out, 3]]", 12),
        ("[[s, 9]]", "[[s, 9], [A.out, 1, 3]]", 9),
        ("[[s, 3], [t, 2], [s, 3, 4]]", "[[s, 3], [t, 2], [s, 3, 2], [u, 4]]", 7),
    ],
)
def test_common_prefixes(one: str, other: str, common: int) -> None:
    case = scenario(ENGINE, FULL, f"[{{add: {{id: A, prompt: {one}}}}}, {{add: {{id: B, prompt: {other}}}}}]", "null")
    prefixes = Prefixes(case)
    assert prefixes.common(0, 1) == prefixes.common(1, 0) == common
    assert prefixes.common(1, 1) > 10**9


def test_salt_and_adapter_are_part_of_the_prefix() -> None:
    adds = ", ".join(
        f"{{add: {{id: {i}, prompt: [[s, 9]]{more}}}}}"
        for i, more in (
            ("A", ""),
            ("B", ", salt: x"),
            ("C", ", salt: x"),
            ("D", ", lora: x"),
        )
    )
    prefixes = Prefixes(scenario(ENGINE, FULL, f"[{adds}]", "null"))
    assert [prefixes.common(0, 1), prefixes.common(1, 2), prefixes.common(0, 3), prefixes.common(1, 3)] == [0, 9, 0, 0]


@pytest.mark.parametrize(
    ("group", "start", "end"),
    [
        ("{kind: full, block: 4}", 0, 0),
        ("{kind: sliding_window, block: 4, window: 6}", 0, 16),  # the token at 21 sees [16, 22)
        ("{kind: sliding_window_mla, block: 4, window: 6}", 0, 16),
        ("{kind: rswa, block: 4, window: 6}", 9, 16),  # the prompt of 9 tokens stays
        ("{kind: chunked_local, block: 4, chunk: 8}", 0, 16),
        ("{kind: mamba, block: 4}", 0, 20),  # the state after 21 tokens lies with the token at 20
        ("{kind: circular, block: 4}", 0, 0),
    ],
)
def test_what_a_group_may_drop(group: str, start: int, end: int) -> None:
    view = Replay(scenario(ENGINE, f"[{group}]", "[{add: {id: A, prompt: [[s, 9]]}}]", "null"), RULES).groups[0]
    assert view.droppable(21, 9) == (start, end)
    assert [view.may_be_null(position, 21, 9) for position in range(6)] == [
        start <= position * 4 and position * 4 + 4 <= end for position in range(6)
    ]


def test_room_and_hits_of_a_group() -> None:
    case = scenario(
        ENGINE, "[{kind: full, block: 4}, {kind: circular, block: 4}]", "[{add: {id: A, prompt: [[s, 9]]}}]", "null"
    )
    full, ring = Replay(case, RULES).groups
    assert (full.room([1, 2]), full.num_hit_blocks(8), full.num_hit_blocks(9)) == (8, 2, 3)
    assert (ring.room([]), ring.num_hit_blocks(9)) == (0, 0)
    assert ring.room([3]) > 10**9


def replayed(case: Scenario, num_records: int) -> Replay:
    replay = Replay(case, RULES)
    for record in history_of(case)[:num_records]:
        replay.advance(record)
    return replay


SHARED = scenario(
    ENGINE,
    FULL,
    "[{add: {id: A, prompt: [[s, 9]], max_tokens: 6}}, {step: 2}, "
    "{add: {id: B, prompt: [[s, 8], [b, 3]], max_tokens: 3}}, {run: 50}]",
    "null",
)


def test_words_for_blocks() -> None:
    replay = replayed(SHARED, 6)  # start, two steps of A, B's admission
    assert replay.describe(0) == "is the null block"
    assert replay.describe(1) == "holds tokens [0, 4) of request A, shared by A and B"
    assert replay.describe(3) == "holds tokens [8, 11) of request A"
    assert replay.describe(4) == "holds tokens [8, 11) of request B"
    assert replay.describe(9) == "holds nothing that was written, held by nobody"
    assert replay.describe(20) == "is outside the pool of 20 blocks"
    gone = replayed(SHARED, len(history_of(SHARED)))
    assert gone.describe(1) == "holds tokens [0, 4) of request A, held by nobody"
    assert gone.holders(1) == []


def test_words_for_rings() -> None:
    case = scenario(
        ENGINE,
        "[{kind: full, block: 4}, {kind: circular, block: 4}]",
        "[{add: {id: A, prompt: [[s, 6]]}}, {step: 1}]",
        "null",
    )
    assert replayed(case, 2).describe(3) == "holds the ring of request A"


def test_the_record_is_left_as_it_was() -> None:
    history = history_of(SHARED)
    replay = Replay(SHARED, RULES)
    for record in history:
        replay.advance(record)
    assert history == history_of(SHARED)


def test_who_has_not_ended() -> None:
    history = history_of(SHARED)
    assert replayed(SHARED, len(history) - 1).unfinished() == []
    case = scenario(
        ENGINE,
        FULL,
        "[{add: {id: A, prompt: [[s, 9]], max_tokens: 30}}, {run: 2}, {add: {id: B, prompt: [[s, 9]]}}, {run: 9}]",
        "null",
    )
    first_run = next(i for i, record in enumerate(history_of(case)) if getattr(record, "action", "") == "run")
    assert replayed(case, first_run + 1).unfinished() == ["A"]

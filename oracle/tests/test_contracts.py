"""The contract of DecodeBenchConnector: its answers, the blocks it must write, and with what. IDs are written out."""

from __future__ import annotations

import pytest

from oracle.contracts import contract_for
from oracle.tests.histories import RULES, history_of, scenario, scheduled
from sim.releases import rules_of
from sim.scenario import Scenario

FULL = "[{kind: full, block: 16}]"
BIG = "{blocks: 300, max_model_len: 2048}"


def loads(case: Scenario, request: str, step: int) -> list[list[int]]:
    contract = contract_for(case, RULES)
    assert contract is not None
    record = scheduled(history_of(case), step)
    assert record.tables is not None
    return contract.loads(record.tables[request], record.hits[request], record.external[request])


def test_all_tokens_but_the_last_are_external() -> None:
    case = scenario(BIG, FULL, "[{add: {id: A, prompt: [[a, 1621]]}}, {step: 1}]")
    record = scheduled(history_of(case), 1)
    assert record.external == {"A": 1620}
    assert loads(case, "A", 1) == [list(range(1, 103))]


@pytest.mark.parametrize("gone", [True, False])
def test_of_a_shared_prefix_only_the_suffix_block(gone: bool) -> None:
    wait = "{run: 50}" if gone else "{step: 1}"
    case = scenario(
        BIG,
        FULL,
        f"[{{add: {{id: A, prompt: [[s, 1616], [a, 5]], max_tokens: 4}}}}, {wait}, "
        "{add: {id: B, prompt: [[s, 1616], [b, 5]], max_tokens: 4}}, {step: 1}]",
    )
    step = 5 if gone else 2
    record = scheduled(history_of(case), step)
    assert (record.hits["B"], record.external["B"]) == (1616, 4)
    assert record.tables is not None
    assert loads(case, "B", step) == [record.tables["B"][0][101:102]]


def test_once_in_the_life_of_a_request() -> None:
    contract = contract_for(scenario(BIG, FULL, "[{add: {id: A, prompt: [[a, 9]]}}]"), RULES)
    assert contract is not None
    rule = contract.rule()
    assert rule is not None
    assert rule.requires_kv_delivery
    assert rule.matched("A", 100, 16) == (83, False)
    assert rule.matched("A", 100, 99) == (0, False)
    rule.allocated("A", 0)
    assert rule.matched("A", 100, 0) == (99, False)
    rule.allocated("A", 99)
    assert rule.matched("A", 100, 0) == (0, False)
    assert rule.matched("B", 100, 0) == (99, False)
    rule.finished("A")
    assert rule.matched("A", 100, 0) == (99, False)


@pytest.mark.parametrize(
    ("groups", "dcp", "tables", "num_local", "num_external", "expected"),
    [
        ("[{kind: full, block: 16}]", 2, [[1, 2]], 0, 32, [[1]]),
        ("[{kind: full, block: 16}]", 2, [[1, 2]], 0, 33, [[1, 2]]),
        ("[{kind: full, block: 16}]", 1, [[7, 8, 9]], 20, 20, [[8, 9]]),  # begins inside a block
        ("[{kind: full, block: 16}]", 1, [[7, 8, 9]], 0, 17, [[7, 8]]),  # ends inside a block
        ("[{kind: full, block: 16}]", 1, [[7, 8, 9]], 32, 0, [[]]),
        ("[{kind: mla, block: 4}, {kind: full, block: 16}]", 1, [[1, 2, 3, 4, 5], [6, 7]], 8, 8, [[3, 4], [6]]),
        (
            "[{kind: full, block: 16}, {kind: sliding_window, block: 16, window: 20}]",
            1,
            [[1, 2, 3, 4], [0, 0, 5, 6]],
            0,
            53,
            [[1, 2, 3, 4], [5, 6]],
        ),
        (
            "[{kind: full, block: 16}, {kind: sliding_window, block: 16, window: 16}]",
            2,
            [[1, 2], [0, 0, 5, 6]],
            0,
            53,
            [[1, 2], [5, 6]],
        ),
        ("[{kind: full, block: 16}, {kind: circular, block: 8}]", 1, [[1, 2, 3], [4]], 32, 1, [[3], [4]]),
        ("[{kind: mamba, block: 16, speculative_blocks: 2}]", 1, [[0, 0, 5, 6, 7]], 0, 40, [[5]]),
    ],
)
def test_the_blocks_of_the_external_tokens(
    groups: str, dcp: int, tables: list[list[int]], num_local: int, num_external: int, expected: list[list[int]]
) -> None:
    engine = f"{{blocks: 60, max_model_len: 64, prefix_caching: false, dcp: {dcp}}}"
    contract = contract_for(scenario(engine, groups, "[{add: {id: A, prompt: [[a, 9]]}}]"), RULES)
    assert contract is not None
    assert contract.loads(tables, num_local, num_external) == expected


def test_what_a_fill_leaves() -> None:
    groups = (
        "[{kind: full, block: 16}, {kind: circular, block: 8}, {kind: mamba, block: 64}, "
        "{kind: full, block: 16, dtype: fp8_e4m3}]"
    )
    case = scenario(
        "{blocks: 60, max_model_len: 64, prefix_caching: false}",
        groups,
        "[{add: {id: A, prompt: [[a, 9]]}}]",
        "{name: DecodeBenchConnector, extra: {fill_mean: 1000000.0}}",
    )
    contract = contract_for(case, RULES)
    assert contract is not None
    assert [value.element.hex() for value in contract.values] == ["7449", "00", "00", "7e"]
    assert not any(value.is_random for value in contract.values)


def test_drawn_values_where_memory_holds_numbers() -> None:
    case = scenario(
        "{blocks: 60, max_model_len: 64, prefix_caching: false}",
        "[{kind: full, block: 16}, {kind: mamba, block: 64}]",
        "[{add: {id: A, prompt: [[a, 9]]}}]",
        "{name: DecodeBenchConnector, extra: {fill_std: 0.5}}",
    )
    contract = contract_for(case, RULES)
    assert contract is not None
    assert [value.is_random for value in contract.values] == [True, False]


@pytest.mark.parametrize(
    ("groups", "release", "num_blocks"),
    [
        ("[{kind: full, block: 16}, {kind: circular, block: 8}]", "0.33.0", [9, 0]),
        ("[{kind: full, block: 16}, {kind: circular, block: 8}]", "0.30.0", [0, 0]),  # no such option yet
        ("[{kind: full, block: 16}, {kind: full, block: 16, dtype: float16}]", "0.33.0", [0, 0]),  # zeroed before use
        ("[{kind: full, block: 16}, {kind: mamba, block: 64}]", "0.33.0", [0, 9]),
    ],
)
def test_the_fill_at_startup(groups: str, release: str, num_blocks: list[int]) -> None:
    case = scenario(
        "{blocks: 9, max_model_len: 64, prefix_caching: false}",
        groups,
        "[{add: {id: A, prompt: [[a, 9]]}}]",
        "{name: DecodeBenchConnector, extra: {startup_fill: true}}",
    )
    contract = contract_for(case, rules_of(release))
    assert contract is not None
    assert [len(ids) for ids in contract.startup_fill()] == num_blocks
    selected = contract.loads([[1], [2]], 0, 8)
    assert [bool(ids) for ids in selected] == [not count for count in num_blocks]


def test_no_contract() -> None:
    steps = "[{add: {id: A, prompt: [[a, 9]]}}]"
    assert contract_for(scenario(BIG, FULL, steps, "null"), RULES) is None
    assert contract_for(scenario(BIG, FULL, steps, "{name: SomeOtherConnector}"), RULES) is None

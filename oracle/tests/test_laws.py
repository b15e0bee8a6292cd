"""Every law from both sides: a history that keeps it, and for each cause one that breaks it in that way alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from oracle.contracts import contract_for
from oracle.laws import LAWS, judge, same_history, sentence
from oracle.tests.histories import RULES, causes, filled, history_of, scenario, scheduled, verdicts
from sim.history import Acted, CachedKey, Failure, History, Scheduled, Selection, StateRecord, Updated, Written
from sim.releases import rules_of
from sim.scenario import LoadFailed, Scenario
from sim.simulator import Simulator

# Two requests share their first two blocks; the second comes while the first is alive.
SHARED = scenario(
    "{blocks: 20, max_model_len: 64}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[s, 9]], max_tokens: 6}}, {step: 2}, "
    "{add: {id: B, prompt: [[s, 8], [b, 3]], max_tokens: 3}}, {run: 50}]",
    "null",
)
CONNECTED = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4, layers: 2}, {kind: sliding_window, block: 4, window: 6}, {kind: circular, block: 4}]",
    "[{add: {id: A, prompt: [[s, 13]], max_tokens: 6}}, {step: 2}, "
    "{add: {id: B, prompt: [[s, 12], [b, 9]], max_tokens: 3}}, {run: 50}]",
)
STATES = scenario(
    "{blocks: 20, max_model_len: 64, prefix_caching: false, max_num_batched_tokens: 8, max_num_seqs: 4}",
    "[{kind: full, block: 4}, {kind: mamba, block: 64}]",
    "[{add: {id: A, prompt: [[a, 19]], max_tokens: 6}}, {add: {id: B, prompt: [[b, 9]], max_tokens: 3}}, {run: 50}]",
    "null",
)
# Evictions, preemptions and hits in a pool that is just large enough for one.
TIGHT = scenario(
    "{blocks: 9, max_model_len: 32, max_num_batched_tokens: 16}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[s, 9]], max_tokens: 14}}, {add: {id: B, prompt: [[s, 8], [b, 3]], max_tokens: 12}}, "
    "{add: {id: C, prompt: [[c, 13]], max_tokens: 9}}, {run: 200}]",
    "null",
)
ALL = {"shared": SHARED, "connected": CONNECTED, "states": STATES, "tight": TIGHT}


LOADED = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4}, {kind: sliding_window, block: 4, window: 6}]",
    "[{add: {id: A, prompt: [[s, 17]], max_tokens: 6, external: 12, load: async}}, "
    "{add: {id: B, prompt: [[b, 9]], max_tokens: 12}}, {step: 3}, {load_done: A}, {step: 2}, "
    "{add: {id: C, prompt: [[s, 16], [c, 3]], max_tokens: 3, external: 2, load: async}}, {load_done: C}, {step: 1}, "
    "{load_done: C}, {run: 50}]",
    "{name: scripted}",
)
# B hits 16 tokens and computes the last 5 of them again; so it does with a load that arrives late.
REPLAYED = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4}, {kind: sliding_window_mla, block: 4, window: 5, bounded_replay: true}]",
    "[{add: {id: A, prompt: [[s, 17]], max_tokens: 6}}, {step: 2}, "
    "{add: {id: B, prompt: [[s, 16], [b, 3]], max_tokens: 3, external: 2, load: async}}, {step: 1}, {load_done: B}, "
    "{add: {id: C, prompt: [[c, 19]], max_tokens: 3, external: 8, load: async}}, {step: 1}, {load_done: C}, {run: 50}]",
    "{name: scripted}",
)
ENCODED = scenario(
    "{blocks: 19, max_model_len: 32, max_num_batched_tokens: 32, prefix_caching: false, chunked_prefill: false}",
    "[{kind: full, block: 4}, {kind: cross, block: 4}]",
    "[{add: {id: A, prompt: [[a, 9]], max_tokens: 16, encoder: 14}}, "
    "{add: {id: B, prompt: [[b, 3]], max_tokens: 20, encoder: 17}}, {run: 60}]",
    "null",
)
ALL |= {"loaded": LOADED, "replayed": REPLAYED, "encoded": ENCODED}


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_a_faultless_history_breaks_no_law(case: Scenario) -> None:
    assert verdicts(case, history_of(case)) == []
    assert verdicts(case, Simulator(case, RULES).history()) == []


def test_the_cases_show_what_they_are_there_for() -> None:
    assert scheduled(history_of(SHARED), 3).hits == {"B": 8}
    assert any(isinstance(record, Scheduled) and record.preempted for record in history_of(TIGHT))
    assert any(isinstance(record, Scheduled) and record.zeroed for record in history_of(STATES))
    connected = scheduled(history_of(CONNECTED), 3)
    assert connected.selected is not None
    assert connected.selected["B"].groups == [[9, 10], [11, 12], [13]]
    replayed = scheduled(history_of(REPLAYED), 3)
    assert (replayed.hits, replayed.scheduled["B"]) == ({"B": 16}, 8)


def test_every_law_has_a_number_and_a_sentence() -> None:
    assert {law.number for law in LAWS} == {1, 2, 3, 4, 5, 6, 7, 8, 9, 11}
    assert all(law.sentence.endswith(".") and law.check.__doc__ for law in LAWS)
    assert sentence(5).startswith("The worker receives")


def tables_of(record: StateRecord) -> dict[str, list[list[int]]]:
    assert isinstance(record, StateRecord)
    assert record.tables is not None
    return record.tables


# ----------------------------------------------------------------------------------------------------------------- law 1


def _free(history: History, step: int) -> list[int]:
    free = scheduled(history, step).free
    assert free is not None
    return free


def _refs(history: History, step: int) -> list[int]:
    refs = scheduled(history, step).refs
    assert refs is not None
    return refs


def _leak(history: History) -> None:
    _refs(history, 2)[1] += 1


def _lose(history: History) -> None:
    _refs(history, 3)[1] -= 1


def _put_held_into_queue(history: History) -> None:
    _free(history, 2).append(1)


def _queue_twice(history: History) -> None:
    _free(history, 2).append(_free(history, 2)[0])


def _queue_null(history: History) -> None:
    _free(history, 2).append(0)


def _drop_from_queue(history: History) -> None:
    _free(history, 2).pop(3)


def _grow_pool(history: History) -> None:
    _refs(history, 2).append(0)


@pytest.mark.parametrize(
    ("tamper", "cause"),
    [
        (_leak, "reference_leaked"),
        (_lose, "reference_lost"),
        (_put_held_into_queue, "free_and_held"),
        (_queue_twice, "duplicate_free"),
        (_queue_null, "null_free"),
        (_drop_from_queue, "lost_block"),
        (_grow_pool, "pool_size"),
    ],
)
def test_law_1(tamper: Callable[[History], None], cause: str) -> None:
    history = history_of(SHARED)
    tamper(history)
    assert causes(SHARED, history)[0] == cause
    assert all(finding.kind == "pool" and finding.law == 1 for finding in verdicts(SHARED, history))


def test_law_1_names_block_and_holders() -> None:
    history = history_of(SHARED)
    _refs(history, 3)[1] += 1
    assert verdicts(SHARED, history)[0].message == (
        "step 3: block 1 has reference count 3, but it is held 2 times (request A, group 0, position 0; request B, group "
        "0, position 0); it holds tokens [0, 4) of request A, shared by A and B"
    )


def test_law_1_counts_deferred_frees() -> None:
    history = history_of(SHARED)
    record = scheduled(history, 2)
    block = _free(history, 2).pop()
    _refs(history, 2)[block] += 1
    record.deferred = [[block]]
    assert causes(SHARED, history[: history.index(record) + 1]) == []


# ----------------------------------------------------------------------------------------------------------- laws 2 and 3


def test_law_2_two_writers() -> None:
    """The second request is given the block that the first one is writing."""
    history = history_of(SHARED)
    tables = tables_of(scheduled(history, 3))
    tables["B"][0][2] = tables["A"][0][2]
    finding = next(f for f in verdicts(SHARED, history) if f.law == 2)
    assert (finding.cause, finding.request, finding.positions) == ("two_writers", "B", [2])
    assert "is to be written, but is also held by request A, group 0, position 2" in finding.message


def test_law_2_one_block_for_two_groups() -> None:
    history = history_of(STATES)
    tables = tables_of(scheduled(history, 1))
    tables["A"][1][0] = tables["A"][0][0]
    assert causes(STATES, history, 2)[0] == "two_writers"


def test_law_2_readers_may_come_in_the_same_step() -> None:
    """B hits a block that A computes in that very step."""
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 9]]}}, {add: {id: B, prompt: [[s, 8], [b, 3]]}}, {run: 50}]",
        "null",
    )
    history = history_of(case)
    assert scheduled(history, 1).hits["B"] == 8
    assert verdicts(case, history) == []


def test_law_3_who_loads_may_hit_what_another_computes_in_the_step() -> None:
    """A is asked about again after its load has failed. It held blocks before B, but hits what B writes now."""
    case = scenario(
        "{blocks: 13, max_model_len: 16, long_prefill_token_threshold: 1}",
        "[{kind: mla, block: 1}, {kind: full, block: 1}]",
        "[{add: {id: A, prompt: [[p, 3]], max_tokens: 1, external: 1, load: async}}, {step: 1}, {load_failed: {id: A}}, "
        "{add: {id: B, prompt: [[p, 2]], max_tokens: 1}}, {step: 2}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    record = scheduled(history, 3)
    assert (record.hits, record.scheduled) == ({"A": 2}, {"B": 1})
    for tables in ({request: tables_of(record)[request] for request in order} for order in ("AB", "BA")):
        record.tables = tables  # in any order
        assert causes(case, history) == []


def test_law_2_no_slot() -> None:
    history = history_of(SHARED)
    tables_of(scheduled(history, 3))["B"][0].pop()
    assert "no_slot" in causes(SHARED, history, 2)


def test_law_2_no_slot_for_the_encoders_tokens() -> None:
    history = history_of(ENCODED)
    for record in history:
        if isinstance(record, StateRecord) and "A" in tables_of(record):
            del tables_of(record)["A"][1][-1]
    assert "no_slot" in causes(ENCODED, history, 2)


def test_law_3_a_hit_on_other_tokens() -> None:
    history = history_of(SHARED)
    tables = tables_of(scheduled(history, 3))
    tables["B"][0][1] = tables["A"][0][0]
    finding = next(f for f in verdicts(SHARED, history) if f.law == 3)
    assert (finding.kind, finding.cause, finding.request, finding.positions) == ("content", "hit_wrong_tokens", "B", [1])
    assert "block 1 hit for tokens [4, 8), but it holds tokens [0, 4) of request A" in finding.message


# A's tokens [16, 24) are scheduled and keyed, then A has to go in the same step; it comes again and hits token 20.
TAKEN_BACK = scenario(
    "{blocks: 8, max_model_len: 32, max_num_seqs: 4, max_num_batched_tokens: 12, long_prefill_token_threshold: 8, "
    "policy: priority}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[a, 25]], max_tokens: 1, priority: 1}}, "
    "{add: {id: C, prompt: [[c, 1]], max_tokens: 1, priority: 2}}, {step: 1}, "
    "{add: {id: B, prompt: [[b, 4]], max_tokens: 2}}, {run: 20}]",
    "null",
)


def test_law_3_states_that_went_on() -> None:
    """Up to 0.31 vLLM links the key of a prompt's last state once more, to the block in which the state goes on."""
    case = scenario(
        "{blocks: 22, max_model_len: 40, max_num_seqs: 4, async_scheduling: true, prefix_match_unit: 1}",
        "[{kind: full, block: 2}, {kind: mamba, block: 2, mode: align}]",
        "[{add: {id: A, prompt: [[a, 5]], max_tokens: 2}}, {run: 20}]",
        "null",
    )
    assert verdicts(case, history_of(case)) == []
    before = rules_of("0.31.0")
    (finding,) = judge(case, Simulator(case, before).history(), before, None)
    assert (finding.cause, finding.group, finding.positions) == ("outdated_state_key", 1, [2])


@pytest.mark.parametrize(
    ("num_shared", "findings"),
    [
        (32, [("skipped_state_key", 2, [1]), ("hit_skipped_state_key", 3, [1])]),  # B begins at token 24, inside a block
        (33, []),  # at token 32, where a block ends
    ],
)
def test_law_3_ends_of_blocks_that_a_step_passed_over(num_shared: int, findings: list[object]) -> None:
    """A step that writes a checkpoint and begins inside a block leaves no state at the block's end. vLLM caches one there,
    and C goes on from it."""
    case = scenario(
        "{blocks: 20, prefix_match_unit: 8}",
        "[{kind: mamba, block: 16, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 2}, {kind: full, block: 16}]",
        f"[{{add: {{id: A, prompt: [[a, {num_shared}]], max_tokens: 1}}}}, "
        f"{{add: {{id: B, prompt: [[a, {num_shared}], [b, 17]], max_tokens: 1}}}}, {{step: 2}}, "
        f"{{add: {{id: C, prompt: [[a, {num_shared}], [c, 3]], max_tokens: 1}}}}, {{step: 1}}]",
        "null",
    )
    assert [(f.cause, f.step, f.positions) for f in verdicts(case, history_of(case))] == findings


@pytest.mark.parametrize(("release", "found"), [("0.29.0", []), ("0.31.0", ["outdated_state_key"])])
def test_law_3_checkpoints_that_have_no_alignment(release: str, found: list[str]) -> None:
    """In 0.29 a group says how many checkpoints its steps leave, not where they may lie: one after 3 tokens is in order."""
    case = scenario(
        "{blocks: 4, max_model_len: 8}",
        "[{kind: mamba, block: 3, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 2}]",
        "[{add: {id: A, prompt: [[a, 4]], max_tokens: 1}}, {step: 1}]",
        "null",
    )
    history = Simulator(case, rules_of("0.29.0")).history()
    assert (scheduled(history, 1).scheduled, scheduled(history, 1).keys) == ({"A": 4}, [CachedKey(0, 0, 3, [1])])
    assert [finding.cause for finding in judge(case, history, rules_of(release), None)] == found


@pytest.mark.parametrize(("release", "findings"), [("0.31.0", [("passed_over_key", 2, [2])]), ("0.32.0", [])])
def test_law_3_entries_for_states_of_drafts_that_a_step_passed_over(release: str, findings: list[object]) -> None:
    """B's second step, [4, 17), writes the states after 16 and 17 tokens. Up to 0.31 vLLM leaves the drafts' blocks
    where the states after 8 and 12 would be, and caches them."""
    case = scenario(
        "{blocks: 40, max_model_len: 64, max_num_seqs: 4, max_num_batched_tokens: 16, retention_interval: null, "
        "speculative: {method: ngram, tokens: 2}}",
        "[{kind: mamba, block: 4, mode: align, speculative_blocks: 2, checkpoint_blocks: 1, checkpoint_alignment: 4}, "
        "{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[a, 12]], max_tokens: 4}}, {add: {id: B, prompt: [[b, 17]], max_tokens: 1}}, {run: 20}]",
        "null",
    )
    found = judge(case, Simulator(case, rules_of(release)).history(), rules_of(release), None)
    assert [(f.cause, f.step, f.positions) for f in found] == findings


@pytest.mark.parametrize("accepted", [6, 2])
def test_law_3_states_of_right_drafts(accepted: int) -> None:
    """Six right drafts behind token 1 pass the ends of blocks of 4 after tokens 4 and 8, two of them one. Only the state at
    the last such end is put into place; vLLM caches both."""
    case = scenario(
        "{blocks: 40, max_model_len: 64, async_scheduling: true, retention_interval: null, "
        f"speculative: {{method: draft_model, tokens: 6, accept: [{accepted}]}}}}",
        "[{kind: mamba, block: 4, mode: align, speculative_blocks: 6}]",
        "[{add: {id: A, prompt: [[a, 1]], max_tokens: 9}}, {run: 40}]",
        "null",
    )
    found = [(f.cause, f.step, f.positions) for f in verdicts(case, history_of(case))]
    assert found == ([("drafted_state_key", 3, [0])] if accepted == 6 else [])


@pytest.mark.parametrize("release", ["0.30.0", "0.33.0"])
def test_law_3_checkpoints_of_steps_that_did_not_fit(release: str) -> None:
    """A's second step, with a draft, waits for room. The output of the first caches the checkpoint that it was to leave."""
    case = scenario(
        "{blocks: 7, max_model_len: 5, async_scheduling: true, retention_interval: null, "
        "speculative: {method: draft_model, tokens: 3, accept: [1]}}",
        "[{kind: mamba, block: 1, mode: align, speculative_blocks: 3, checkpoint_blocks: 1, checkpoint_alignment: 1}]",
        "[{add: {id: A, prompt: [[a, 2]], max_tokens: 2}}, {step: 2}]",
        "{name: DecodeBenchConnector}",
    )
    found = judge(case, Simulator(case, rules_of(release)).history(), rules_of(release), None)
    assert [(f.cause, f.step, f.positions) for f in found] == [("unwritten_key", 2, [2])]


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_law_3_checkpoints_of_steps_with_drafts(accepted: int) -> None:
    """The state after 2 tokens is keyed where A's step [1, 4) would leave it, were it one of the prefill. What becomes of
    its drafts does not matter; with those of the next step the block may get a later state."""
    case = scenario(
        f"{{blocks: 16, max_model_len: 32, speculative: {{method: eagle, tokens: 2, accept: [{accepted}]}}}}",
        "[{kind: mamba, block: 1, mode: align, speculative_blocks: 2, checkpoint_blocks: 1, checkpoint_alignment: 1}]",
        "[{add: {id: A, prompt: [[a, 1]], max_tokens: 6}}, {run: 40}]",
        "null",
    )
    for release in ("0.30.0", "0.31.0"):
        found = judge(case, Simulator(case, rules_of(release)).history(), rules_of(release), None)
        assert {f.cause for f in found} == {"drafted_checkpoint_key"}
        assert (found[0].step, found[0].positions) == (2, [1])
    assert verdicts(case, history_of(case)) == []


@pytest.mark.parametrize(
    ("engine", "groups", "add", "expected"),
    [
        (
            "{blocks: 4, speculative: {method: eagle, tokens: 2}}",
            "[{kind: mamba, block: 1, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 1}]",
            "{id: A, prompt: [[a, 2]], max_tokens: 2, external: 2}",
            "drafted_checkpoint_key",
        ),
        (
            "{blocks: 7, async_scheduling: true, prefix_match_unit: 1, speculative: {method: draft_model, tokens: 2}}",
            "[{kind: full, block: 2}, {kind: mamba, block: 2, mode: align, checkpoint_blocks: 1}]",
            "{id: A, prompt: [[a, 1]], max_tokens: 2}",
            "outdated_state_key",
        ),
    ],
    ids=["checkpoint of a padded admission", "state at the prompt's end, keyed once more"],
)
def test_law_3_keys_of_the_state_after_the_prompt(engine: str, groups: str, add: str, expected: str) -> None:
    case, rules = scenario(engine, groups, f"[{{add: {add}}}, {{run: 40}}]", "{name: scripted}"), rules_of("0.30.0")
    contract = contract_for(case, rules)
    assert contract is not None
    found = judge(case, Simulator(case, rules, contract.rule()).history(), rules, contract)
    assert {f.cause for f in found} == {expected}


def test_law_3_a_checkpoint_s_place_that_right_drafts_pass() -> None:
    """A's step [2, 6) keeps a place for a checkpoint, where the state after 4 tokens would be. Its drafts are right, and
    only the state after 6 is put into place; vLLM caches both."""
    case = scenario(
        "{blocks: 16, max_model_len: 16, async_scheduling: true, retention_interval: null, prefix_match_unit: 1, "
        "speculative: {method: draft_model, tokens: 3, accept: [3]}}",
        "[{kind: mamba, block: 2, mode: align, speculative_blocks: 3, checkpoint_blocks: 1, checkpoint_alignment: 1}, "
        "{kind: circular, block: 1}]",
        "[{add: {id: A, prompt: [[a, 2]], max_tokens: 6}}, {run: 40}]",
        "null",
    )
    assert [(f.cause, f.positions) for f in verdicts(case, history_of(case))] == [("drafted_state_key", [1])]


def test_law_3_blocks_of_states_that_are_let_go_and_taken_again_in_one_step() -> None:
    """In a tight pool a block that a step leaves may come back as one for the states of drafts. It holds what it held: A's
    own earlier state, which explains a key that is linked to it; or, in B's table, the state that B has hit."""
    states = "[{kind: mamba, block: 1, mode: align, speculative_blocks: 1, checkpoint_blocks: 1, checkpoint_alignment: 1}]"
    own = scenario(
        "{blocks: 6, max_model_len: 42, long_prefill_token_threshold: 3, retention_interval: null, "
        "speculative: {method: eagle, tokens: 1}}",
        states,
        "[{add: {id: A, prompt: [[a, 13]], max_tokens: 1}}, {step: 4}]",
        "null",
    )
    before = rules_of("0.30.0")
    found = judge(own, Simulator(own, before).history(), before, None)
    assert {f.cause for f in found} == {"passed_over_key"}
    hit = scenario(
        "{blocks: 5, max_model_len: 40, retention_interval: null, reserve_full_isl: false, "
        "speculative: {method: draft_model, tokens: 1, accept: [1]}}",
        states,
        "[{add: {id: A, prompt: [[s, 5]], max_tokens: 2}}, {run: 40}, "
        "{add: {id: B, prompt: [[s, 5], [b, 1]], max_tokens: 6}}, {step: 8}]",
        "null",
    )
    assert [f.cause for f in verdicts(hit, history_of(hit)) if f.law == 3] == []


def test_law_3_a_wrong_key_is_the_cause_where_what_it_found_is_copied() -> None:
    """A state is found in the middle of a block and copied into the request's own."""
    case = scenario(
        "{blocks: 10, policy: priority, prefix_match_unit: 2, reserve_full_isl: false}",
        "[{kind: full, block: 8}, {kind: mamba, block: 4, mode: align}]",
        "[{add: {id: A, prompt: [[p0, 31]], max_tokens: 1, external: 15, load: async}}, {step: 1}, {load_done: A}, "
        "{add: {id: B, prompt: [[p0, 31]], max_tokens: 1, external: 23}}, {step: 6}]",
        "{name: scripted}",
    )
    history = history_of(case)
    found = [(f.cause, f.step, f.group, f.observed) for f in verdicts(case, history)]
    assert found == [("uncomputed_key", 4, 1, 7), ("hit_uncomputed_key", 7, 1, 9)]
    assert (7, 9) in [tuple(copy) for copy in scheduled(history, 7).copies]


@pytest.mark.parametrize("replay", [True, False])
def test_law_3_states_do_not_go_back(replay: bool) -> None:
    """B hits 8 tokens and the state after them. What a window has computed again begins before that state."""
    case = scenario(
        "{blocks: 40, max_model_len: 32}",
        "[{kind: full, block: 4}, {kind: mamba, block: 4, mode: align}, "
        f"{{kind: sliding_window_mla, block: 4, window: 4, bounded_replay: {str(replay).lower()}}}]",
        "[{add: {id: A, prompt: [[p, 9]], max_tokens: 1}}, {run: 9}, "
        "{add: {id: B, prompt: [[p, 8], [b, 5]], max_tokens: 1}}, {step: 1}]",
        "null",
    )
    found = [(f.cause, f.request, f.group) for f in verdicts(case, history_of(case))]
    assert found == ([("replayed_state", "B", 1)] if replay else [])


@pytest.mark.parametrize("replay", [True, False])
def test_law_2_a_step_that_ends_among_tokens_computed_again(replay: bool) -> None:
    """16 tokens are loaded and 8 of them computed again: after 12 tokens no block is there for the state."""
    case = scenario(
        "{blocks: 40, max_model_len: 32, max_num_batched_tokens: 4, max_num_seqs: 4}",
        "[{kind: full, block: 4}, {kind: mamba, block: 4, mode: align}, "
        f"{{kind: sliding_window_mla, block: 4, window: 8, bounded_replay: {str(replay).lower()}}}]",
        "[{add: {id: A, prompt: [[p, 21]], max_tokens: 1, external: 16, load: sync}}, {step: 1}]",
        "{name: scripted}",
    )
    assert causes(case, history_of(case)) == (["replayed_state"] if replay else [])


def test_law_3_keys_of_tokens_that_a_preemption_took_back() -> None:
    """vLLM does so itself, and the model with it. Keys of tokens that were computed are none of that."""
    findings = verdicts(TAKEN_BACK, history_of(TAKEN_BACK))
    assert [(f.cause, f.step, f.observed) for f in findings] == [("uncomputed_key", 3, 6), ("hit_uncomputed_key", 4, 6)]
    history = history_of(TAKEN_BACK)
    taken_back = scheduled(history, 3)
    assert taken_back.preempted == ["A"]
    assert taken_back.keys is not None
    # The same step links a key of tokens that A did compute to a wrong block: that is another fault.
    taken_back.keys = [key._replace(blocks=[5]) if key.num_tokens == 16 else key for key in taken_back.keys]
    assert "key_wrong_tokens" in causes(TAKEN_BACK, history[: history.index(taken_back) + 1], 3)


def test_law_3_a_hit_on_tokens_that_differ() -> None:
    """The same history, but the prompts share less than what was hit."""
    other = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 9]], max_tokens: 6}}, {step: 2}, "
        "{add: {id: B, prompt: [[s, 7], [b, 4]], max_tokens: 3}}, {run: 50}]",
        "null",
    )
    assert "hit_wrong_tokens" in causes(other, history_of(SHARED), 3)


def test_law_3_a_hit_across_salts() -> None:
    text = (
        "[{{add: {{id: A, prompt: [[s, 9]], max_tokens: 6}}}}, {{step: 2}}, "
        "{{add: {{id: B, prompt: [[s, 8], [b, 3]], max_tokens: 3{salt}}}}}, {{run: 50}}]"
    )
    engine, groups = "{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]"
    plain, salted = (scenario(engine, groups, text.format(salt=salt), "null") for salt in ("", ", salt: pepper"))
    assert causes(plain, history_of(plain)) == []
    assert causes(salted, history_of(salted)) == []
    assert "hit_wrong_tokens" in causes(salted, history_of(plain), 3)


def test_law_3_outputs_are_part_of_the_prefix() -> None:
    """B's prompt continues A's by what A generated, and hits it."""
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 7]], max_tokens: 6}}, {run: 50}, "
        "{add: {id: B, prompt: [[s, 7], [A.out, 6], [b, 3]], max_tokens: 3}}, {run: 50}]",
        "null",
    )
    history = history_of(case)
    assert any(isinstance(record, Scheduled) and record.hits.get("B") == 12 for record in history)
    assert verdicts(case, history) == []


def test_law_3_a_needed_entry_is_null() -> None:
    history = history_of(SHARED)
    tables_of(scheduled(history, 4))["A"][0][0] = 0
    assert "needed_block_null" in causes(SHARED, history, 3)


def test_law_3_a_window_may_leave_blocks_but_not_too_early() -> None:
    history = history_of(CONNECTED)
    tables = tables_of(scheduled(history, 1))["A"][1]
    assert tables[0] == 0  # tokens [0, 4) of 12, with a window of 6
    assert "needed_block_null" not in causes(CONNECTED, history)
    tables[1] = 0
    assert "needed_block_null" in causes(CONNECTED, history, 3)


def test_law_3_an_entry_names_another_block() -> None:
    history = history_of(SHARED)
    tables_of(scheduled(history, 4))["A"][0][0] = 15
    assert "entry_replaced" in causes(SHARED, history, 3)


def test_law_3_zeroing_a_held_block() -> None:
    history = history_of(STATES)
    assert scheduled(history, 1).zeroed  # written afterwards in the same step: no harm
    held = tables_of(scheduled(history, 1))["A"][0][0]
    scheduled(history, 2).zeroed.append(held)
    finding = next(f for f in verdicts(STATES, history) if f.law == 3)
    assert (finding.cause, finding.request, finding.positions) == ("held_block_overwritten", "A", [0])


def test_law_3_zeroing_what_is_hit_in_the_same_step() -> None:
    history = history_of(SHARED)
    scheduled(history, 3).zeroed.append(1)
    assert "hit_wrong_tokens" in causes(SHARED, history, 3)


def test_law_3_copies_carry_their_content() -> None:
    """B gets a copy of A's second block instead of the block itself."""
    history = history_of(SHARED)
    record = scheduled(history, 3)
    tables = tables_of(record)
    record.copies = [(tables["A"][0][1], 19)]
    for later in history[history.index(record) :]:
        if isinstance(later, StateRecord) and "B" in tables_of(later):
            tables_of(later)["B"][0][1] = 19
    assert causes(SHARED, history, 3) == []
    record.copies = [(tables["A"][0][0], 19)]
    assert "hit_wrong_tokens" in causes(SHARED, history, 3)


def test_law_3_a_key_of_other_tokens() -> None:
    history = history_of(SHARED)
    keys = scheduled(history, 1).keys
    assert keys is not None
    keys[0] = CachedKey(0, 0, 4, [keys[1].blocks[0]])
    finding = next(f for f in verdicts(SHARED, history) if f.law == 3)
    assert (finding.cause, finding.positions) == ("key_wrong_tokens", [0])
    assert "first 4 tokens of request A is linked to block 2, which holds tokens [4, 8) of request A" in finding.message


def test_law_3_a_key_of_tokens_not_computed_yet() -> None:
    history = history_of(SHARED)
    keys = scheduled(history, 1).keys
    assert keys is not None
    keys.append(CachedKey(0, 0, 12, [3]))
    assert "key_wrong_tokens" in causes(SHARED, history, 3)


def test_law_3_a_key_survives_the_reuse_of_its_block() -> None:
    history = history_of(TIGHT)
    keys = scheduled(history, 2).keys
    assert keys is not None
    kept = next(key for key in keys if key.blocks == [5])  # C's; A gets the block when C has been preempted
    for record in history[history.index(scheduled(history, 2)) :]:
        if isinstance(record, StateRecord) and record.keys is not None and kept not in record.keys:
            record.keys = sorted([*record.keys, kept])
    (finding,) = (f for f in verdicts(TIGHT, history) if f.law == 3)
    assert (finding.cause, finding.step, finding.observed) == ("key_wrong_tokens", 9, 5)


def test_law_3_keys_that_are_not_told_again_still_stand() -> None:
    """A gets C's old block in step 9. If the keys did not change since step 8, C's is still linked to it."""
    history = history_of(TIGHT)
    last = scheduled(history, 8)
    assert last.keys is not None
    last.keys.append(CachedKey(0, 2, 4, [5]))
    for record in history[history.index(last) + 1 :]:
        if isinstance(record, StateRecord):
            record.keys = None
    findings = [f for f in verdicts(TIGHT, history) if f.law == 3]
    assert [(f.cause, f.step, f.observed) for f in findings] == [("key_wrong_tokens", 9, 5)]
    assert causes(TIGHT, history[: history.index(last) + 1]) == []


def test_law_2_a_block_that_is_hit_in_part_is_written_on() -> None:
    """B's local tokens end inside block 3, which A still writes."""
    history = history_of(SHARED)
    record = scheduled(history, 3)
    record.hits["B"] = 9
    record.scheduled["B"] = 2
    tables_of(record)["B"][0][2] = 3
    finding = next(f for f in verdicts(SHARED, history) if f.law == 2)
    assert (finding.cause, finding.request, finding.positions) == ("two_writers", "B", [2])


def test_law_3_a_block_that_is_hit_in_part() -> None:
    """Alone with it, B may write on; what is there must be its own prefix up to the last local token."""
    history = history_of(SHARED)
    record = scheduled(history, 3)
    for later in history[history.index(record) :]:
        if isinstance(later, StateRecord):
            tables_of(later).pop("A", None)
            later.refs = later.free = None
    record.scheduled.pop("A")
    tables_of(record)["B"][0][2] = 3
    record.hits["B"] = 8
    assert causes(SHARED, history[: history.index(record) + 1]) == []
    record.hits["B"] = 9  # the 9th token is A's alone
    assert causes(SHARED, history[: history.index(record) + 1], 3) == ["hit_wrong_tokens"]


def test_law_3_what_a_load_brings_is_there_once_it_has_arrived() -> None:
    """Its blocks are cached and hit after that; without its arrival nobody ever wrote them."""
    history = history_of(LOADED)
    assert [record.hits for record in history if isinstance(record, Scheduled) and "C" in record.hits] == [
        {"C": 16},
        {"C": 18},
    ]
    for record in history:
        if isinstance(record, Updated) and "A" in record.arrived:
            record.arrived.remove("A")
    assert {"load_missing", "key_wrong_tokens", "hit_wrong_tokens"} == set(causes(LOADED, history))


FAILED = (
    "[{add: {id: A, prompt: [[p, 33]], max_tokens: 2, external: 32, load: sync}}, "
    "{add: {id: B, prompt: [[p, 32], [b, 3]], max_tokens: 2}}, "
    "{schedule: 1}, {load_failed: {id: A, from_block: 1}}, {update: 1}, "
)


def _failing(steps: str, budget: int = 40) -> Scenario:
    engine = f"{{blocks: 20, max_model_len: 64, max_num_batched_tokens: {budget}}}"
    connector = "{name: scripted, load_failure: recompute}"
    return scenario(engine, "[{kind: full, block: 8}]", f"{FAILED}{steps}]", connector)


@pytest.mark.parametrize("budget", [16, 40])
def test_law_3_what_failed_to_load_is_computed_before_it_is_read(budget: int) -> None:
    case = _failing("{run: 20}", budget)
    history = history_of(case)
    assert scheduled(history, 2).scheduled["A"] == min(budget, 25)
    assert verdicts(case, history) == []


def test_law_3_who_shares_a_failed_load_must_not_read_too_early() -> None:
    case = _failing("{run: 20}", 16)
    history = history_of(case)
    first = scheduled(history, 2)
    assert first.scheduled == {"A": 16}
    first.scheduled["B"] = 3
    assert causes(case, history[: history.index(first) + 1]) == ["hit_failed_load"]


def test_law_3_keys_of_a_failed_load_must_not_outlive_its_request() -> None:
    """As vLLM lets them: A is gone before it has computed what its blocks' keys promise."""
    case = _failing("{abort: A}, {abort: B}, {add: {id: C, prompt: [[p, 33]], max_tokens: 2}}, {run: 20}")
    history = history_of(case)
    assert scheduled(history, 2).hits == {"C": 32}
    assert causes(case, history) == ["hit_failed_load"]


@pytest.mark.parametrize(
    ("group", "first", "second", "expected"),
    [
        # B is there when the failure is reported, and computes A's tokens in A's place, which C then hits.
        (
            "{kind: full, block: 4}",
            "{add: {id: B, prompt: [[p, 9]], max_tokens: 1}}",
            "{run: 9}, {add: {id: C, prompt: [[p, 9]], max_tokens: 1}}, ",
            [],
        ),
        # B comes later and hits keys that vLLM has kept.
        ("{kind: full, block: 4}", "", "{add: {id: B, prompt: [[p, 9]], max_tokens: 1}}, ", ["hit_failed_load"]),
        (
            "{kind: mamba, block: 4, mode: align}",
            "",
            "{add: {id: B, prompt: [[p, 9]], max_tokens: 1}}, ",
            ["hit_failed_load"],
        ),
    ],
)
def test_law_3_a_load_fails_when_its_request_is_gone(group: str, first: str, second: str, expected: list[str]) -> None:
    others = f"{first}, {{schedule: 1}}, " if first else ""
    case = scenario(
        "{blocks: 12, max_num_seqs: 4, async_scheduling: true, retention_interval: null}",
        f"[{group}]",
        "[{add: {id: A, prompt: [[p, 9]], max_tokens: 1, external: 4}}, {schedule: 1}, {load_failed: {id: A}}, {abort: A}, "
        f"{others}{{update: 1}}, {second}{{run: 20}}]",
        "{name: scripted, load_failure: recompute}",
    )
    assert causes(case, history_of(case)) == expected


@pytest.mark.parametrize(("larger", "expected"), [(4, ["checkpoint_key_again"]), (1, [])])
def test_law_3_a_checkpoint_is_the_one_that_its_first_key_tells(larger: int, expected: list[str]) -> None:
    """As vLLM keys it: after the first 4 of 11 tokens, and later after 10. Without larger blocks that is where it is."""
    case = scenario(
        "{blocks: 24, async_scheduling: true, retention_interval: null, speculative: {method: eagle, tokens: 1}}",
        "[{kind: mamba, block: 1, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 2}, "
        f"{{kind: full, block: {larger}, draft: true}}]",
        "[{add: {id: A, prompt: [[p, 11]], max_tokens: 2}}, {run: 20}]",
        "null",
    )
    assert causes(case, history_of(case)) == expected


@pytest.mark.parametrize(("threshold", "expected"), [(0, []), (4, ["hit_failed_load"])])
def test_law_3_keys_of_a_failed_load_must_not_run_ahead_of_its_request(threshold: int, expected: list[str]) -> None:
    """As vLLM lets them: A computes its 16 tokens again at once, or 4 in the step in which B hits them all."""
    case = scenario(
        f"{{blocks: 10, max_num_batched_tokens: 24, max_num_seqs: 4, long_prefill_token_threshold: {threshold}}}",
        "[{kind: full, block: 8}]",
        "[{add: {id: A, prompt: [[p, 17]], external: 16}}, {schedule: 1}, {load_failed: {id: A}}, {update: 1}, "
        "{add: {id: B, prompt: [[p, 17]], max_tokens: 2}}, {run: 20}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    assert scheduled(history, 2).hits == {"B": 16}
    assert causes(case, history) == expected


def test_law_3_the_key_of_a_state_whose_load_failed_must_not_run_ahead() -> None:
    """As vLLM lets it: A computes the first token of its block again, and B hits the key of the second."""
    case = scenario(
        "{blocks: 9, max_num_batched_tokens: 8, max_num_seqs: 4, long_prefill_token_threshold: 1, "
        "retention_interval: null}",
        "[{kind: mamba, block: 2, mode: align}]",
        "[{add: {id: A, prompt: [[p, 6]], max_tokens: 1, external: 1}}, {schedule: 1}, {load_failed: {id: A}}, "
        "{update: 1}, {add: {id: B, prompt: [[p, 3]], max_tokens: 1}}, {run: 40}]",
        "{name: scripted, load_failure: recompute}",
    )
    assert causes(case, history_of(case)) == ["failed_load_shared", "hit_failed_load", "failed_load_key"]


@pytest.mark.parametrize(("budget", "expected"), [(16, ["failed_load_no_slot"]), (24, [])])
def test_law_2_a_state_computed_again_after_a_failed_load_needs_a_block(budget: int, expected: list[str]) -> None:
    """As vLLM gives it none: where the step before went further, there is null. A step as long as that has its own."""
    case = scenario(
        f"{{blocks: 8, max_num_batched_tokens: {budget}}}",
        "[{kind: mamba, block: 4, mode: align}]",
        "[{add: {id: A, prompt: [[p, 25]], max_tokens: 1, external: 4}}, {schedule: 1}, {load_failed: {id: A}}, "
        "{update: 1}, {run: 40}]",
        "{name: scripted, load_failure: recompute}",
    )
    assert causes(case, history_of(case)) == expected


@pytest.mark.parametrize(("between", "expected"), [("", ["copied_before_load"]), ("{step: 1}, ", [])])
def test_law_3_a_part_of_a_block_must_not_be_copied_before_it_is_loaded(between: str, expected: list[str]) -> None:
    """As vLLM lets it: C hits the block that is loaded for B in the same step. A step later all is there."""
    case = scenario(
        "{blocks: 9, prefix_match_unit: 1}",
        "[{kind: full, block: 4}, {kind: mamba, block: 2, mode: align}]",
        "[{add: {id: A, prompt: [[p, 2]], max_tokens: 1}}, {run: 10}, {add: {id: B, prompt: [[p, 4]], external: 3}}, "
        f"{between}{{add: {{id: C, prompt: [[p, 4]]}}}}, {{run: 10}}]",
        "{name: scripted}",
    )
    history = history_of(case)
    assert any(r.copies for r in history if isinstance(r, Scheduled) and r.hits.get("C"))
    assert causes(case, history) == expected


@pytest.mark.parametrize(("num_steps", "expected"), [(1, ["copied_before_computed"]), (2, [])])
def test_law_3_a_part_of_a_block_must_not_be_copied_before_it_is_computed(num_steps: int, expected: list[str]) -> None:
    """As vLLM lets it: C goes on from a state of A's, inside the block that B computes in the same step. A step later all
    is there."""
    case = scenario(
        "{blocks: 20, max_model_len: 32, prefix_match_unit: 2}",
        "[{kind: full, block: 8}, {kind: mamba, block: 4, mode: align}]",
        "[{add: {id: A, prompt: [[p, 12], [q, 3]], max_tokens: 1}}, {run: 10}, {add: {id: B, prompt: [[p, 25]]}}, "
        f"{{step: {num_steps}}}, {{add: {{id: C, prompt: [[p, 17]]}}}}, {{run: 10}}]",
        "null",
    )
    history = history_of(case)
    (hit,) = (r for r in history if isinstance(r, Scheduled) and r.hits.get("C"))
    assert (hit.hits, hit.scheduled["B"], len(hit.copies)) == ({"C": 12}, {1: 16, 2: 1}[num_steps], 1)
    assert causes(case, history) == expected


def test_law_3_tokens_that_failed_to_load_may_be_computed_again_twice() -> None:
    """A window with replay computes tokens 2 and 3 again at once. With a step in flight behind that one, A goes back to
    token 2 nevertheless."""
    case = scenario(
        "{blocks: 9, max_num_batched_tokens: 3, max_num_seqs: 2, async_scheduling: true}",
        "[{kind: sliding_window_mla, block: 2, window: 2, bounded_replay: true}]",
        "[{add: {id: A, prompt: [[p, 6]], max_tokens: 1, external: 4}}, {schedule: 2}, {load_failed: {id: A}}, "
        "{update: 1}, {schedule: 1}, {update: 2}, {run: 10}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    assert [scheduled(history, step).scheduled["A"] for step in (1, 2, 3)] == [3, 1, 3]
    assert causes(case, history) == []


FALLS = [
    ("{kind: sliding_window, block: 1, window: 2}", 8, ["missing_before_failed_load"]),  # token 6 needs 5, too
    ("{kind: sliding_window, block: 4, window: 4}", 11, ["missing_before_failed_load"]),  # blocks 1 and 2 are loaded
    ("{kind: sliding_window, block: 1, window: 1}", 8, []),
    ("{kind: chunked_local, block: 4, chunk: 4}", 12, []),  # a chunk begins where the block does
    ("{kind: chunked_local, block: 4, chunk: 6}", 20, ["missing_before_failed_load"]),  # token 16 needs 12 to 15, too
    ("{kind: mamba, block: 2, mode: align}", 9, ["missing_before_failed_load"]),
    ("{kind: mamba, block: 8, mode: align}", 8, []),  # from the first token on
    ("{kind: full, block: 2}", 9, []),
    ("{kind: sliding_window_mla, block: 1, window: 2, bounded_replay: true}", 8, []),  # the step computed them anyway
]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(("group", "num_prompt", "expected"), FALLS)
def test_law_3_who_computes_again_has_what_it_needs(group: str, num_prompt: int, expected: list[str], load: str) -> None:
    """As vLLM lets it: all but the last token of the prompt is loaded, and fails from the first block loaded on."""
    case = scenario(
        "{blocks: 30, max_model_len: 32}",
        f"[{group}]",
        f"[{{add: {{id: A, prompt: [[p, {num_prompt}]], max_tokens: 2, external: {num_prompt - 1}, load: {load}}}}}, "
        "{schedule: 1}, {load_failed: {id: A}}, {update: 1}, {load_done: A}, {run: 20}]",
        "{name: scripted, load_failure: recompute}",
    )
    assert causes(case, history_of(case)) == expected


def test_law_3_a_load_that_failed_and_is_not_asked_for_again_leaves_nothing() -> None:
    """In several groups nothing of A's load counts. Looked for again, its prompt is found in the blocks of B."""
    case = scenario(
        "{blocks: 12}",
        "[{kind: sliding_window_mla, block: 3, window: 1, bounded_replay: true}, {kind: full, block: 3}]",
        "[{add: {id: A, prompt: [[p, 13]], max_tokens: 1, external: 10, load: async}}, {step: 1}, {load_failed: {id: A}}, "
        "{add: {id: B, prompt: [[p, 12]], max_tokens: 1}}, {run: 20}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    assert scheduled(history, 3).hits == {"A": 12}
    assert causes(case, history) == []


def test_law_3_a_load_that_failed_may_come_again() -> None:
    """Into the block that it had: what counts is what the second one brings."""
    case = scenario(
        "{blocks: 3}",
        "[{kind: full, block: 2}]",
        "[{add: {id: A, prompt: [[p, 2]], max_tokens: 1, external: 65, load: async}}, {step: 1}, {load_failed: {id: A}}, "
        "{step: 2}, {load_done: A}, {run: 20}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    assert [r.external.get("A") for r in history if isinstance(r, Scheduled)] == [2, None, 2, None, 0]
    assert causes(case, history) == []
    again = next(r for r in history if isinstance(r, Updated) and "A" in r.arrived and not r.lost)
    again.arrived.remove("A")
    assert causes(case, history) == ["load_missing", "key_wrong_tokens"]


def test_law_3_who_shares_a_failed_load_computes_its_step_again() -> None:
    """B has hit all but the last token of what A loads; both are computed again, and the pool has no block to spare."""
    case = scenario(
        "{blocks: 4, max_model_len: 32}",
        "[{kind: full, block: 1}]",
        "[{add: {id: A, prompt: [[p, 2]], external: 31}}, {add: {id: B, prompt: [[p, 2]]}}, {schedule: 1}, "
        "{load_failed: {id: A}}, {update: 1}, {run: 20}]",
        "{name: scripted, load_failure: recompute}",
    )
    history = history_of(case)
    assert scheduled(history, 2).scheduled["B"] == scheduled(history, 1).scheduled["B"] == 1
    assert causes(case, history) == []


def test_law_3_a_checkpoint_of_drafts_is_told_as_such_where_they_were_wrong() -> None:
    """As vLLM keys it in 0.30 and 0.31: the last token's, which is known by then and which no step has computed."""
    case = scenario(
        "{blocks: 8, async_scheduling: true, prefix_match_unit: 1, speculative: {method: eagle, tokens: 3, accept: [1]}}",
        "[{kind: sliding_window, block: 2, window: 1}, "
        "{kind: mamba, block: 2, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 2}]",
        "[{add: {id: A, prompt: [[p, 1]], max_tokens: 2}}, {step: 3}]",
        "null",
    )
    rules = rules_of("0.31.0")
    findings = judge(case, Simulator(case, rules).history(), rules, None)
    assert [finding.cause for finding in findings] == ["drafted_checkpoint_key"]


STATE_KEYS_AGAIN = [
    # B hits what A has computed of the block that A's last step holds a later state in.
    (
        "{blocks: 6, prefix_match_unit: 1, async_scheduling: true}",
        "[{kind: mamba, block: 2, mode: align}, {kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[p, 15]], max_tokens: 2}}, {step: 1}, {add: {id: B, prompt: [[p, 15]]}}, {run: 40}]",
        ["outdated_state_key"],
    ),
    # A's key is linked to a block that a second copy has been made into.
    (
        "{blocks: 7, prefix_match_unit: 1, async_scheduling: true}",
        "[{kind: full, block: 2}, {kind: mamba, block: 2, mode: align}]",
        "[{add: {id: A, prompt: [[p, 3]], max_tokens: 3}}, {add: {id: B, prompt: [[p, 4]]}}, {run: 20}]",
        ["outdated_state_key", "hit_outdated_state_key"],
    ),
]


@pytest.mark.parametrize(("release", "shows"), [("0.31.0", True), ("0.32.0", False)])
@pytest.mark.parametrize(("engine", "groups", "steps", "expected"), STATE_KEYS_AGAIN)
def test_law_3_a_later_state_of_the_same_prefix_is_told_as_such(
    engine: str, groups: str, steps: str, expected: list[str], release: str, shows: bool
) -> None:
    """As vLLM keys it to 0.31, whatever else has become of the requests: preempted, or copied over again."""
    case = scenario(engine, groups, steps, "null")
    rules = rules_of(release)
    findings = judge(case, Simulator(case, rules).history(), rules, None)
    assert [finding.cause for finding in findings] == (expected if shows else [])


# ----------------------------------------------------------------------------------------------------------------- law 4


@pytest.mark.parametrize(
    ("groups", "cause"),
    [([[1, 2], [3]], "counted_from_offer"), ([[1], []], None), ([[1, 2], []], "ends_late"), ([[2], [3]], "starts_late")],
)
def test_law_4_tokens_counted_from_an_offer_that_was_cut(groups: list[list[int]], cause: str | None) -> None:
    """7 tokens were offered, the first 4 were granted: the blocks of the last 4, [3, 7), are a fault with a name."""
    case = scenario(
        "{blocks: 16, max_model_len: 64}",
        "[{kind: full, block: 4}, {kind: sliding_window_mla, block: 4, window: 1, bounded_replay: true}]",
        "[{add: {id: A, prompt: [[a, 8]], max_tokens: 1}}, {step: 1}]",
    )
    rules = rules_of("0.32.0")
    contract = contract_for(case, rules)
    assert contract is not None
    history = Simulator(case, rules, contract.rule()).history()
    record = scheduled(history, 1)
    assert (record.asked, record.external) == ([("A", 0, 7)], {"A": 4})
    record.selected = {"A": Selection(groups, 4)}
    found = [finding.cause for finding in judge(case, history, rules, contract) if finding.law == 4]
    assert found[:1] == ([cause] if cause else [])


def select(history: History, group: int, ids: list[int], case: Scenario = CONNECTED, step: int = 3) -> None:
    """Another selection of B in one group; the worker is told, and does, the same."""
    record = scheduled(history, step)
    assert record.selected is not None
    groups = [*record.selected["B"].groups]
    groups[group] = ids
    record.selected = record.received = {"B": Selection(groups, record.selected["B"].tokens)}
    record.written = filled(case, record.selected)


@pytest.mark.parametrize(
    ("group", "ids", "cause"),
    [
        # Group 0: [1, 2, 3] hit, [9, 10] external, 14 for the last token. Group 1: [0, 0, 0, 11, 12, 15].
        (0, [1, 2, 3, 9, 10], "starts_early"),
        (0, [10], "starts_late"),
        (0, [9, 10, 14], "ends_late"),
        (0, [9], "ends_early"),
        (0, [], "missing_block"),
        (0, [1, 9, 10], "extra_block"),
        (0, [10, 9], "wrong_order"),
        (0, [9, 9, 10], "duplicate_block"),
        (0, [9, 10, 39], "foreign_block"),
        (0, [11, 12], "wrong_group"),
        (1, [0, 0, 11, 12], "null_selected"),
        (2, [], "missing_block"),
    ],
)
def test_law_4(group: int, ids: list[int], cause: str) -> None:
    history = history_of(CONNECTED)
    select(history, group, ids)
    findings = verdicts(CONNECTED, history)
    assert [(f.kind, f.law, f.cause, f.request, f.group) for f in findings] == [("selection", 4, cause, "B", group)]
    assert findings[0].observed == ids


def test_law_4_says_whose_tokens_the_chosen_block_holds() -> None:
    history = history_of(CONNECTED)
    select(history, 0, [1, 2])
    (finding,) = verdicts(CONNECTED, history)
    assert finding.message == (
        "step 3: request B, group 0 (full): position 0: block 1 selected, which holds tokens [0, 4) of request A, shared "
        "by A and B; expected position 3: block 9, for external tokens [12, 20)"
    )
    assert (finding.expected, finding.observed, finding.positions) == ([9, 10], [1, 2], [0, 1])


def test_law_4_a_block_size_without_context_parallelism() -> None:
    case = scenario(
        "{blocks: 40, max_model_len: 128, dcp: 2}",
        "[{kind: full, block: 16}]",
        "[{add: {id: B, prompt: [[s, 33]]}}, {run: 50}]",
    )
    history = history_of(case)
    assert verdicts(case, history) == []
    select(history, 0, [1, 2], case, step=1)
    (finding,) = verdicts(case, history)
    assert (finding.cause, finding.expected) == ("wrong_block_size", [1])
    assert finding.message.endswith("as with blocks of 16 tokens instead of 32: decode context parallelism of 2 ignored")


def test_law_4_a_request_that_is_left_out() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 3)
    record.selected = record.received = {}
    record.written = []
    assert causes(CONNECTED, history, 4) == causes(CONNECTED, history) == ["missing_request"]


def test_law_4_a_request_that_was_granted_nothing() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 4)
    record.selected = record.received = {"B": Selection([[9], [], []], 4)}
    record.written = filled(CONNECTED, record.selected)
    assert causes(CONNECTED, history, 4) == causes(CONNECTED, history) == ["stale_metadata"]
    history = history_of(CONNECTED)
    record = scheduled(history, 2)
    record.selected = record.received = {"C": Selection([[9], [], []], 4)}
    record.written = filled(CONNECTED, record.selected)
    assert causes(CONNECTED, history, 4) == causes(CONNECTED, history) == ["unasked_selection"]


def test_law_4_announced_tokens_and_groups() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 3)
    assert record.selected is not None
    right = record.selected["B"]
    record.selected = record.received = {"B": Selection(right.groups, 5)}
    assert causes(CONNECTED, history, 4) == causes(CONNECTED, history) == ["wrong_tokens"]
    record.selected = record.received = {"B": Selection(right.groups[:2], right.tokens)}
    assert causes(CONNECTED, history, 4) == ["wrong_group_count"]
    record.selected = record.received = {"B": Selection([*right.groups, [17]], right.tokens)}
    assert causes(CONNECTED, history) == ["wrong_group_count"]


# ----------------------------------------------------------------------------------------------------------------- law 5


def receive(history: History, group: int, ids: list[int]) -> None:
    """The worker is told, and does, something else than was selected for B."""
    record = scheduled(history, 3)
    assert record.selected is not None
    groups = [*record.selected["B"].groups]
    groups[group] = ids
    record.received = {"B": Selection(groups, record.selected["B"].tokens)}
    record.written = filled(CONNECTED, record.received)


@pytest.mark.parametrize(
    ("group", "ids", "cause"),
    [
        (0, [9], "missing_block"),
        (0, [9, 10, 14], "extra_block"),
        (1, [12, 11], "wrong_order"),
        (1, [11, 12, 12], "duplicate_block"),
    ],
)
def test_law_5(group: int, ids: list[int], cause: str) -> None:
    history = history_of(CONNECTED)
    receive(history, group, ids)
    (finding,) = verdicts(CONNECTED, history)
    assert (finding.kind, finding.law, finding.cause, finding.request, finding.group) == ("routing", 5, cause, "B", group)


def test_law_5_names_the_block_that_did_not_arrive() -> None:
    history = history_of(CONNECTED)
    receive(history, 0, [9])
    assert "block 10, which holds tokens [16, 20) of request B, did not arrive" in verdicts(CONNECTED, history)[0].message


def test_law_5_order_and_announced_tokens() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 3)
    assert record.selected is not None
    right = record.selected["B"]
    record.received = {"B": Selection(right.groups, 5)}
    assert causes(CONNECTED, history, 5) == causes(CONNECTED, history) == ["wrong_tokens"]
    both = {"B": right, "C": Selection([[], [], []], 0)}
    record.selected, record.received = both, dict(reversed(both.items()))
    assert causes(CONNECTED, history, 5) == ["wrong_order"]


def test_law_5_whole_requests() -> None:
    history = history_of(CONNECTED)
    sent = scheduled(history, 1).selected
    assert sent is not None
    for received, cause in (
        ({}, "missing_request"),
        ({"A": sent["A"]}, "stale_metadata"),
        ({"C": Selection([[9], [], []], 4)}, "extra_request"),
    ):
        record = scheduled(history, 3 if cause == "missing_request" else 2)
        right = record.received
        record.received = received
        record.written = filled(CONNECTED, received)
        assert causes(CONNECTED, history, 5) == [cause]
        record.received = right
        assert right is not None
        record.written = filled(CONNECTED, right)


# ----------------------------------------------------------------------------------------------------------------- law 6


def write(history: History, *entries: Written) -> None:
    """What the fill of step 3 did, in place of the faultless entries of the same layers."""
    record = scheduled(history, 3)
    assert record.written is not None
    layers = {entry.layer for entry in entries}
    record.written = [*(entry for entry in record.written if entry.layer not in layers), *entries]


@pytest.mark.parametrize(
    ("entries", "cause", "group"),
    [
        ([Written(1, "g1.l0", [11, 12], "unwritten", num_bytes=9)], "wrong_layers", 1),
        ([Written(0, "g0.l1", [9, 10], "unwritten", num_bytes=9)], "wrong_layers", 0),
        (
            [Written(0, "g0.l1", [9], "filled", "763c", 9), Written(0, "g0.l1", [10], "unwritten", num_bytes=9)],
            "missing_block",
            0,
        ),
        ([Written(2, "g2.l0", [13], "wrong_value", "763c", 9)], "wrong_value", 2),
        (
            [Written(0, "g0.l0", [9, 10], "filled", "763c", 9), Written(0, "g0.l0", [1], "outside", "763c", 9)],
            "outside_selection",
            0,
        ),
        (
            [Written(0, "g0.l0", [9, 10], "filled", "763c", 9), Written(0, "g0.l0", [11, 12], "outside", "763c", 9)],
            "wrong_layers",
            0,
        ),
        ([Written(-1, "", [4], "padding", num_bytes=1)], "padding_written", None),
    ],
)
def test_law_6(entries: list[Written], cause: str, group: int | None) -> None:
    history = history_of(CONNECTED)
    write(history, *entries)
    (finding,) = verdicts(CONNECTED, history)
    assert (finding.kind, finding.law, finding.cause, finding.group) == ("fill", 6, cause, group)


def test_law_6_says_what_the_overwritten_block_holds() -> None:
    history = history_of(CONNECTED)
    write(history, Written(0, "g0.l0", [9, 10], "filled", "763c", 9), Written(0, "g0.l0", [1], "outside", None, 1))
    (finding,) = verdicts(CONNECTED, history)
    assert finding.message == (
        "step 3: group 0 (full): layer g0.l0: 1 bytes of blocks [1] were written unasked; block 1 holds tokens [0, 4) of "
        "request A, shared by A and B"
    )


def test_law_6_a_layer_nobody_looked_at() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 3)
    assert record.written is not None
    record.written = record.written[1:]
    assert causes(CONNECTED, history, 6) == causes(CONNECTED, history) == ["not_looked_at"]


def test_law_6_block_ids_taken_for_rows() -> None:
    case = scenario(
        "{blocks: 40, max_model_len: 64}",
        "[{kind: full, block: 4, kernel_block: 2}]",
        "[{add: {id: B, prompt: [[s, 9]]}}, {run: 50}]",
    )
    history = history_of(case)
    scheduled(history, 1).written = [
        Written(0, "g0.l0", [1], "unwritten", num_bytes=9),  # of rows 2 and 3 only row 2 was written, as block 2's
        Written(0, "g0.l0", [2], "unwritten", num_bytes=9),
        Written(0, "g0.l0", [0], "outside", num_bytes=9),
    ]
    assert set(causes(case, history)) == {"wrong_rows"}


DRAWN = scenario(
    "{blocks: 40, max_model_len: 64}",
    "[{kind: full, block: 4}]",
    "[{add: {id: B, prompt: [[s, 9]]}}, {run: 50}]",
    "{name: DecodeBenchConnector, extra: {fill_mean: 0.5, fill_std: 0.25}}",
)


def test_law_6_drawn_values_weigh_by_their_number() -> None:
    history = history_of(DRAWN)
    scheduled(history, 1).written = [
        Written(0, "g0.l0", [1], "filled", None, 200, 0.9, 0.25),
        Written(0, "g0.l0", [2], "filled", None, 40_000, 0.5, 0.25),
    ]
    assert causes(DRAWN, history) == []


@pytest.mark.parametrize(
    ("mean", "std", "is_right"), [(0.501, 0.248, True), (0.56, 0.25, False), (0.5, 0.4, False), (0.0, 0.0, False)]
)
def test_law_6_drawn_values(mean: float, std: float, is_right: bool) -> None:
    history = history_of(DRAWN)
    scheduled(history, 1).written = [Written(0, "g0.l0", [1, 2], "filled", None, 20_000, mean, std)]
    assert causes(DRAWN, history) == ([] if is_right else ["wrong_distribution"])


@pytest.mark.parametrize(("other_row", "found"), [(True, ["wrong_rows"]), (False, ["wrong_distribution"])])
def test_law_6_rows_of_another_group_among_drawn_values(other_row: bool, found: list[str]) -> None:
    case = scenario(
        "{blocks: 40, max_model_len: 64}",
        "[{kind: chunked_local, block: 4, chunk: 4, dtype: float16}, {kind: full, block: 4, kernel_block: 2}]",
        "[{add: {id: B, prompt: [[s, 4]]}}, {run: 50}]",
        "{name: DecodeBenchConnector, extra: {fill_mean: 0.5, fill_std: 0.25}}",
    )
    history = history_of(case)
    drawn = Written(0, "g0.l0", [1], "filled", None, 20_000, 0.1, 1.1)
    missing = Written(1, "g1.l0", [2], "unwritten", num_bytes=9)  # block 2 as a row lies in block 1
    scheduled(history, 1).written = [drawn, missing if other_row else Written(1, "g1.l0", [2], "filled")]
    assert causes(case, history) == found


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        (Written(1, "g1.l0", [], "unwritten", num_bytes=96, tensor=0), "missing_states"),
        (Written(1, "g1.l0", [], "wrong_value", "0000", 96, tensor=1), "wrong_value"),
        (Written(1, "g1.l0", [], "outside", "003c", 96, tensor=1), "outside_selection"),
        (Written(1, "g1.l0", [], "filled", "003c", 96, tensor=1), None),
    ],
)
def test_law_6_states_that_are_kept_as_tensors(entry: Written, cause: str | None) -> None:
    case = scenario(
        "{blocks: 9, max_model_len: 32, prefix_caching: false}",
        "[{kind: full, block: 8}, {kind: mamba, block: 32, states: [{}, {dtype: float16}]}]",
        "[{add: {id: A, prompt: [[s, 10]], max_tokens: 1}}, {step: 1}]",
    )
    history = history_of(case)
    record = scheduled(history, 1)
    assert record.written is not None
    record.written = [*record.written, entry]
    found = [finding for finding in verdicts(case, history) if finding.law == 6]
    assert [finding.cause for finding in found] == ([cause] if cause else [])
    assert all("state tensor" in finding.message for finding in found)


def test_law_6_the_fill_at_startup() -> None:
    case = scenario(
        "{blocks: 9, max_model_len: 16}",
        "[{kind: full, block: 4}, {kind: circular, block: 4}]",
        "[{add: {id: B, prompt: [[s, 9]]}}, {run: 50}]",
        "{name: DecodeBenchConnector, extra: {startup_fill: true}}",
    )
    history = history_of(case)
    start = history[0]
    start.written = [Written(0, "g0.l0", list(range(9)), "filled", "763c", 9)]  # type: ignore[union-attr]
    assert causes(case, history) == []
    start.written = []  # type: ignore[union-attr]
    assert causes(case, history) == ["not_looked_at"]


# --------------------------------------------------------------------------------------------------------- laws 7, 8, 10


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (Failure(step=2, type="ValueError", phase="schedule", message="Cannot get 3 free blocks"), "out_of_blocks"),
        (Failure(step=2, type="KeyError", phase="schedule", message="x"), "schedule_exception"),
        (Failure(step=2, type="RuntimeError", phase="worker", message="x"), "worker_exception"),
        (Failure(step=2, type="ChildDied", phase="child", message="killed by signal 9"), "child_died"),
    ],
)
def test_law_7(failure: Failure, cause: str) -> None:
    history = [*history_of(SHARED)[:3], failure]
    (finding,) = verdicts(SHARED, history)
    assert (finding.kind, finding.law, finding.cause) == ("crash", 7, cause)


def test_a_step_that_does_not_end_is_a_hang() -> None:
    history = [*history_of(SHARED)[:3], Failure(step=2, type="Hang", phase="child", message="no end after 60 seconds")]
    (finding,) = verdicts(SHARED, history)
    assert (finding.kind, finding.law, finding.cause) == ("hang", 8, "no_answer")
    assert "no end after 60 seconds" in finding.message


def test_law_7_says_where_it_was_raised() -> None:
    raised = Failure(
        step=2, type="KeyError", phase="schedule", trail=["Scheduler.schedule", "Pool._take"], line="raise KeyError(i)"
    )
    (finding,) = verdicts(SHARED, [*history_of(SHARED)[:3], raised])
    assert finding.cause == "KeyError_in_take"
    assert finding.message == "step 2: KeyError in phase schedule in Pool._take (`raise KeyError(i)`): no message"
    assert finding.observed["trail"] == raised.trail


def stalled(case: Scenario) -> History:
    history = history_of(case)[:3]
    return [*history, Acted(step=3, action="run", result="stalled")]


def test_law_8_a_standstill() -> None:
    (finding,) = verdicts(TIGHT, stalled(TIGHT))
    assert (finding.kind, finding.law, finding.cause, finding.observed) == ("hang", 8, "stalled", ["A", "B", "C"])


def test_law_8_promises_nothing_in_a_pool_that_vllm_refuses() -> None:
    small = scenario(
        "{blocks: 8, max_model_len: 32}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 9]]}}, {run: 200}]",
        "null",
    )
    assert verdicts(small, stalled(small)) == []


def test_law_8_round_in_circles() -> None:
    spin: History = [Scheduled(step=3, preempted=["C"]), Updated(step=3)]
    gain: History = [Scheduled(step=3, preempted=["C"]), Updated(step=3, new_tokens={"A": 1})]
    before = history_of(TIGHT)[:3]
    assert causes(TIGHT, [*before, *spin, *spin], 8) == []
    assert causes(TIGHT, [*before, *spin, *spin, *spin], 8) == ["livelock"]
    assert causes(TIGHT, [*before, *gain, *gain, *gain], 8) == []
    reset: History = [*spin, Acted(step=3, action="reset_prefix_cache")]
    assert causes(TIGHT, [*before, *reset, *reset, *reset], 8) == []  # sent back from outside


def test_law_8_a_load_in_between_breaks_the_circle() -> None:
    add = "{add: {id: A, prompt: [[s, 9]], external: 8, load: async}}"
    case = scenario(
        "{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]", f"[{add}, {{step: 9}}]", "{name: scripted}"
    )
    spin: History = [Scheduled(step=3, preempted=["C"]), Updated(step=3)]
    loading: History = [Scheduled(step=3, preempted=["C"], external={"A": 8}, tables={"A": [[1, 2]]}), Updated(step=3)]
    before = history_of(case)[:1]
    assert causes(case, [*before, *spin, *spin, *spin], 8) == ["livelock"]
    assert causes(case, [*before, *spin, *spin, *loading, *spin], 8) == []


def test_law_8_a_load_again_and_again() -> None:
    add = "{add: {id: A, prompt: [[s, 9]], external: 8, load: async}}"
    case = scenario(
        "{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]", f"[{add}, {{step: 9}}]", "{name: scripted}"
    )
    failing = replace(case, steps=(*case.steps, LoadFailed(id="A")))
    load: History = [Scheduled(step=3, external={"A": 8}), Updated(step=3)]
    run: History = [Scheduled(step=3, scheduled={"A": 1}), Updated(step=3)]
    abort: History = [Acted(step=3, action="abort", request="A")]
    before = history_of(case)[:1]
    assert causes(case, [*before, *load, *load], 8) == []
    assert causes(case, [*before, *load, *load, *load], 8) == ["loaded_again"]
    assert causes(case, [*before, *load, *load, *run, *load], 8) == []
    assert causes(case, [*before, *load, *load, *abort, *load], 8) == []
    assert causes(failing, [*before, *load, *load, *load], 8) == []


def test_law_8_a_request_that_is_forgotten() -> None:
    history = history_of(SHARED)
    for record in history:
        if isinstance(record, Updated) and "B" in record.finished:
            record.finished.remove("B")
    assert causes(SHARED, history, 8) == ["lost_request"]


def test_law_8_a_block_that_stays_held() -> None:
    history = history_of(SHARED)
    end = history[-1]
    assert isinstance(end, Acted)
    assert end.refs is not None
    end.refs[5] = 1
    assert causes(SHARED, history, 8) == ["leaked_block"]


def test_law_8_speaks_of_ends_only_where_the_scenario_ends_in_a_run() -> None:
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 9]]}}, {step: 2}]",
        "null",
    )
    assert verdicts(case, history_of(case)) == []


def test_law_8_a_paused_engine_leaves_requests_waiting() -> None:
    cases = [
        scenario(
            "{blocks: 20, max_model_len: 64}",
            "[{kind: full, block: 4}]",
            "[{add: {id: A, prompt: [[s, 9]], max_tokens: 3}}, {step: 1}, {add: {id: B, prompt: [[b, 9]]}}, "
            f"{pause}{{run: 9}}]",
            "null",
        )
        for pause in ("", "{pause: new}, ")
    ]
    history = history_of(cases[1])
    assert verdicts(cases[1], history) == []
    assert [(f.cause, f.observed) for f in verdicts(cases[0], history)] == [("lost_request", ["B"])]


def test_law_8_a_load_that_never_arrives_is_no_standstill() -> None:
    end = {"add": {"id": "A", "prompt": [["a", 20]], "max_tokens": 1, "external": 8, "load": "async"}}
    case = scenario(
        "{blocks: 9, max_model_len: 32}", "[{kind: full, block: 8}]", f"[{end}, {{run: 9}}]", "{name: scripted}"
    )
    history = history_of(case)
    assert isinstance(history[-1], Acted)
    assert history[-1].result == "stalled"
    assert verdicts(case, history) == []
    update = next(record for record in history if isinstance(record, Updated))
    update.arrived = ["A"]
    assert causes(case, history) == ["stalled"]


def test_law_10() -> None:
    assert same_history(history_of(SHARED), history_of(SHARED)) is None
    other = history_of(SHARED)
    _leak(other)
    finding = same_history(history_of(SHARED), other)
    assert finding is not None
    assert (finding.law, finding.cause, finding.step) == (10, "not_repeatable", 2)
    assert "differs in refs" in finding.message
    finding = same_history(history_of(SHARED), history_of(SHARED)[:-1])
    assert finding is not None
    assert finding.cause == "not_repeatable"


# ------------------------------------------------------------------------------------------------------------- what judges


# ---------------------------------------------------------------------------------------------------------------- law 11

COPIED = scenario(
    "{blocks: 30, max_model_len: 64, prefix_match_unit: 4, max_num_batched_tokens: 64}",
    "[{kind: full, block: 8}, {kind: mamba, block: 8, mode: align}]",
    "[{add: {id: A, prompt: [[s, 14]], max_tokens: 2}}, {run: 9}, "
    "{add: {id: B, prompt: [[s, 12], [b, 9]], max_tokens: 2}}, {run: 9}]",
    "null",
)


def test_law_11_a_block_is_zeroed_before_a_copy_gets_into_it() -> None:
    history = history_of(COPIED)
    record = next(r for r in history if isinstance(r, Scheduled) and r.copies and "B" in r.scheduled)
    assert set(record.zeroed) & {target for _, target in record.copies}
    for acts, found in (
        (["zero", "copy", "forward"], []),
        (["copy", "zero", "forward"], ["copy_before_zero"]),
        (["zero", "forward", "copy"], ["forward_before_copy"]),
        (["forward", "zero", "copy"], ["forward_before_copy", "forward_before_zero"]),
        (None, []),
    ):
        record.acts = acts  # type: ignore[assignment]
        assert sorted(causes(COPIED, history, 11)) == found


def test_law_11_a_fill_may_come_late_for_those_who_do_not_compute() -> None:
    history = history_of(CONNECTED)
    record = scheduled(history, 3)
    assert record.received
    assert set(record.received) == {"B"}
    record.acts = ["fill", "forward"]
    assert causes(CONNECTED, history) == []
    record.acts = ["forward", "fill"]
    assert causes(CONNECTED, history) == ["forward_before_fill"]
    del record.scheduled["B"]
    assert causes(CONNECTED, history, 11) == []


def test_hand_made_tables_are_judged_by_the_laws_about_connectors_only() -> None:
    case = scenario(
        "{blocks: 40, max_model_len: 64}\ndriver: direct",
        "[{kind: full, block: 16}]",
        "[{direct: {id: B, num_tokens: 41, local: 20, tables: [[7, 8, 9]]}}, {step: 1}]",
    )
    alike = scenario(
        "{blocks: 40, max_model_len: 64}", "[{kind: full, block: 16}]", "[{add: {id: B, prompt: [[b, 41]]}}, {step: 1}]"
    )
    start = history_of(alike)[0]
    right = {"B": Selection([[8, 9]], 20)}
    record = Scheduled(
        step=1,
        scheduled={"B": 1},
        admitted=["B"],
        hits={"B": 20},
        external={"B": 20},
        tables={"B": [[7, 8, 9]]},
        selected=right,
        received=right,
        written=filled(case, right),
    )
    assert verdicts(case, [start, record]) == []
    early = {"B": Selection([[7, 8, 9]], 20)}
    record.selected = record.received = early
    record.written = filled(case, early)
    assert causes(case, [start, record]) == ["starts_early"]


def test_without_a_contract_the_other_laws_still_judge() -> None:
    history = history_of(CONNECTED)
    select(history, 0, [1, 2])
    assert judge(CONNECTED, history, RULES, None) == []
    _refs(history, 3)[2] += 1
    assert [finding.law for finding in judge(CONNECTED, history, RULES, None)] == [1]


def test_a_fault_is_told_once_per_request_and_group() -> None:
    history = history_of(SHARED)
    for step in (3, 4):
        _refs(history, step)[1] += 1
    findings = [f for f in verdicts(SHARED, history) if f.law == 1]
    assert [finding.fault for finding in findings] == [("pool", 1, "reference_leaked", None)]


def test_an_id_may_come_again() -> None:
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{add: {id: A, prompt: [[s, 9]], max_tokens: 3}}, {step: 1}, {abort: A}, "
        "{add: {id: A, prompt: [[t, 9]], max_tokens: 3}}, {run: 50}, "
        "{add: {id: A, prompt: [[s, 11]], max_tokens: 3}}, {run: 9}]",
        "null",
    )
    history = history_of(case)
    assert any(isinstance(record, Scheduled) and record.hits.get("A") == 8 for record in history)
    assert verdicts(case, history) == []


# ------------------------------------------------------------------------------------- drafts, states, events (2, 3, 9)

DRAFTS = scenario(
    "{blocks: 20, max_model_len: 64, kv_events: true, speculative: {tokens: 3, accept: [1, 0, 3]}}",
    "[{kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[s, 9]], max_tokens: 14}}, {run: 50}]",
    "null",
)
KEPT_STATES = scenario(
    "{blocks: 40, max_model_len: 64, max_num_batched_tokens: 16, retention_interval: null, prefix_match_unit: 2}",
    "[{kind: mamba, block: 4, mode: align}, {kind: full, block: 4}]",
    "[{add: {id: A, prompt: [[s, 11]], max_tokens: 6}}, {run: 50}, "
    "{add: {id: B, prompt: [[s, 11], [b, 5]], max_tokens: 3}}, {run: 50}]",
    "null",
)


@pytest.mark.parametrize("case", [DRAFTS, KEPT_STATES])
def test_drafts_and_states_break_no_law(case: Scenario) -> None:
    assert verdicts(case, history_of(case)) == []


def test_law_3_a_key_of_drafts_that_were_wrong() -> None:
    history = history_of(DRAFTS)
    keys = scheduled(history, 2).keys
    assert keys is not None
    keys.append(CachedKey(0, 0, 12, [3]))  # step 2 computes [9, 13), of which 3 are drafts
    assert "key_wrong_tokens" in causes(DRAFTS, history, 3)


def test_law_3_a_state_is_of_an_exact_number_of_tokens() -> None:
    history = history_of(KEPT_STATES)
    hit = next(record for record in history if isinstance(record, Scheduled) and record.hits.get("B"))
    assert hit.copies
    hit.hits["B"] -= 1
    assert "hit_wrong_tokens" in causes(KEPT_STATES, history, 3)


def test_law_9_events_add_up() -> None:
    for change, cause in ((1, "told_link_missing"), (-1, "link_not_told")):
        history = history_of(DRAFTS)
        told = next(record for record in history if isinstance(record, Updated) and record.events)
        assert told.events is not None
        told.events = told.events + told.events[:1] if change > 0 else told.events[1:]
        findings = verdicts(DRAFTS, history)
        assert {(finding.kind, finding.law, finding.cause) for finding in findings} == {("event", 9, cause)}


def test_law_3_a_prompt_of_one_token_is_loaded_again_over_what_came_before() -> None:
    """It came whole, so its only token is to be computed anew, and it is asked about as if it were new; its block keeps
    its key, and holds that token."""
    case = scenario(
        "{blocks: 4, max_model_len: 8}",
        "[{kind: full, block: 1}]",
        "[{add: {id: A, prompt: [[p, 1]], external: 2, load: async}}, {step: 1}, "
        "{add: {id: B, prompt: [[b, 1]], max_tokens: 2}}, {load_done: A}, {step: 2}]",
        "{name: scripted}",
    )
    history = history_of(case)
    assert [record.external.get("A") for record in history if isinstance(record, Scheduled)] == [1, None, 1]
    assert causes(case, history) == []
    for record in history:
        if isinstance(record, Updated) and "A" in record.arrived:
            record.arrived.remove("A")
    assert "key_wrong_tokens" in causes(case, history)

"""Whole runs of the model with the block IDs written out."""

from __future__ import annotations

import pytest

from sim.history import Acted, Failure, Scheduled, Updated, resolve
from sim.releases import RELEASES, rules_of
from sim.scenario import parse
from sim.simulator import Simulator
from sim.startup import smallest_pool


def scenario(groups, steps, **engine):
    return parse({"kvoracle": 1, "engine": {"blocks": 20, "max_model_len": 64, **engine}, "groups": groups, "steps": steps})


def add(request_id, *prompt, max_tokens=1, **rest):
    return {"add": {"id": request_id, "prompt": [list(span) for span in prompt], "max_tokens": max_tokens, **rest}}


def schedules(history):
    return [record for record in history if isinstance(record, Scheduled)]


FULL = {"kind": "full", "block": 4}
WINDOW = {"kind": "sliding_window", "block": 4, "window": 8}


def test_two_groups_take_blocks_in_order_and_free_them_in_vllms_order():
    history = Simulator(scenario([FULL, WINDOW], [add("A", ["a", 18]), {"run": 9}])).history()
    assert schedules(history)[0].tables == {"A": [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]}
    *_, (_, last) = resolve(history)
    assert last.free == [10, 7, 6, 5, *range(11, 20), 4, 3, 2, 1, 9, 8]


def test_a_second_request_shares_the_full_blocks_of_its_prefix():
    steps = [add("A", ["sys", 8], ["a", 3], max_tokens=9), {"step": 1}, add("B", ["sys", 8], ["b", 3]), {"step": 1}]
    second = schedules(Simulator(scenario([FULL], steps)).history())[1]
    assert second.hits == {"B": 8}
    assert second.tables == {"A": [[1, 2, 3]], "B": [[1, 2, 4]]}
    assert second.scheduled == {"A": 1, "B": 3}


def test_the_last_token_is_always_computed():
    steps = [add("A", ["a", 8]), {"run": 9}, add("B", ["a", 8]), {"step": 1}]
    assert schedules(Simulator(scenario([FULL], steps)).history())[-1].hits == {"B": 4}


def test_salt_and_lora_keep_prefixes_apart():
    for other in ({"salt": "x"}, {"lora": "x"}):
        steps = [add("A", ["a", 9]), {"run": 9}, add("B", ["a", 9], **other), {"step": 1}]
        assert schedules(Simulator(scenario([FULL], steps)).history())[-1].hits == {"B": 0}


def test_without_room_the_last_comer_goes_back_and_is_resumed():
    steps = [add("A", ["a", 7], max_tokens=8), add("B", ["b", 7], max_tokens=8), {"run": 50}]
    history = Simulator(scenario([FULL], steps, blocks=6, prefix_caching=False)).history()
    assert [(r.step, r.preempted) for r in schedules(history) if r.preempted] == [(3, ["B"])]
    assert [r.step for r in schedules(history) if r.resumed] == [9]
    assert history[-1] == Acted(step=history[-1].step, action="run", result="idle")
    assert {i for r in history if isinstance(r, Updated) for i in r.finished} == {"A", "B"}


def test_the_gate_refuses_a_prompt_that_does_not_fit_whole():
    steps = [add("A", ["a", 30]), {"run": 20}]
    limits = {"blocks": 5, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    gated = Simulator(scenario([FULL], steps, **limits)).history()
    assert gated[-1].result == "stalled"
    open_door = Simulator(scenario([FULL], steps, **limits, reserve_full_isl=False)).history()
    assert schedules(open_door)[0].scheduled == {"A": 8}


def test_a_window_gives_blocks_back_while_it_slides():
    steps = [add("A", ["a", 4], max_tokens=20), {"step": 14}]
    history = Simulator(scenario([WINDOW], steps)).history()
    tables = [record.tables["A"][0] for record in schedules(history)]
    assert tables[0] == [1]
    assert tables[7] == [1, 2, 3]  # 10 tokens computed: tokens 3 to 10 are in the window of the 11th
    assert tables[8] == [0, 2, 3]  # 11 computed: block 1 holds tokens 0 to 3 and the window starts at 4
    assert tables[9] == [0, 2, 3, 1]  # a block without a key is the next to be used


def test_a_circular_group_holds_one_block():
    steps = [add("A", ["a", 9], max_tokens=12), {"step": 9}]
    history = Simulator(scenario([FULL, {"kind": "circular", "block": 4}], steps)).history()
    assert {record.tables["A"][1][0] for record in schedules(history)} == {4}
    assert all(len(record.tables["A"][1]) == 1 for record in schedules(history))


def test_decode_context_parallelism_scales_full_attention():
    steps = [add("A", ["a", 9]), {"step": 1}]
    history = Simulator(scenario([FULL], steps, dcp=2)).history()
    assert history[0].scheduler_block_size == 8
    assert schedules(history)[0].tables == {"A": [[1, 2]]}


def test_a_lone_long_prompt_is_cut_by_the_threshold_up_to_0_30_only():
    steps = [add("A", ["a", 20]), {"step": 1}]
    case = scenario([FULL], steps, long_prefill_token_threshold=8)
    tokens = {name: schedules(Simulator(case, rules).history())[0].scheduled["A"] for name, rules in RELEASES.items()}
    assert tokens == {"0.29.0": 8, "0.30.0": 8, "0.31.0": 20, "0.32.0": 20, "0.33.0": 20}


def test_reset_is_refused_while_blocks_are_held_and_preempts_if_asked():
    steps = [
        add("A", ["a", 9], max_tokens=4),
        {"step": 1},
        {"reset_prefix_cache": {}},
        {"reset_prefix_cache": {"running": True}},
    ]
    history = Simulator(scenario([FULL], steps)).history()
    assert [record.result for record in history if isinstance(record, Acted)][-2:] == ["refused", "done"]
    *_, (_, last) = resolve(history)
    assert last.keys == []


@pytest.mark.parametrize(
    ("group", "blocks"),
    [
        (FULL, 1 + 16),
        (WINDOW, 1 + 6),  # ceil((8 - 1 + 10) / 4) + 1
        ({"kind": "circular", "block": 4}, 1 + 1),
        ({"kind": "mamba", "block": 64, "speculative_blocks": 2}, 1 + 3),
    ],
)
def test_smallest_pool_per_kind(group, blocks):
    case = scenario([group], [], max_num_batched_tokens=10, prefix_caching=False)
    assert smallest_pool(case, rules_of("0.33.0")) == blocks


def test_embeddings_are_hit_by_equal_embeddings_only():
    adds = [add(request, ["p", 13]) for request in "ABC"]
    for step in adds[:2]:
        step["add"]["embeds"] = True
    history = Simulator(scenario([FULL], [adds[0], {"step": 1}, *adds[1:], {"step": 1}])).history()
    assert [record.hits for record in history if isinstance(record, Scheduled)] == [{"A": 0}, {"B": 12, "C": 0}]


def test_cross_attention_takes_its_blocks_with_the_admission():
    steps = [{"add": {"id": "A", "prompt": [["a", 3]], "max_tokens": 9, "encoder": 10}}, {"run": 20}]
    settings = {"prefix_caching": False, "chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 64}
    history = Simulator(scenario([FULL, {"kind": "cross", "block": 4}], steps, **settings)).history()
    tables = [record.tables["A"] for record in history if isinstance(record, Scheduled) and record.tables]
    assert (tables[0][0], tables[-1][0]) == ([1], [1, 5, 6])
    assert {tuple(table[1]) for table in tables} == {(2, 3, 4)}


def test_a_load_that_nobody_started_cannot_fail():
    steps = [add("A", ["a", 9]), {"load_failed": {"id": "A"}}, {"run": 5}]
    record = Simulator(scenario([FULL], steps)).history()[-1]
    assert isinstance(record, Acted)
    assert record.result == "idle"


@pytest.mark.parametrize(("release", "hit"), [("0.30.0", 4), ("0.31.0", 0)])
def test_a_salt_once_looked_like_an_adapter_of_that_name(release, hit):
    steps = [
        {"add": {"id": "A", "prompt": [["p", 9]], "max_tokens": 1, "salt": "x"}},
        {"run": 5},
        {"add": {"id": "B", "prompt": [["p", 9]], "max_tokens": 1, "lora": "x"}},
        {"step": 1},
    ]
    history = Simulator(scenario([FULL], steps), rules_of(release)).history()
    assert schedules(history)[-1].hits == {"B": hit}


def test_the_checkpoint_of_a_step_that_did_not_fit_may_lie_behind_the_table():
    """The table has no entries for the states of drafts, so the place beside the last of them is not there yet."""
    case = parse(
        {
            "kvoracle": 1,
            "engine": {
                "blocks": 5,
                "max_model_len": 16,
                "async_scheduling": True,
                "speculative": {"method": "draft_model", "tokens": 3},
            },
            "connector": {"name": "DecodeBenchConnector"},
            "groups": [{"kind": "mamba", "block": 1, "mode": "align", "checkpoint_blocks": 1, "checkpoint_alignment": 1}],
            "steps": [add("A", ["a", 2], max_tokens=6), {"run": 40}],
        }
    )
    *_, last = Simulator(case, RELEASES["0.30.0"]).history()
    assert isinstance(last, Failure)
    assert (last.type, last.phase) == ("AssertionError", "update")


def test_drafts_of_a_padded_admission_are_rejected():
    """They stand for none: B has one token to compute, and gets one token for three rows. Real drafts follow."""
    steps = [add("A", ["a", 9], max_tokens=12), {"step": 2}, add("B", ["a", 9], max_tokens=4), {"step": 2}]
    history = list(Simulator(scenario([FULL], steps, speculative={"tokens": 2, "accept": [2]})).history())
    assert [record.scheduled for record in schedules(history)][2:] == [{"A": 3, "B": 3}, {"A": 3, "B": 3}]
    outputs = [record.new_tokens for record in history if isinstance(record, Updated)]
    assert outputs == [{"A": 1}, {"A": 3}, {"A": 3, "B": 1}, {"A": 3, "B": 3}]

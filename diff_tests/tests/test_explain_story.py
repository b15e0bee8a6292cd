"""The life of blocks, the origin of table entries, and why lookups end where they do."""

from __future__ import annotations

import pytest

from diff_tests.explain.blocks import Place
from diff_tests.explain.lookups import GroupLookup, Lookup
from diff_tests.explain.story import Story
from diff_tests.run import predict
from diff_tests.tests.explain_cases import prefix_case, story_of
from oracle.contracts import contract_for
from oracle.tests.histories import RULES, history_of, scenario
from sim.history import History, Scheduled, Start
from sim.releases import RELEASES
from sim.scenario import loads
from sim.simulator import Simulator

NO_CONNECTOR = "null"


def _plain(engine: str, groups: str, steps: str) -> Story:
    return story_of(scenario(engine, groups, steps, NO_CONNECTOR))


def _origin(story: Story, request: str, position: int, step: int, group: int = 0) -> tuple[str, str]:
    origin = story.origin(Place(request, group, position), step)
    assert origin is not None
    return origin.kind, origin.words


def _lookup(story: Story, request: str) -> Lookup:
    """The last lookup of a request."""
    return [lookup for step in story.steps.values() for lookup in step.lookups if lookup.request == request][-1]


def _part(story: Story, request: str, group: int = 0) -> GroupLookup:
    return _lookup(story, request).groups[group]


# -------------------------------------------------------------------------------------------------------- blocks' lives


def test_a_shared_block_tells_who_took_hit_and_left_it():
    life = [(e.step, e.kind, e.words) for e in story_of(prefix_case()).life(1) if e.kind not in ("selected", "written")]
    assert life == [
        (1, "taken", "A takes it for position 0: fresh, never used"),
        (1, "cached", "can be hit for A: tokens [0, 16)"),
        (3, "hit", "B hits it: tokens [0, 16) of request A; shared with A"),
        (8, "left", "A finished; still held by B"),
        (10, "left", "B finished"),
    ]


def test_a_block_is_coloured_by_what_the_worker_sees_in_each_step():
    story = story_of(prefix_case())
    assert [(cell.step, cell.state, cell.owner) for cell in story.cells(1)] == [
        (1, "held", "A"),
        (3, "shared", "A"),
        (9, "held", "A"),  # A finished in step 8
        (11, "cached", "A"),  # the end
    ]
    assert [(cell.step, cell.state) for cell in story.cells(103)] == [(3, "held"), (11, "free")]
    assert story.cells(200) == []


def test_computing_goes_on_over_many_steps_in_one_event():
    event = next(e for e in story_of(prefix_case()).life(103) if e.kind == "computed")
    assert (event.step, event.last_step, event.words) == (3, 10, "B computes tokens [1620, 1628)")


def test_the_fill_is_one_event_whatever_the_number_of_layers():
    case = scenario(
        "{blocks: 40, max_model_len: 256}",
        "[{kind: full, block: 16, layers: 3}]",
        "[{add: {id: A, prompt: [[a, 40]]}}, {step: 1}]",
    )
    words = [e.words for e in story_of(case).life(1) if e.kind in ("selected", "written")]
    assert words == [
        "the connector selects it for A",
        "filled by the connector, as the contract says (layers g0.l0, g0.l1 and g0.l2)",
    ]


EVICTING = """[
  {add: {id: A, prompt: [[a, 33]], max_tokens: 1}}, {run: 5},
  {add: {id: B, prompt: [[b, 60]], max_tokens: 1}}, {run: 5},
  {add: {id: C, prompt: [[a, 33]], max_tokens: 1}}, {run: 5}]"""


def test_an_evicted_block_says_from_whom_and_the_lookup_that_misses_it_by_whom():
    story = _plain("{blocks: 5, max_model_len: 64}", "[{kind: full, block: 16}]", EVICTING)
    table = story.steps[2].tables["B"][0]
    origins = [_origin(story, "B", position, 2) for position in range(4)]
    assert ("evicted", "evicted from A: tokens [0, 16)") in origins
    assert ("evicted", "evicted from A: tokens [16, 32)") in origins
    assert ("reused", "A's until step 1, not cached") in origins
    part = _part(story, "C")
    assert part.fate[:4] == ("evicted", 2, "B", table[origins.index(("evicted", "evicted from A: tokens [0, 16)"))])
    assert part.words.startswith("position 0 (tokens [0, 16)) is missing: evicted in step 2: B took block")


def test_null_entries_say_why_they_are_null():
    story = _plain(
        "{blocks: 40, max_model_len: 256}",
        "[{kind: sliding_window, block: 16, window: 20}]",
        "[{add: {id: A, prompt: [[a, 64]], max_tokens: 20}}, {step: 10}]",
    )
    assert _origin(story, "A", 0, 10) == ("null", "null: outside the window")
    assert _origin(story, "A", 0, 1)[0] == "fresh"


def test_a_preempted_request_lets_go_of_its_blocks_and_takes_others():
    story = _plain(
        "{blocks: 7, max_model_len: 64, prefix_caching: false}",
        "[{kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[a, 47]], max_tokens: 8}}, {add: {id: B, prompt: [[b, 47]], max_tokens: 8}}, {run: 40}]",
    )
    assert any("B was preempted" in e.words for block in range(1, 7) for e in story.life(block))
    resumed = next(step for step in story.steps.values() if step.record is not None and "B" in step.record.resumed)
    assert _origin(story, "B", 0, resumed.number)[0] == "reused"


def test_a_state_that_is_gone_on_from_is_a_copy():
    story = _plain(
        "{blocks: 40, max_model_len: 256}",
        "[{kind: full, block: 4}, {kind: mamba, block: 16, mode: align}]",
        "[{add: {id: A, prompt: [[a, 25]], max_tokens: 2}}, {run: 9},"
        " {add: {id: B, prompt: [[a, 24], [b, 9]], max_tokens: 2}}, {step: 1}]",
    )
    step = story.steps[story.last_step]
    assert step.record is not None
    ((source, target),) = step.record.copies
    position = step.tables["B"][1].index(target)
    assert _origin(story, "B", position, step.number, group=1) == ("copy", f"copy of block {source}")
    assert any(e.words == f"copied to block {target}" for e in story.life(source))


def test_a_hand_made_table_says_so():
    case = loads(
        """
        kvoracle: 1
        driver: direct
        engine: {blocks: 40}
        connector: {name: DecodeBenchConnector}
        groups: [{kind: full, block: 16}]
        steps: [{direct: {id: A, num_tokens: 40, local: 19, tables: [[5, 9, 7]]}}, {step: 1}]
        """
    )
    shown = {"A": [[5, 9, 7]]}
    history: History = [
        Start(source="direct", release=RULES.release, sees=("tables",), tables={}),
        Scheduled(step=1, admitted=["A"], hits={"A": 19}, external={"A": 20}, tables=shown),
    ]
    story = story_of(case, history)
    assert [_origin(story, "A", position, 1)[1] for position in range(3)] == [
        "hand-made table, local tokens",
        "hand-made table, local tokens",
        "hand-made table",
    ]
    assert [event.words for event in story.life(9)] == ["A has it at position 1: hand-made table, local tokens"]


def test_a_history_that_shows_tables_only_is_told_as_far_as_it_goes():
    case = prefix_case()
    history = history_of(case)
    assert isinstance(history[0], Start)
    history[0].sees = ("tables",)
    for record in history:
        for field in ("free", "refs", "keys", "deferred"):
            if hasattr(record, field):
                setattr(record, field, None)
    story = story_of(case, history)
    assert [e.kind for e in story.life(1) if e.kind not in ("selected", "written")] == ["taken", "hit", "left", "left"]
    assert not any(step.lookups for step in story.steps.values())


def test_loads_that_arrive_and_that_fail_are_told():
    case = scenario(
        "{blocks: 40, max_model_len: 256}",
        "[{kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[a, 40]], external: 32, load: async}}, {step: 1}, {load_done: A}, {step: 2},"
        " {add: {id: B, prompt: [[b, 40]], external: 32, load: async}}, {step: 1},"
        " {load_failed: {id: B, from_block: 1}}, {step: 2}]",
        "{name: scripted}",
    )
    story = story_of(case)
    notes = [note for step in story.steps.values() for note in step.notes]
    assert notes == ["the load of A arrived", "the load of B arrived", "1 block reported as not loaded"]
    assert [block for block in range(1, 40) if any(e.words == "its load failed" for e in story.life(block))]


# --------------------------------------------------------------------------------------------------------------- lookups


def test_a_lookup_ends_before_the_last_token():
    story = story_of(prefix_case())
    lookup = _lookup(story, "B")
    assert (lookup.step, lookup.hit, lookup.found, lookup.limit) == (3, 1616, 1616, 1620)
    assert lookup.groups[0].fate.kind == "limit"
    assert lookup.groups[0].words == (
        "as far as a hit may go: the last token is always computed anew, and the 4 before it fill no block of 16"
    )


def _after(producer: str, consumer: str, groups: str = "[{kind: full, block: 16}]", engine: str = "") -> Story:
    """A producer runs to its end, then a consumer is admitted."""
    return _plain(
        f"{{blocks: 100, max_model_len: 512{engine}}}",
        groups,
        f"[{{add: {{id: A, {producer}}}}}, {{run: 90}}, {{add: {{id: B, {consumer}}}}}, {{step: 1}}]",
    )


@pytest.mark.parametrize(
    ("producer", "consumer", "kind", "words"),
    [
        ("prompt: [[b, 40]]", "prompt: [[a, 40]]", "never_stored", "no request before has these tokens"),
        ("prompt: [[a, 20]]", "prompt: [[a, 20], [b, 40]]", "never_stored", "(A shares the first 20)"),
        ("prompt: [[a, 40]], salt: x", "prompt: [[a, 40]]", "salt", "A has these tokens, but with cache salt 'x'"),
        ("prompt: [[a, 40]], lora: x", "prompt: [[a, 40]], lora: y", "salt", "LoRA adapter 'x' instead of 'y'"),
        ("prompt: [[a, 20]], max_tokens: 2", "prompt: [[a, 20], [A.out, 12], [b, 9]]", "partial", "A ended with 21 tokens"),
    ],
)
def test_a_missing_key_has_a_fate(producer: str, consumer: str, kind: str, words: str):
    part = _part(_after(producer, consumer), "B")
    assert part.fate.kind == kind
    assert words in part.words


def test_a_key_whose_tokens_are_still_being_computed():
    story = _plain(
        "{blocks: 100, max_model_len: 512, max_num_batched_tokens: 64, long_prefill_token_threshold: 32}",
        "[{kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[a, 200]]}}, {step: 1}, {add: {id: B, prompt: [[a, 200]]}}, {step: 1}]",
    )
    lookup, part = _lookup(story, "B"), _part(story, "B")
    assert lookup.found == lookup.hit > 0
    assert part.fate.kind == "not_yet"
    assert "A has computed" in part.words


def test_keys_of_requests_scheduled_before_in_the_same_step_count():
    story = _plain(
        "{blocks: 100, max_model_len: 512}",
        "[{kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[a, 40]]}}, {add: {id: B, prompt: [[a, 40]]}}, {step: 1}]",
    )
    assert (_lookup(story, "A").found, _lookup(story, "B").found) == (0, 32)
    assert _lookup(story, "B").hit == 32


def test_a_key_moves_to_the_copy_of_a_state_before_the_next_lookup_of_the_step():
    """E goes on from its state after 36 tokens, which is copied first, and F finds the copy in the same step."""
    state = "{kind: mamba, block: 8, mode: align, checkpoint_blocks: 1, checkpoint_alignment: 1}"
    case = scenario(
        "{blocks: 40, max_model_len: 64, prefix_match_unit: 2}",
        f"[{state}, {state}]",
        "[{add: {id: E, prompt: [[s, 36]], max_tokens: 13}}, {step: 1},"
        " {add: {id: F, prompt: [[s, 36], [f, 17]], max_tokens: 2}}, {step: 1}]",
    )
    rules = RELEASES["0.29.0"]
    history = predict(case, rules)
    assert history is not None
    lookup = _lookup(Story(case, history, rules, contract_for(case, rules)), "F")
    assert (lookup.hit, lookup.found) == (32, 36)
    cut = "(the lookup alone gives 36, cut back to whole blocks as external tokens follow)"
    assert lookup.words == f"32 of 53 tokens are hit {cut}; no group has more"


def test_a_hit_that_would_be_computed_anew_is_not_taken():
    groups = "[{kind: sliding_window_mla, block: 4, window: 17, bounded_replay: true}, {kind: full, block: 8}]"
    lookup = _lookup(_after("prompt: [[a, 17]]", "prompt: [[a, 22]]", groups), "B")
    assert (lookup.hit, lookup.found) == (0, 16)
    assert "but the 17 tokens before the end of a hit are computed anew: there would be none left" in lookup.words


def test_a_reset_is_a_fate():
    story = _plain(
        "{blocks: 100, max_model_len: 512}",
        "[{kind: full, block: 16}]",
        "[{add: {id: A, prompt: [[a, 40]], max_tokens: 1}}, {run: 9}, {reset_prefix_cache: {}},"
        " {add: {id: B, prompt: [[a, 40]]}}, {step: 1}]",
    )
    assert _part(story, "B").fate.kind == "reset"
    assert "forgotten by the reset after step 1" in _part(story, "B").words


WINDOWED = "[{kind: full, block: 16}, {kind: sliding_window, block: 16, window: 32}]"


def test_the_group_that_limits_the_joint_hit_is_named():
    """A keeps its window only where its prompt ends; B shares less, so its window is gone where it would resume."""
    story = _after("prompt: [[a, 200]]", "prompt: [[a, 100], [b, 50]]", WINDOWED)
    lookup = _lookup(story, "B")
    assert (lookup.hit, lookup.found) == (0, 0)
    assert [(part.alone, part.limits) for part in lookup.groups] == [(96, False), (0, True)]
    assert lookup.words == "0 of 150 tokens are hit; group 1 limits it"
    assert lookup.groups[1].fate.kind == "not_kept"
    assert "only blocks where a prompt may be resumed are kept (retention_interval 0)" in lookup.groups[1].words


def test_the_same_prompt_is_hit_up_to_the_window_that_was_kept():
    lookup = _lookup(_after("prompt: [[a, 200]]", "prompt: [[a, 200]]", WINDOWED), "B")
    assert (lookup.hit, lookup.words) == (192, "192 of 200 tokens are hit")


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("0.32.0", "no request before has these tokens (A shares the first 64); EAGLE drops the last block of the hit"),
        ("0.33.0", "no request before has these tokens (A shares the first 64); with lookahead a key covers 65 tokens"),
    ],
)
def test_eagle_ends_a_hit_a_block_early(release: str, words: str):
    eagle = ", speculative: {method: eagle, tokens: 1, accept: [1]}"
    case = _after("prompt: [[a, 64]]", "prompt: [[a, 64], [b, 20]]", engine=eagle).scenario
    story = Story(case, Simulator(case, RELEASES[release]).history(), RELEASES[release], None)
    assert (_lookup(story, "B").hit, _part(story, "B").alone) == (48, 48)
    assert _part(story, "B").words.endswith(words)


@pytest.mark.parametrize(
    ("engine", "consumer", "words"),
    [
        (", prefix_caching: false", "prompt: [[a, 40]]", "nothing is looked up: prefix caching is off"),
        ("", "prompt: [[a, 40]], skip_cache: true", "nothing is looked up: it does not read the prefix cache"),
    ],
)
def test_where_nothing_is_looked_up(engine: str, consumer: str, words: str):
    assert _lookup(_after("prompt: [[a, 40]]", consumer, engine=engine), "B").words == words


def test_every_lookup_of_the_corpus_agrees_with_the_hit_that_was_granted():
    from diff_tests.corpus import CORPUS, find_cases

    num_lookups = 0
    for case in find_cases([CORPUS]):
        for release in ("0.29.0", "0.33.0"):
            rules = RELEASES[release]
            history = predict(case.scenario, rules)
            if history is None or not isinstance(history[0], Start):
                continue
            story = Story(case.scenario, history, rules, contract_for(case.scenario, rules))
            for step in story.steps.values():
                for lookup in step.lookups:
                    num_lookups += 1
                    cut = lookup.hit < (lookup.found or 0) and case.scenario.connector is not None
                    assert lookup.found in (None, lookup.hit) or cut, (case.name, release, lookup)
    assert num_lookups > 150

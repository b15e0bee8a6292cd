"""Known issues: the list is well formed, and an entry explains its own findings only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oracle.findings import Finding
from oracle.known_issues import KnownIssue, explains, load, match, parse
from oracle.laws import LAWS
from oracle.tests.histories import scenario
from sim.releases import RELEASES, rules_of
from sim.scenario import load as load_scenario

ROOT = Path(__file__).parents[2]
CASE = scenario(
    "{blocks: 20, max_model_len: 64}",
    "[{kind: full, block: 4, kernel_block: 2, dtype: fp8_e4m3}, {kind: full, block: 4, dtype: bfloat16}]",
    "[{add: {id: A, prompt: [[a, 9]]}}]",
    "{name: DecodeBenchConnector, extra: {fill_std: 0.5}}",
)
ENTRY = """
[[issue]]
id = "one"
title = "a title"
reason = "a reason"
releases = ["0.30.0"]
law = 6
cause = "wrong_value"
scenario = "a.yaml"
script = "a.py"
"""


def finding(law: int | None = 6, cause: str = "wrong_value", group: int | None = 0) -> Finding:
    kind = CASE.groups[group].kind if group is not None else None
    return Finding(kind="fill", law=law, cause=cause, message="", group=group, group_kind=kind)


def entry(more: str = "") -> KnownIssue:
    (issue,) = parse(ENTRY + more)
    return issue


def explained(issue: KnownIssue, found: Finding, release: str = "0.30.0") -> bool:
    return explains(issue, found, CASE, rules_of(release))


@pytest.mark.parametrize("issue", load(), ids=lambda issue: issue.id)
def test_every_entry_points_at_what_is_there(issue: KnownIssue) -> None:
    assert (ROOT / issue.script).is_file()
    assert load_scenario(ROOT / issue.scenario).steps
    assert set(issue.releases) <= RELEASES.keys()
    assert issue.law in {law.number for law in LAWS}
    assert "vllm" in (ROOT / issue.script).read_text()
    assert not {"sim", "oracle", "diff_tests"} & {
        line.split()[1].split(".")[0]
        for line in (ROOT / issue.script).read_text().splitlines()
        if line.startswith(("import ", "from "))
    }


def test_the_bugs_that_are_to_be_found_are_not_known_issues() -> None:
    for cause in ("starts_early", "null_selected", "wrong_block_size"):
        for issue in load():
            assert not explains(issue, finding(4, cause), CASE, rules_of("0.29.0"))
    assert match(finding(6, "wrong_layers", 1), CASE, rules_of("0.29.0")) is None
    assert match(finding(6, "wrong_value", 1), CASE, rules_of("0.29.0")) is None


def test_release_law_and_cause_must_fit() -> None:
    assert explained(entry(), finding())
    assert not explained(entry(), finding(), "0.31.0")
    assert not explained(entry(), finding(law=4))
    assert not explained(entry(), finding(law=None))
    assert not explained(entry(), finding(cause="wrong_rows"))


@pytest.mark.parametrize(
    ("condition", "group", "fits"),
    [
        ('groups = ["full"]', 0, True),
        ('groups = ["circular"]', 0, False),
        ('groups = ["full"]', None, False),
        ("where = { kernel_block_smaller = true }", 0, True),
        ("where = { kernel_block_smaller = true }", 1, False),
        ('where = { group = { dtype = ["fp8_e4m3", "float16"] } }', 0, True),
        ('where = { group = { dtype = ["fp8_e4m3", "float16"] } }', 1, False),
        ('where = { group = { dtype = "bfloat16", kernel_block = false } }', 1, True),
        ("where = { group = { window = true } }", 0, False),
        ('where = { group = { dtype = "fp8_e4m3" } }', None, False),
        ('where = { any_group = { dtype = "fp8_e4m3" } }', None, True),
        ('where = { any_group = { mode = "align" } }', None, False),
        ('where = { engine = { policy = "fcfs", speculative = false } }', None, True),
        ('where = { engine = { policy = "priority" } }', None, False),
        ("where = { engine = { speculative = true } }", None, False),
        ('where = { speculative = { method = "eagle" } }', None, False),
        ('where = { connector = "DecodeBenchConnector" }', None, True),
        ("where = { connector = true }", None, True),
        ("where = { connector = false }", None, False),
        ("where = { chunk_over_block_end = true }", 0, False),
        ('where = { connector_option = "fill_std" }', 1, True),
        ('where = { connector_option = "startup_fill" }', 1, False),
        ("where = { fill_out_of_range = true }", None, True),
        ('where = { group = { dtype = "fp8_e4m3" }, kernel_block_smaller = false }', 0, False),
    ],
)
def test_conditions(condition: str, group: int | None, fits: bool) -> None:
    assert explained(entry(condition), finding(group=group)) == fits


@pytest.mark.parametrize(
    ("group", "extra", "out_of_range"),
    [
        ("{kind: full, block: 4, dtype: float16}", "{fill_mean: 70000.0}", True),
        ("{kind: full, block: 4, dtype: float16}", "{fill_mean: 60000.0}", False),
        ("{kind: full, block: 4}", "{fill_std: 0.5}", False),
        ("{kind: full, block: 4, dtype: fp8_e5m2}", "{fill_mean: -2.0}", True),
        ("{kind: full, block: 4, dtype: fp8_e5m2}", "{fill_mean: 2.0}", False),
        ("{kind: mamba, block: 64}", "{fill_mean: 200.0}", True),
        ("{kind: mamba, block: 64}", "{fill_mean: -100.0}", False),
    ],
)
def test_fills_that_memory_cannot_take(group: str, extra: str, out_of_range: bool) -> None:
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        f"[{group}]",
        "[{add: {id: A, prompt: [[a, 9]]}}]",
        f"{{name: DecodeBenchConnector, extra: {extra}}}",
    )
    issue = entry("where = { fill_out_of_range = true }")
    assert explains(issue, finding(group=None), case, rules_of("0.30.0")) == out_of_range


RAISED = {
    "type": "ValueError",
    "message": "Cannot get 3 free blocks from the pool",
    "trail": ["Scheduler.schedule", "MambaManager.allocate_new_blocks", "BlockPool.get_new_blocks"],
    "line": "raise ValueError(",
}


@pytest.mark.parametrize(
    ("raises", "fits"),
    [
        ('{ type = "ValueError" }', True),
        ('{ type = ["KeyError", "ValueError"] }', True),
        ('{ type = "KeyError" }', False),
        ('{ type = "ValueError", through = "MambaManager.allocate_new_blocks" }', True),
        ('{ type = "ValueError", through = "Manager.allocate_new_blocks" }', False),
        ('{ type = "ValueError", line = "raise" }', True),
        ('{ type = "ValueError", line = "assert" }', False),
        ('{ type = "ValueError", message = "free blocks" }', True),
        ('{ type = "ValueError", message = "3 blocks" }', False),
    ],
)
def test_exceptions(raises: str, fits: bool) -> None:
    issue = entry(f"raises = {raises}")
    found = msgspec.structs.replace(finding(), observed=RAISED)
    assert explained(issue, found) == fits
    assert not explained(issue, finding())  # not about an exception at all


def test_one_of_several_causes() -> None:
    (issue,) = parse(ENTRY.replace('"wrong_value"', '["wrong_value", "wrong_rows"]'))
    assert explained(issue, finding(cause="wrong_rows"))
    assert not explained(issue, finding(cause="wrong_layers"))


@pytest.mark.parametrize(("position", "fits"), [(0, True), (3, True), (4, False), (5, True)])
def test_blocks_whose_last_chunk_goes_on(position: int, fits: bool) -> None:
    """Chunks of 5 tokens over blocks of 4 end where a block does at token 20."""
    case = scenario("{blocks: 20, max_model_len: 64}", "[{kind: chunked_local, block: 4, chunk: 5}]", "[{step: 1}]", "null")
    found = msgspec.structs.replace(finding(group=None), group=0, positions=[position])
    assert explains(entry("where = { chunk_over_block_end = true }"), found, case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize(
    ("budget", "method", "padding_over", "block_over"),
    [
        (4, "draft_model", True, True),
        (5, "draft_model", False, False),
        (4, "ngram", False, False),
        (3, "ngram", True, False),
    ],
)
def test_budgets_with_a_row_for_the_draft_model(budget: int, method: str, padding_over: bool, block_over: bool) -> None:
    """Three drafts, and a block of states of 4 tokens."""
    case = scenario(
        f"{{blocks: 20, max_model_len: 64, max_num_batched_tokens: {budget}, max_num_seqs: 2, "
        f"speculative: {{method: {method}, tokens: 3}}}}",
        "[{kind: mamba, block: 4, mode: align, speculative_blocks: 3}]",
        "[{step: 1}]",
        "null",
    )
    for name, fits in (("padding_over_budget", padding_over), ("state_block_over_rows", block_over)):
        assert explains(entry(f"where = {{ {name} = true }}"), finding(group=None), case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize(("drafts", "fits"), [(3, False), (4, True), (5, True)])
def test_drafts_that_fill_a_block(drafts: int, fits: bool) -> None:
    case = scenario(
        f"{{blocks: 40, max_model_len: 64, speculative: {{tokens: {drafts}}}}}",
        f"[{{kind: mamba, block: 4, mode: align, speculative_blocks: {drafts}}}]",
        "[{step: 1}]",
        "null",
    )
    issue, found = entry("where = { drafts_fill_a_block = true }"), msgspec.structs.replace(finding(group=None), group=0)
    assert explains(issue, found, case, rules_of("0.30.0")) == fits
    assert not explains(issue, finding(group=None), case, rules_of("0.30.0"))  # no group that the drafts could fill


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_what_becomes_of_failed_loads(policy: str) -> None:
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        "[{kind: full, block: 4}]",
        "[{step: 1}]",
        f"{{name: scripted, load_failure: {policy}}}",
    )
    issue = entry('where = { load_failure = "recompute" }')
    assert explains(issue, finding(group=None), case, rules_of("0.30.0")) == (policy == "recompute")


@pytest.mark.parametrize(
    ("engine", "groups", "promised", "num_states", "num_copies"),
    [
        ("async_scheduling: true", "{kind: mamba, block: 1, mode: align}", 3, 1, 0),
        ("async_scheduling: false", "{kind: mamba, block: 1, mode: align}", 3, 0, 0),
        ("async_scheduling: true", "{kind: full, block: 4}", 9, 0, 0),
        ("prefix_match_unit: 2", "{kind: mamba, block: 4, mode: align}, {kind: full, block: 4}", 11, 0, 2),
        ("prefix_match_unit: 4", "{kind: mamba, block: 4, mode: align}, {kind: full, block: 4}", 11, 0, 0),
        (
            "async_scheduling: true, prefix_match_unit: 2",
            "{kind: mamba, block: 4, mode: align}, {kind: full, block: 4}, {kind: circular, block: 4}",
            12,
            3,
            2,
        ),
    ],
)
def test_pools_of_what_start_up_promises(engine: str, groups: str, promised: int, num_states: int, num_copies: int) -> None:
    for name, num_more in (("states_over_promise", num_states), ("copies_over_promise", num_copies)):
        for blocks in range(promised, promised + 6):
            case = scenario(f"{{blocks: {blocks}, max_model_len: 32, {engine}}}", f"[{groups}]", "[{step: 1}]", "null")
            fits = explains(entry(f"where = {{ {name} = true }}"), finding(group=None), case, rules_of("0.30.0"))
            assert fits == (blocks < promised + num_more)


@pytest.mark.parametrize(("release", "num_drafts", "num_states"), [("0.29.0", 0, 2), ("0.29.0", 2, 2), ("0.30.0", 2, 1)])
def test_pools_without_blocks_for_states_in_flight(release: str, num_drafts: int, num_states: int) -> None:
    group = f"{{kind: mamba, block: 2, mode: align, speculative_blocks: {num_drafts}}}"
    condition = msgspec.structs.replace(entry("where = { states_over_promise = true }"), releases=[release])
    for num_more in range(4):
        engine = f"{{blocks: {3 + num_drafts + num_more}, max_model_len: 32, async_scheduling: true}}"
        case = scenario(engine, f"[{group}]", "[{step: 1}]", "null")
        assert explains(condition, finding(group=None), case, rules_of(release)) == (num_more < num_states)


@pytest.mark.parametrize(
    ("release", "num_checkpoints", "num_nulls"), [("0.30.0", 1, 8), ("0.31.0", 1, 3), ("0.32.0", 1, 0), ("0.30.0", 0, 0)]
)
def test_pools_without_blocks_for_nulls_beside_a_checkpoint(release: str, num_checkpoints: int, num_nulls: int) -> None:
    group = f"mode: align, speculative_blocks: 3, checkpoint_blocks: {num_checkpoints}, checkpoint_alignment: 2"
    issue = msgspec.structs.replace(entry("where = { nulls_over_promise = true }"), releases=[release])
    for num_more in range(10):
        blocks = 6 + num_checkpoints + num_more  # one is null; two states, three for drafts
        engine = f"{{blocks: {blocks}, max_model_len: 32, max_num_batched_tokens: 16, speculative: {{tokens: 3}}}}"
        case = scenario(engine, f"[{{kind: mamba, block: 2, {group}}}]", "[{step: 1}]", "null")
        assert explains(issue, finding(group=None), case, rules_of(release)) == (num_more < num_nulls)


@pytest.mark.parametrize(
    ("release", "drafts", "groups", "promised", "num_more"),
    [
        ("0.32.0", "null", "{kind: full, block: 4}", 9, 0),
        ("0.32.0", "{tokens: 2}", "{kind: full, block: 4}", 9, 2),  # 5 tokens at most
        ("0.32.0", "{tokens: 2}", "{kind: full, block: 8}, {kind: circular, block: 4}", 6, 3),
        ("0.31.0", "{tokens: 2}", "{kind: full, block: 8}, {kind: circular, block: 4}", 6, 1),
        ("0.32.0", "{tokens: 2}", "{kind: full, block: 8}, {kind: mamba, block: 8, speculative_blocks: 2}", 8, 1),
        ("0.31.0", "{tokens: 2}", "{kind: mamba, block: 1, speculative_blocks: 2}", 4, 5),
    ],
)
def test_pools_without_blocks_for_drafts(release: str, drafts: str, groups: str, promised: int, num_more: int) -> None:
    issue = msgspec.structs.replace(entry("where = { drafts_over_promise = true }"), releases=[release])
    for blocks in range(promised, promised + 6):
        case = scenario(
            f"{{blocks: {blocks}, max_model_len: 32, speculative: {drafts}, prefix_caching: false}}",
            f"[{groups}]",
            "[{step: 1}]",
            "{name: scripted}",
        )
        fits = explains(issue, finding(group=None), case, rules_of(release))
        assert fits == (blocks < promised + num_more)


@pytest.mark.parametrize(
    ("drafts", "groups", "promised", "num_more"),
    [
        ("null", "{kind: sliding_window, block: 4, window: 4}", 7, 0),
        ("{method: ngram, tokens: 5}", "{kind: sliding_window, block: 4, window: 4}", 7, 0),  # writes nothing itself
        ("{method: eagle, tokens: 5}", "{kind: sliding_window, block: 4, window: 4}", 7, 2),
        ("{method: eagle, tokens: 4}", "{kind: sliding_window, block: 4, window: 4}, {kind: full, block: 32}", 9, 1),
        ("{method: eagle, tokens: 4}", "{kind: full, block: 4}", 17, 0),
    ],
)
def test_pools_without_slots_behind_a_window(drafts: str, groups: str, promised: int, num_more: int) -> None:
    issue = entry("where = { lookahead_over_promise = true }")
    for blocks in range(promised, promised + 4):
        engine = f"{{blocks: {blocks}, max_model_len: 64, max_num_batched_tokens: 16, speculative: {drafts}}}"
        fits = explains(
            issue, finding(group=None), scenario(engine, f"[{groups}]", "[{step: 1}]", "null"), rules_of("0.30.0")
        )
        assert fits == (blocks < promised + num_more)


@pytest.mark.parametrize(
    ("engine", "fits"), [("", False), (", async_scheduling: true", True), (", speculative: {tokens: 1}", True)]
)
def test_states_that_are_kept_when_they_are_passed(engine: str, fits: bool) -> None:
    case = scenario(f"{{blocks: 20, max_model_len: 64{engine}}}", "[{kind: full, block: 4}]", "[{step: 1}]", "null")
    issue = entry("where = { keeps_passed_states = true }")
    assert explains(issue, finding(group=None), case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize(("other", "fits"), [("{kind: mla, block: 4}", False), ("{kind: mla, block: 8}", True)])
def test_blocks_of_several_sizes(other: str, fits: bool) -> None:
    groups = f"[{{kind: full, block: 4}}, {other}]"
    case = scenario("{blocks: 40, max_model_len: 64}", groups, "[{step: 1}]", "null")
    assert explains(entry("where = { blocks_differ = true }"), finding(group=None), case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize(
    ("group", "load", "num_tokens", "fits"),
    [
        ("{kind: sliding_window, block: 4, window: 4}", "async", 24, False),  # 6 blocks, and a request holds up to 6
        ("{kind: sliding_window, block: 4, window: 4}", "async", 25, True),
        ("{kind: sliding_window, block: 4, window: 4}", "sync", 25, False),
        ("{kind: chunked_local, block: 4, chunk: 4}", "async", 20, False),
        ("{kind: chunked_local, block: 4, chunk: 4}", "async", 21, True),
        ("{kind: full, block: 4}", "async", 60, False),
    ],
)
def test_late_loads_with_more_entries_than_blocks(group: str, load: str, num_tokens: int, fits: bool) -> None:
    add = f"{{add: {{id: A, prompt: [[a, {num_tokens - 1}]], max_tokens: 1, external: 8, load: {load}}}}}"
    engine = "{blocks: 20, max_model_len: 64, max_num_batched_tokens: 16}"
    case = scenario(engine, f"[{group}]", f"[{add}]", "{name: scripted}")
    assert explains(entry("where = { load_over_cap = true }"), finding(group=None), case, rules_of("0.30.0")) == fits


REPLAYED = "{kind: sliding_window_mla, block: 4, window: 4, bounded_replay: true}"


@pytest.mark.parametrize(
    ("groups", "load", "num_tokens", "fits"),
    [
        ("{kind: mla, block: 4}", "async", 1, True),
        ("{kind: mla, block: 4}", "sync", 1, False),
        ("{kind: mla, block: 4}", "async", 2, False),
        (f"{{kind: mla, block: 4}}, {REPLAYED}", "async", 2, True),
        (f"{{kind: mla, block: 4}}, {REPLAYED}", "sync", 2, False),
    ],
)
def test_late_loads_that_leave_nothing_computed(groups: str, load: str, num_tokens: int, fits: bool) -> None:
    add = f"{{add: {{id: A, prompt: [[a, {num_tokens}]], max_tokens: 1, external: 2, load: {load}}}}}"
    case = scenario("{blocks: 40, max_model_len: 64}", f"[{groups}]", f"[{add}]", "{name: scripted}")
    assert explains(entry("where = { load_leaves_nothing = true }"), finding(group=None), case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize("load", ["sync", "async"])
def test_loads_that_arrive_later(load: str) -> None:
    add = f"{{add: {{id: A, prompt: [[a, 9]], max_tokens: 1, external: 8, load: {load}}}}}"
    case = scenario("{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]", f"[{add}]", "{name: scripted}")
    fits = explains(entry("where = { loads_later = true }"), finding(group=None), case, rules_of("0.30.0"))
    assert fits == (load == "async")


@pytest.mark.parametrize(
    ("load", "steps", "fits"),
    [("async", "", False), ("sync", ", {load_failed: {id: A}}", False), ("async", ", {load_failed: {id: A}}", True)],
)
def test_whether_a_late_load_fails(load: str, steps: str, fits: bool) -> None:
    add = f"{{add: {{id: A, prompt: [[a, 9]], external: 8, load: {load}}}}}"
    case = scenario("{blocks: 20, max_model_len: 64}", "[{kind: full, block: 4}]", f"[{add}{steps}]", "{name: scripted}")
    issue = entry('where = { load_failed = "async" }')
    assert explains(issue, finding(group=None), case, rules_of("0.30.0")) == fits


@pytest.mark.parametrize(("step", "fits"), [(0, True), (1, False)])
def test_what_shows_before_the_first_step(step: int, fits: bool) -> None:
    assert explained(entry("where = { at_start = true }"), msgspec.structs.replace(finding(), step=step)) == fits


def crash(type_: str, line: str, message: str = "", through: str = "Scheduler.schedule") -> Finding:
    raised = {"type": type_, "message": message, "trail": [through], "line": line}
    cause = f"{type_}_in_{through.rpartition('.')[2]}"
    return Finding(kind="crash", law=7, cause=cause, message="", observed=raised)


@pytest.mark.parametrize("issue", [issue for issue in load() if issue.law == 7], ids=lambda issue: issue.id)
def test_another_exception_in_the_same_place_is_new(issue: KnownIssue) -> None:
    """On the very scenario of an entry, neither another assertion of that function nor one elsewhere is explained."""
    case = load_scenario(ROOT / issue.scenario)
    assert issue.raises is not None
    for cause in [issue.cause] if isinstance(issue.cause, str) else issue.cause:
        type_, _, function = cause.partition("_in_")
        for found in (
            crash(type_, "assert self.is_fine", through=f"Anything.{function}"),
            crash(type_, "assert self.is_fine", through="Scheduler.update_from_output"),
        ):
            assert match(found, case, rules_of(issue.releases[-1])) is None


@pytest.mark.parametrize("manager", ["MambaManager", "SingleTypeKVCacheManager"])
@pytest.mark.parametrize(
    ("group", "connector", "fits"),
    [
        ("{kind: mamba, block: 1, mode: align}", "{name: scripted}", True),
        ("{kind: mamba, block: 1, mode: align}", "null", False),
        ("{kind: mamba, block: 1}", "{name: scripted}", False),
    ],
)
def test_whoever_misses_the_block_that_was_not_counted(manager: str, group: str, connector: str, fits: bool) -> None:
    """The Mamba group, or a group behind it: one issue."""
    trail = ["KVCacheCoordinator.allocate_new_blocks", f"{manager}.allocate_new_blocks", "BlockPool.get_new_blocks"]
    found = msgspec.structs.replace(finding(7, "out_of_blocks", None), observed={**RAISED, "trail": trail})
    case = scenario(
        "{blocks: 20, max_model_len: 64}",
        f"[{group}, {{kind: sliding_window, block: 1, window: 1}}]",
        "[{step: 1}]",
        connector,
    )
    assert (match(found, case, rules_of("0.32.0")) is not None) == fits


def test_a_list_that_is_not_well_formed() -> None:
    with pytest.raises(ValueError, match="unknown condition"):
        entry('where = { colour = "red" }')
    with pytest.raises(ValueError, match="same id"):
        parse(ENTRY + ENTRY)
    with pytest.raises(ValueError, match="unknown field"):
        entry("colour = 1")

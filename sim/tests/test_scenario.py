"""A scenario is checked once, where it enters: round trips, and errors that name the place."""

from __future__ import annotations

import json

import pytest

from sim.scenario import Add, ScenarioError, Span, Tokens, dump, encode, load, loads, parse

TEXT = """
kvoracle: 1
about: two groups
engine: {blocks: 60, max_model_len: 256}
connector: {name: DecodeBenchConnector, extra: {fill_mean: 0.5}}
groups:
  - {kind: full, block: 16, layers: 2}
  - {kind: sliding_window, block: 16, window: 32}
steps:
  - add: {id: A, prompt: [[sys, 20], [a, 4, 6]], max_tokens: 8}
  - step: 3
  - abort: A
  - reset_prefix_cache: {}
  - run: 100
"""


def test_round_trips_through_yaml_and_json():
    scenario = loads(TEXT)
    assert loads(dump(scenario)) == scenario
    assert parse(json.loads(encode(scenario))) == scenario


def test_reads_what_the_text_says():
    scenario = loads(TEXT)
    add = scenario.steps[0]
    assert isinstance(add, Add)
    assert add.prompt == (Span("sys", 0, 20), Span("a", 4, 6))
    assert add.num_prompt_tokens == 26
    assert scenario.groups[1].kind == "sliding_window"


def test_writes_defaults_out_of_sight_and_steps_on_one_line():
    text = dump(loads(TEXT))
    assert "prefix_caching" not in text
    assert "- {step: 3}" in text
    assert "- {add: {id: A, prompt: [[sys, 20], [a, 4, 6]], max_tokens: 8}}" in text


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("window: 32", "window: 32, zz: 1", "$.groups[1].zz"),
        (", window: 32", "", "$.groups[1].window"),
        ("window: 32", "window: 0", "$.groups[1].window"),
        ("kind: full, block: 16, layers: 2", "kind: full, layers: 2", "$.groups[0].block"),
        ("kind: full,", "kind: fool,", "$.groups[0].kind"),
        ("kind: full,", "kind: full, window: 3,", "$.groups[0].window"),
        ("kind: full,", "kind: full, kernel_block: 5,", "$.groups[0].kernel_block"),
        ("blocks: 60", "blocks: 1", "$.engine.blocks"),
        ("blocks: 60", "blocks: 6.5", "$.engine.blocks"),
        ("blocks: 60", "blocks: 60, blocs: 7", "$.engine.blocs"),
        ("step: 3", "step: x", "$.steps[1].step"),
        ("step: 3", "stop: 3", "$.steps[1].stop"),
        ("abort: A", "abort: B", "$.steps[2]"),
        ("[sys, 20]", "[sys]", "$.steps[0].add.prompt[0]"),
        ("[sys, 20]", "[sys, 0]", "$.steps[0].add.prompt[0][1]"),
        ("[sys, 20]", "[sys, 300]", "$.steps[0].add.prompt"),
        ("[[sys, 20], [a, 4, 6]]", "[]", "$.steps[0].add.prompt"),
        ("kvoracle: 1", "kvoracle: 2", "$.kvoracle"),
        ("engine: {blocks: 60, max_model_len: 256}", "", "$.engine"),
        ("about: two groups", "about: two groups\nabot: x", "$.abot"),
        ("about: two groups", "about: a\nabout: b", "$"),
        ("[[sys, 20], [a, 4, 6]]", "[[sys, 20]", "$"),
        ("kind: full, block: 16, layers: 2", "kind: mamba, block: 16, uniform: [{heads: 2}]", "$.groups[0].uniform"),
        ("layers: 2", "uniform: [{window: 2}]", "$.groups[0].uniform[0].window"),
        ("step: 3", "schedule: 2", "$.steps[1].schedule"),
        ("step: 3", "load_failed: {id: A}", "$.steps[1].load_failed"),
        ("step: 3", "direct: {id: D, num_tokens: 4, local: 0, tables: [[1], [2]]}", "$.steps[1]"),
    ],
)
def test_an_error_names_the_path(old, new, path):
    assert old in TEXT
    with pytest.raises(ScenarioError) as caught:
        loads(TEXT.replace(old, new))
    assert caught.value.path == path
    assert str(caught.value).startswith(path + ": ")


CROSS = (
    TEXT.replace("connector: {name: DecodeBenchConnector, extra: {fill_mean: 0.5}}", "connector: null")
    .replace("kind: sliding_window, block: 16, window: 32", "kind: cross, block: 16")
    .replace(
        "max_model_len: 256",
        "max_model_len: 256, prefix_caching: false, chunked_prefill: false, max_num_batched_tokens: 256",
    )
    .replace("max_tokens: 8", "max_tokens: 8, encoder: 256")
)


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("encoder: 256", "encoder: 257", "$.steps[0].add.encoder"),
        ("kind: cross", "kind: full", "$.steps[0].add.encoder"),
        ("kind: full, block: 16, layers: 2", "kind: cross, block: 16", "$.groups"),
        ("prefix_caching: false", "prefix_caching: true", "$.engine.prefix_caching"),
        ("chunked_prefill: false", "chunked_prefill: true", "$.engine.chunked_prefill"),
        ("chunked_prefill: false", "chunked_prefill: false, dcp: 2", "$.engine.dcp"),
        ("connector: null", "connector: {name: scripted}", "$.connector"),
    ],
)
def test_an_encoder_is_told_of_what_vllm_turns_off_for_it(old, new, path):
    assert loads(CROSS)
    assert old in CROSS
    with pytest.raises(ScenarioError) as caught:
        loads(CROSS.replace(old, new))
    assert caught.value.path == path


def test_a_direct_table_must_fit_pool_and_groups():
    direct = TEXT.replace("about: two groups", "driver: direct").split("steps:")[0] + "steps:\n  - direct: "
    with pytest.raises(ScenarioError, match=r"tables\[0\]\[1\]: block 60 is outside"):
        loads(direct + "{id: D, num_tokens: 20, local: 3, tables: [[1, 60], [2]]}")
    with pytest.raises(ScenarioError, match="2 expected"):
        loads(direct + "{id: D, num_tokens: 20, local: 3, tables: [[1, 59]]}")


def test_a_binary_file_is_not_a_scenario(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match="not a text file"):
        load(path)


def test_tokens_are_distinct_and_shared_by_stream():
    tokens = Tokens(loads(TEXT))
    sys_tokens = [tokens.base("sys") + i for i in range(1000)]
    a_tokens = [tokens.base("a") + i for i in range(1000)]
    outputs = [tokens.output("A", i) for i in range(1000)]
    assert len({*sys_tokens, *a_tokens, *outputs}) == 3000
    assert tokens.prompt(loads(TEXT).steps[0]) == sys_tokens[:20] + a_tokens[4:10]
    assert tokens.name(a_tokens[7]) == "a[7]"
    assert tokens.name(outputs[0]) == "A.out[0]"

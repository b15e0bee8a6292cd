"""The request matrix in real engines, and what is made of it without one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diff_tests import cli
from diff_tests.e2e.client import our_name
from diff_tests.e2e.matrix import act_of, matrix, steps_of
from diff_tests.e2e.models import MODELS, VOCABULARY_SIZE, chosen_models
from diff_tests.e2e.painted import PAINTED_FOLDER, PaintedStep
from diff_tests.e2e.report import document, runs_of, verdict
from diff_tests.e2e.runs import ENGINE_TIMEOUT_S, ModelRun, Row, judge_run, probed_connector, run_model, scenario_of
from diff_tests.live.rebuild import rebuild
from diff_tests.live.trace import read_trace
from diff_tests.tests.test_trace import TRACES
from diff_tests.vllm_target.api_server import arguments
from diff_tests.vllm_target.engine.tokens import VocabularyTokens
from diff_tests.vllm_target.releases import TargetInputError, is_cached
from diff_tests.vllm_target.target import Target
from sim.history import Scheduled, Updated
from sim.scenario import Add, ScenarioError, check


def engine_run(name: str, vllm: str = "current", http: bool = False, **settings: Any) -> ModelRun:
    """The matrix in an engine of its own, with further engine arguments. Skips where the release is not here."""
    if vllm == "current" and importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    if vllm != "current" and not is_cached(vllm):
        pytest.skip(f"vLLM {vllm} is not in the cache; fetch it with `kvoracle vllm add {vllm}`")
    model = replace(MODELS[name], settings={**MODELS[name].settings, **settings})
    with Target(vllm, timeout_s=ENGINE_TIMEOUT_S, for_engines=True) as target:
        return run_model(target, model, probed_connector(None), http)


def table(run: ModelRun) -> list[tuple]:
    """The three requests over one prefix: external tokens, positions, selected blocks."""
    rows = [row for row in run.rows if row.act == "table" and row.group == 0]
    return [(row.request, row.tokens, row.positions, row.selected) for row in rows]


def acts(run: ModelRun) -> set[tuple]:
    """What the worker did to KV memory in a step, in order, wherever it did more than compute."""
    assert run.checked is not None, run.error
    return {tuple(r.acts) for r in run.checked.rebuilt.history if isinstance(r, Scheduled) and r.acts}


class TestInAnEngine:
    def test_the_whole_matrix_is_as_the_laws_want(self):
        run = engine_run("qwen3")
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        assert table(run) == [
            ("A", (0, 1620), list(range(102)), list(range(1, 103))),
            ("B", (1616, 1620), [101], [103]),
            ("A-again", (1616, 1620), [101], [103]),
        ]
        assert {row.act for row in run.rows} == {act.name for act in matrix(16)}
        assert run.num_preemptions > 0
        assert all(row.selected == row.received == row.written for row in run.rows)
        assert run.checked.num_followed == run.checked.num_steps > 0
        assert acts(run) == {("fill", "forward")}

    def test_the_same_over_http(self):
        """When requests meet is the server's business; who shares what is not."""
        run = engine_run("qwen3", http=True)
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        assert [row[1:3] for row in table(run)] == [((0, 1620), list(range(102)))] + [((1616, 1620), [101])] * 2
        assert {row.act for row in run.rows} == {act.name for act in matrix(16)}
        assert all(row.selected == row.received == row.written for row in run.rows)
        assert run.checked.num_followed == run.checked.num_steps

    def test_new_blocks_are_zeroed_before_they_are_filled(self):
        run = engine_run("granite")
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        assert acts(run) == {("zero", "fill", "forward"), ("zero", "forward")}

    @pytest.mark.parametrize(
        ("name", "settings"), [("dcp", {}), ("qwen3", {"tensor_parallel_size": 2})], ids=["dcp 2", "tp 2"]
    )
    def test_each_of_two_ranks_is_recorded_and_judged(self, name, settings):
        run = engine_run(name, **settings)
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        rebuilt = run.checked.rebuilt
        selected = {r.step: r.selected for r in rebuilt.history if isinstance(r, Scheduled) and r.selected}
        assert len(selected) > 10
        assert {step: rebuilt.others[1][step] for step in selected} == selected
        assert run.ranks_judged == [0, 1]

    def test_an_engine_without_hybrid_caches_is_followed_too(self):
        """Its windows are kept like full attention, in one group."""
        run = engine_run("cohere2", disable_hybrid_kv_cache_manager=True)
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        assert run.layout == ["full 32"]
        assert run.checked.num_followed == run.checked.num_steps

    def test_drafts_are_followed(self):
        speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
        run = engine_run("qwen3", speculative_config=speculation)
        assert run.verdict == "same", (
            [judged.finding.message for judged in run.checked.findings] if run.checked else run.error
        )
        assert (run.checked.num_followed, run.checked.gap) == (run.checked.num_steps, None)
        new_tokens = [n for r in run.checked.rebuilt.history if isinstance(r, Updated) for n in r.new_tokens.values()]
        assert set(new_tokens) == {1, 2, 3, 4}

    def test_a_prefix_that_was_filled_over_is_named_with_its_owner(self):
        run = engine_run("qwen3", "0.29.0")
        assert run.verdict == "different"
        assert table(run)[1] == ("B", (1616, 1620), [101], [1])
        messages = [judged.finding.message for judged in run.checked.findings if judged.finding.request == "B"]
        assert any("block 1 selected, which holds tokens [0, 16) of request A, shared by A and B" in m for m in messages)
        assert all(row.selected == row.received == row.written for row in run.rows)

    def test_a_release_without_kernels_runs_models_that_compute_nothing(self):
        run = engine_run("rings", "0.33.0")
        assert run.verdict == "same", run.error
        assert run.checked.num_followed == run.checked.num_steps
        run = engine_run("qwen3", "0.33.0")
        assert run.error == "not run: there is no CPU build of this vLLM; on it run rings, kernel_blocks, dcp"


class TestOrder:
    def test_vllm_tells_when_it_copies_and_zeroes_and_once_each(self):
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("no vLLM is installed in this environment")
        code = """
import torch
from vllm.v1.worker import gpu_model_runner
from diff_tests.vllm_target.engine import acts
acts.watch(); acts.watch()
acts.LOG.note("forward")  # outside a step
memory = torch.arange(8).reshape(4, 2)
gpu_model_runner.copy_kv_cache_blocks_inplace([memory], 4, [(1, 3)])
acts.LOG.bind()
acts.LOG.note("forward")
print(acts.LOG.take(), acts.LOG.take(), memory[3].tolist())
"""
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.stdout.splitlines()[-1:] == ["['copy', 'forward'] [] [2, 3]"], done.stderr[-2000:]

    def test_a_rank_that_fills_after_its_forward_pass_is_named(self, tmp_path):
        """A recorded run, judged with what two workers say they did."""
        trace = tmp_path / "trace"
        shutil.copytree(TRACES, trace)
        (trace / "worker-1.000.jsonl").write_text(
            (trace / "worker.000.jsonl").read_text().replace('"rank":0', '"rank":1', 1)
        )
        step = next(r.step for r in rebuild(read_trace([trace])).history if isinstance(r, Scheduled) and r.received)
        (trace / PAINTED_FOLDER).mkdir()
        for rank, order in enumerate((["fill", "forward"], ["forward", "fill"])):
            line = msgspec.json.encode(PaintedStep(step, rank, order))
            (trace / PAINTED_FOLDER / f"worker-{rank}-1.jsonl").write_bytes(line + b"\n")
        run = ModelRun(MODELS["qwen3"], "in process")
        judge_run(run, [], trace, "")
        found = [judged.finding for judged in run.checked.findings if judged.finding.law == 11]
        assert [(finding.step, finding.cause) for finding in found] == [(step, "forward_before_fill")]
        assert "worker of rank 1" in found[0].message


class TestMatrix:
    @pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
    def test_every_model_gets_a_valid_scenario_and_distinct_tokens(self, model):
        scenario = scenario_of(matrix(model.tokens_per_entry), model)
        check(scenario)
        tokens = VocabularyTokens(scenario, VOCABULARY_SIZE)
        adds = [step for step in scenario.steps if isinstance(step, Add)]
        prompts = {add.id: tokens.prompt(add) for add in adds}
        assert [len(prompts[add.id]) for add in adds] == [add.num_prompt_tokens for add in adds]
        assert prompts["A"][:1616] == prompts["B"][:1616]
        assert not set(prompts["A"][1616:]) & set(prompts["B"])
        outputs = {tokens.output(add.id) for add in adds}
        assert len(outputs) == len(adds)
        assert not outputs & {token for prompt in prompts.values() for token in prompt}
        assert max(outputs) < VOCABULARY_SIZE

    def test_a_vocabulary_can_be_too_small(self):
        with pytest.raises(ScenarioError, match="in a vocabulary of 100"):
            VocabularyTokens(scenario_of(matrix(16), MODELS["qwen3"]), 100)

    def test_each_request_belongs_to_one_act(self):
        acts = matrix(16)
        assert len(act_of(acts)) == sum(isinstance(step, Add) for step in steps_of(acts))


class TestWords:
    def test_block_lists_are_short_and_keep_their_order(self):
        assert runs_of([1, 2, 3]) == "1..3"
        assert runs_of([53, 52, 1]) == "53, 52, 1"
        assert runs_of([]) == "-"
        assert runs_of([9, 7, 5, 3, 1]) == "9, 7, 5, 3, ... (5)"

    def test_settings_become_options(self):
        settings = {"max_model_len": 64, "enforce_eager": True, "async_scheduling": False, "kv_transfer_config": {"a": 1}}
        assert arguments(settings) == [
            "--max-model-len",
            "64",
            "--enforce-eager",
            "--no-async-scheduling",
            "--kv-transfer-config",
            '{"a": 1}',
        ]

    def test_ids_of_the_server_are_ours_again(self):
        assert our_name("cmpl-together-0-0") == "together-0"
        assert our_name("together-0") == "together-0"

    def test_a_model_without_a_judged_run_is_no_pass(self):
        run = ModelRun(MODELS["qwen3"], "in process", error="the engine did not start: no memory")
        assert run.verdict == "error"
        assert verdict([run]) == verdict([]) == "fail"

    def test_rows_are_in_the_document(self, target):
        run = ModelRun(MODELS["qwen3"], "in process")
        run.rows = [Row("seed", "S", 1, 0, "full", (0, 20), [0, 1], [1, 2], [1, 2], None, "ok")]
        rows = document([run], target.info, "DecodeBenchConnector")["models"][0]["requests"]
        assert rows[0]["tokens"] == (0, 20)
        assert rows[0]["written"] is None


class TestInput:
    def test_models_by_name(self):
        assert [model.name for model in chosen_models(("granite", "qwen3"))] == ["qwen3", "granite"]
        assert len(chosen_models(("all",))) == len(MODELS)

    def test_an_unknown_model_is_bad_input(self, capsys):
        assert cli.run_cli(["e2e", "--model", "gpt-5"]) == cli.BAD_INPUT
        assert "no such model; known: qwen3" in capsys.readouterr().err

    def test_connectors_as_the_probe_takes_them(self, tmp_path):
        assert probed_connector(None) == "DecodeBenchConnector"
        assert probed_connector("mine.module:Class") == "Probe_mine.module.Class"
        other = tmp_path / "other.py"
        other.write_text("class Other: pass\n")
        with pytest.raises(TargetInputError, match="must define DecodeBenchConnector"):
            probed_connector(str(other))

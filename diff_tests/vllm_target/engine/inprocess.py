"""An engine in this process: its steps are ours to take, so a scenario means here what it means everywhere."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from diff_tests.vllm_target import wire
from diff_tests.vllm_target.api_server import ENGINE_ENVIRONMENT
from diff_tests.vllm_target.engine import plugin
from diff_tests.vllm_target.engine.tokens import VocabularyTokens
from sim.scenario import Add, AnyStep, Run, Scenario, Step


def run_engine(scenario: Scenario, message: wire.RunEngine) -> wire.EngineEnd:
    """Starts the engine and takes all steps. What vLLM raises ends it and is told."""
    os.environ.update(ENGINE_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    _compute_plainly()
    sys.path.append(message.plugins)  # for workers in processes of their own, which are given our module path
    plugin.register()
    end = wire.EngineEnd(message.case, 0.0, phase="start")
    started = time.monotonic()
    try:
        engine = _Engine(message.settings)
        end.start_seconds, end.phase = time.monotonic() - started, "run"
        started = time.process_time()
        engine.run(scenario)
        end.run_cpu_seconds = time.process_time() - started
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        end.error = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
    return end


def _compute_plainly() -> None:
    """No compiler: a tiny model is computed sooner than it is compiled."""
    import torch._dynamo

    torch._dynamo.config.disable = True


class _Engine:
    """A started engine. settings: vLLM's engine arguments by name. Raises whatever vLLM raises."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**settings))
        self._vocabulary_size: int = self._engine.model_config.get_vocab_size()

    def run(self, scenario: Scenario) -> None:
        """Takes the scenario's steps. Raises whatever vLLM raises."""
        tokens = VocabularyTokens(scenario, self._vocabulary_size)
        for step in scenario.steps:
            self._take(step, tokens)

    def _take(self, step: AnyStep, tokens: VocabularyTokens) -> None:
        if isinstance(step, Add):
            sampling = SamplingParams(
                max_tokens=step.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                allowed_token_ids=[tokens.output(step.id)],
            )
            self._engine.add_request(step.id, {"prompt_token_ids": tokens.prompt(step)}, sampling)
        elif isinstance(step, (Step, Run)):
            self._steps(step.count if isinstance(step, Step) else step.limit)
        else:
            raise NotImplementedError(f"no {type(step).__name__} steps in an engine")

    def _steps(self, limit: int) -> None:
        for _ in range(limit):
            if not self._engine.has_unfinished_requests():
                return
            self._engine.step()

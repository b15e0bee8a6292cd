"""What the probe costs a server while it verifies nothing: the same engine with and without it, in turn."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

from diff_tests.e2e.models import MODELS
from diff_tests.e2e.runs import ENGINE_TIMEOUT_S, engine_settings, write_model
from diff_tests.live.record import probed
from diff_tests.vllm_target.api_server import plugin_folder
from diff_tests.vllm_target.releases import TargetStartError
from diff_tests.vllm_target.target import Target
from sim.scenario import Add, AnyStep, Engine, Full, Run, Scenario, Span

NUM_ROUNDS = 9
NUM_REQUESTS = 200
_NUM_PREFIXES, _PREFIX_TOKENS = 5, 160
_PROBE = "diff_tests.vllm_target.kvprobe"
_CONNECTOR = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}


class ProbeCost(NamedTuple):
    """Processor seconds of a run's steps, without the probe and with it, round by round."""

    without: list[float]
    with_probe: list[float]


def measure_probe_cost(vllm: str, num_rounds: int = NUM_ROUNDS, num_requests: int = NUM_REQUESTS) -> ProbeCost:
    """Requests over shared prefixes, 16 at a time, in the engine of the smallest model: a larger one computes longer in a
    step in which the probe does the same. Raises TargetStartError."""
    cost = ProbeCost([], [])
    with Target(vllm, timeout_s=ENGINE_TIMEOUT_S, for_engines=True) as target:
        for _ in range(num_rounds):
            cost.without.append(_seconds(target, False, num_requests))
            cost.with_probe.append(_seconds(target, True, num_requests))
    return cost


def _seconds(target: Target, is_probed: bool, num_requests: int) -> float:
    with tempfile.TemporaryDirectory(prefix="kvoracle-probe-") as name:
        folder = Path(name)
        write_model(MODELS["qwen3"], folder)
        settings = engine_settings(MODELS["qwen3"], folder, "DecodeBenchConnector")
        settings["kv_transfer_config"] = _CONNECTOR
        if is_probed:
            transfer = probed(_CONNECTOR, {"dir": str(folder / "trace")})
            settings["kv_transfer_config"] = {**transfer, "kv_connector_module_path": _PROBE}
        try:
            end = target.run_engine(settings, _scenario(num_requests), plugin_folder(folder))
        finally:
            target.close()  # an engine uses its process up
        if end.error:
            raise TargetStartError(f"the engine died: {end.error}")
        assert any((folder / "trace").iterdir()) == is_probed
        return end.run_cpu_seconds


def _scenario(num_requests: int) -> Scenario:
    steps: list[AnyStep] = [
        Add(
            id=f"R{i}",
            prompt=(Span(f"p{i % _NUM_PREFIXES}", 0, _PREFIX_TOKENS), Span(f"own{i}", 0, 5 + i % 25)),
            max_tokens=4 + i % 20,
        )
        for i in range(num_requests)
    ]
    engine = Engine(blocks=200, max_model_len=2048)
    return Scenario(engine=engine, groups=(Full(block=16),), steps=(*steps, Run(limit=100_000)))

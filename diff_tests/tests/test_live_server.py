"""A server under load with the probe in place, killed in the middle: what it left is judged, and fails at the desk too."""

from __future__ import annotations

import importlib.util
import io
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diff_tests.cli import run_cli
from diff_tests.e2e.models import MODELS
from diff_tests.e2e.runs import engine_settings
from diff_tests.live.check import check_trace
from diff_tests.live.record import probed
from diff_tests.live.trace import read_trace
from diff_tests.live.watch import watch
from diff_tests.vllm_target.api_server import ApiServer
from diff_tests.vllm_target.releases import is_cached, resolve
from sim.history import Scheduled
from sim.scenario import Add, load

NUM_REQUESTS, NUM_AT_A_TIME, NUM_BEFORE_THE_KILL = 200, 16, 120
NUM_PREFIXES, PREFIX_TOKENS = 5, 160
_TIMEOUT_S = 300.0


def request(number: int) -> dict[str, Any]:
    """A prompt of token IDs that shares its first 160 tokens with each fifth one."""
    prefix = number % NUM_PREFIXES
    prompt = [1000 * (1 + prefix) + i for i in range(PREFIX_TOKENS)] + [
        10_000 + 40 * number + i for i in range(5 + number % 25)
    ]
    return {"prompt": prompt, "max_tokens": 4 + number % 20, "ignore_eos": True, "temperature": 0}


@dataclass
class Recorded:
    """What a killed server left: its trace, how many requests it had answered, and what `check --follow` had shown before
    the kill."""

    folder: Path
    num_answered: int
    shown_before: str


def recorded(vllm: str, folder: Path, wait_for: Callable[[str], bool]) -> Recorded:
    """200 requests over HTTP, 16 at a time, until so many are answered and what is shown is as it is waited for; then
    SIGKILL."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(dict(MODELS["qwen3"].config)))
    trace = folder / "trace"
    trace.mkdir()
    settings = engine_settings(MODELS["qwen3"], folder, "DecodeBenchConnector")
    bare = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    transfer = probed(bare, {"dir": str(trace), "verify": "sample"})
    settings["kv_transfer_config"] = {**transfer, "kv_connector_module_path": "diff_tests.vllm_target.kvprobe"}
    shown = io.StringIO()
    with ApiServer(resolve(vllm), settings, folder) as server, ThreadPoolExecutor(NUM_AT_A_TIME + 1) as pool:
        watching = pool.submit(watch, [trace], True, 10.0, Console(file=shown, width=500))
        answers = [pool.submit(_ask, server, number) for number in range(NUM_REQUESTS)]
        _wait(lambda: sum(map(Future.done, answers)) >= NUM_BEFORE_THE_KILL)
        _wait(lambda: wait_for(shown.getvalue()))
        shown_before = shown.getvalue()
        server.kill()
        num_answered = sum(answer.result() for answer in answers)
        _, checked, _ = watching.result()
        assert checked.num_followed == checked.num_steps, "nothing is left unread at the end"
    return Recorded(trace, num_answered, shown_before)


def _ask(server: ApiServer, number: int) -> bool:
    try:
        server.complete(request(number), _TIMEOUT_S)
    except (OSError, HTTPException):
        return False
    return True


def _wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, "nothing came in time"
        time.sleep(0.05)


def test_everything_up_to_the_kill_is_judged(tmp_path: Path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    run = recorded("current", tmp_path, lambda _: True)
    assert run.num_answered < NUM_REQUESTS, "the kill came too late"
    checked = check_trace(read_trace([run.folder]))
    assert (checked.verdict, checked.gap) == ("same", None), [judged.finding.message for judged in checked.findings]
    assert checked.num_followed == checked.num_steps > NUM_BEFORE_THE_KILL // NUM_AT_A_TIME
    assert len(checked.rebuilt.ids) >= NUM_BEFORE_THE_KILL
    together = [len(record.scheduled) for record in checked.rebuilt.history if isinstance(record, Scheduled)]
    assert max(together) == NUM_AT_A_TIME


def test_a_mismatch_under_load_is_shown_at_once_and_fails_the_same_law_at_the_desk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    if not is_cached("0.29.0"):
        pytest.skip("vLLM 0.29.0 is not in the cache; fetch it with `kvoracle vllm add 0.29.0`")
    run = recorded("0.29.0", tmp_path, lambda shown: "starts_early" in shown)
    assert "selection, law 4, starts_early" in run.shown_before
    case, small = tmp_path / "case.yaml", tmp_path / "small.yaml"
    assert run_cli(["check", str(run.folder), "--json", "--scenario", str(case)]) == 1
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert (first["law"], first["cause"]) == (4, "starts_early")
    for command in (["run", str(case)], ["reduce", str(case), "-o", str(small)]):
        assert run_cli([*command, "--vllm", "0.29.0", "--json"]) == 1
        document = json.loads(capsys.readouterr().out)
        found = document.get("findings") or [document["finding"]]
        assert (found[0]["law"], found[0]["cause"]) == (4, "starts_early"), command
    assert sum(isinstance(step, Add) for step in load(small).steps) <= 3

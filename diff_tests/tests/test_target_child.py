"""The child process: it may die, hang or be replaced, and nothing found so far is lost."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.releases import Source
from diff_tests.vllm_target.target import Target, TargetInputError, _environment
from sim.history import Acted, Failure, Scheduled, Start
from sim.scenario import Scenario

# A connector that behaves, hangs or kills its process in the second step, as its settings say.
ODD_CONNECTOR = """
import os, signal, time
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector

class OddConnector(DecodeBenchConnector):
    def build_connector_meta(self, scheduler_output):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 2:
            mood = self._kv_transfer_config.get_from_extra_config("mood", "fine")
            if mood == "hang":
                time.sleep(600)
            if mood == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().build_connector_meta(scheduler_output)
"""


def moody(mood: str) -> Scenario:
    connector = {"name": "OddConnector", "extra": {"mood": mood}}
    return scenario([add("A", ("a", 40)), {"run": 10}], connector=connector)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A target with a connector of one's own."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "odd_connector.py").write_text(ODD_CONNECTOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with Target(connector="odd_connector:OddConnector", timeout_s=5.0) as target:
            yield target


def test_child_that_dies_again_and_one_that_hangs(odd: Target) -> None:
    """Both are the last records of their cases; the cases around them are as ever."""
    moods = ["fine", "die", "fine", "hang", "fine"]
    histories = [history for _, history in odd.run_many(map(moody, moods))]
    fine, dies, _, hangs, _ = histories
    assert isinstance(fine[-1], Acted)
    assert histories[2] == histories[4] == fine
    # What was seen before: the first step in whole, and that the second had begun.
    assert dies[:-1] == hangs[:-1] == fine[:3]
    assert dies[-1] == Failure(step=1, type="ChildDied", phase="child", message="killed by signal 9")
    assert isinstance(hangs[-1], Failure)
    assert (hangs[-1].type, hangs[-1].phase) == ("Hang", "child")
    assert odd.lost == 0


def test_child_killed_from_outside_costs_nothing_but_time(odd: Target) -> None:
    odd.lost = 0
    histories = []
    for _, history in odd.run_many([moody("fine")] * 30):
        histories.append(history)
        if len(histories) == 3:
            os.kill(odd._child._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert odd.lost == 1
    assert len(histories) == 30
    assert all(history == histories[0] for history in histories)


def test_caller_that_loses_interest(odd: Target) -> None:
    """The histories of cases handed over ahead are not taken for those of the next ones."""
    for _, history in odd.run_many([moody("fine")] * 8):
        expected = history
        break
    other = scenario([add("B", ("b", 40)), {"step": 1}], connector=None)
    assert isinstance(odd.run(other)[1], Scheduled)
    assert odd.run(other)[1] != expected[1]


def test_own_connector_is_what_runs(odd: Target) -> None:
    """The scenario's name gives way; where a scenario has no connector, it stays without."""
    with_one = scenario([add("A", ("a", 40)), {"step": 1}])
    start, first = odd.run(with_one)[:2]
    assert isinstance(start, Start)
    assert start.connector == "odd_connector:OddConnector"
    assert isinstance(first, Scheduled)
    assert first.external == {"A": 39}
    assert odd.effective(with_one) == moody_like(with_one)
    without = scenario([add("A", ("a", 40)), {"step": 1}], connector=None)
    assert odd.effective(without) == without


def moody_like(case: Scenario) -> Scenario:
    assert case.connector is not None
    return replace(case, connector=replace(case.connector, name="OddConnector"))


def test_child_ends_when_its_pipe_closes() -> None:
    """Whatever it is in the middle of: here it imports vLLM."""
    requests_read, requests_write = os.pipe()
    answers_read, answers_write = os.pipe()
    command = [sys.executable, "-P", "-m", "diff_tests.vllm_target.child"]
    command += ["--requests", str(requests_read), "--answers", str(answers_write)]
    child = subprocess.Popen(
        command,
        env=_environment(Source("current", "current", None)),
        pass_fds=(requests_read, answers_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(requests_read)
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)  # is for the parent
    os.close(requests_write)
    assert child.wait(timeout=30) == 0
    os.close(answers_read)
    os.close(answers_write)


# ------------------------------------------------------------------------------------------------------- connector files


def installed_connector() -> str:
    """The source of the installed DecodeBenchConnector."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    home = Path(spec.submodule_search_locations[0], "distributed", "kv_transfer", "kv_connector", "v1")
    return (home / "decode_bench_connector.py").read_text()


def test_file_takes_the_place_of_the_installed_connector(tmp_path: Path) -> None:
    """A connector that announces one token too few; the fill is still judged by DecodeBench's contract."""
    source = installed_connector()
    changed = source.replace("num_uncomputed_tokens - 1)", "num_uncomputed_tokens - 2)")
    assert changed != source
    file = tmp_path / "candidate.py"
    file.write_text(changed)
    case = scenario([add("A", ("a", 40)), {"step": 1}])
    with Target(connector=str(file)) as target:
        first = target.run(case)[1]
        assert target.effective(case) == case
    assert isinstance(first, Scheduled)
    assert first.external == {"A": 38}
    assert first.written is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import os\nimport no_such_module\nclass DecodeBenchConnector: pass\n", r"line 2: ModuleNotFoundError"),
        ("class Nothing: pass\n", "must define one connector"),
    ],
)
def test_file_that_is_no_connector(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "candidate.py"
    file.write_text(text)
    with pytest.raises(TargetInputError, match=message):
        Target(connector=str(file)).start()


def test_unregistered_connector() -> None:
    with pytest.raises(TargetInputError, match="DecodeBenchConnector"):
        Target(connector="NoSuchConnector").start()

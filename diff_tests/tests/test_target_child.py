"""The child process: it may die, hang or be replaced, and nothing found so far is lost."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.target import Target, TargetInputError
from sim.history import Acted, Failure, Scheduled, Start
from sim.scenario import Scenario

# Put after the installed connector's source: it behaves, hangs or kills its process in the second step, as its settings
# say.
MOODS = """
import os, signal, time

class Moody(DecodeBenchConnector):
    def build_connector_meta(self, scheduler_output):
        self.num_steps = getattr(self, "num_steps", 0) + 1
        if self.num_steps == 2:
            mood = self._kv_transfer_config.get_from_extra_config("mood", "fine")
            if mood == "hang":
                time.sleep(600)
            if mood == "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().build_connector_meta(scheduler_output)

DecodeBenchConnector = Moody
"""


def installed_connector() -> str:
    """The source of the installed DecodeBenchConnector."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    home = Path(spec.submodule_search_locations[0], "distributed", "kv_transfer", "kv_connector", "v1")
    return (home / "decode_bench_connector.py").read_text()


def moody(mood: str) -> Scenario:
    """A request that runs to its end if the connector is in the mood."""
    connector = {"name": "DecodeBenchConnector", "extra": {"mood": mood}}
    return scenario([add("A", ("a", 40)), {"run": 10}], connector=connector)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Iterator[Target]:
    """A target whose connector has moods. Its host is the one that the session has anyway."""
    file = tmp_path_factory.mktemp("odd") / "moody.py"
    file.write_text(installed_connector() + MOODS)
    with Target(connector=str(file), timeout_s=5.0) as odd:
        yield odd


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
            os.kill(odd._child.pid, signal.SIGKILL)  # type: ignore[union-attr]
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


def test_class_by_name_is_what_runs(target: Target) -> None:
    """The scenario's name gives way to it; where a scenario has no connector, it stays without."""
    name = "vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector:DecodeBenchConnector"
    other = scenario([add("A", ("a", 40)), {"step": 1}], connector={"name": "ExampleConnector"})
    without = scenario([add("A", ("a", 40)), {"step": 1}], connector=None)
    with Target(connector=name) as own:
        start, first = own.run(other)[:2]
        assert own.effective(other) == scenario([add("A", ("a", 40)), {"step": 1}])
        assert own.effective(without) == without
    assert isinstance(start, Start)
    assert start.connector == name
    assert isinstance(first, Scheduled)
    assert first.external == {"A": 39}
    assert [entry.state for entry in first.written or []] == ["filled"]


def test_nothing_outlives_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Neither the host, nor a child in the middle of a case that never ends."""
    script = """
import sys
from diff_tests.tests.test_target_child import moody
from diff_tests.vllm_target.target import Target
target = Target(connector=sys.argv[1])
target.start()
print(target._child.pid, target._child._host._process.pid, flush=True)
target.run(moody("hang"))
"""
    file = tmp_path / "moody.py"
    file.write_text(installed_connector() + MOODS)
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(file)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # Ctrl-C is for the parent
    time.sleep(1.0)
    assert all(_is_running(pid) for pid in pids)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(_is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process outlives its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------- connector files


def test_file_takes_the_place_of_the_installed_connector(tmp_path: Path, target: Target) -> None:
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
def test_file_that_is_no_connector(tmp_path: Path, target: Target, text: str, message: str) -> None:
    file = tmp_path / "candidate.py"
    file.write_text(text)
    with pytest.raises(TargetInputError, match=message):
        Target(connector=str(file)).start()


def test_unregistered_connector(target: Target) -> None:
    with pytest.raises(TargetInputError, match="DecodeBenchConnector"):
        Target(connector="NoSuchConnector").start()


def test_children_are_forked_and_ended_from_many_threads(target: Target) -> None:
    """Jobs of a campaign start, lose and end their children each from a thread of its own."""

    def lives(_: int) -> int | None:
        with target.sibling() as other:
            return other.pid

    with ThreadPoolExecutor(8) as pool:
        pids = list(pool.map(lives, range(40)))
    assert len(set(pids)) == 40

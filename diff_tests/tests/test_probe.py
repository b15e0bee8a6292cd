"""The probe beside the real scheduler: it changes nothing, tells what happened, and keeps what is private to itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diff_tests.generate import SeededChooser, case_seed, generate
from diff_tests.live.check import check_trace
from diff_tests.live.record import RecordError, prepare, probe_text, probed
from diff_tests.live.trace import AddRecord, StartRecord, read_trace
from diff_tests.tests.target_cases import add, scenario
from diff_tests.vllm_target.target import Target
from oracle.compare import compare
from sim.follow import Observed
from sim.history import Failure, History, Refusal, Scheduled, Updated, resolve
from sim.scenario import Add, Scenario, plain
from sim.simulator import Simulator

PROBE = "diff_tests.vllm_target.kvprobe"
FULL = {"kind": "full", "block": 16}
WINDOW = {"kind": "sliding_window", "block": 16, "window": 32}


def probed_scenario(case: Scenario, folder: Path, **options: Any) -> Scenario:
    """The same with the probe in place."""
    assert case.connector is not None
    extra = {**case.connector.extra, "kvprobe": {"dir": str(folder), **options}}
    return replace(case, connector=replace(case.connector, name=f"{PROBE}:{case.connector.name}", extra=extra))


def busy(groups: list[Any], connector: Any = None, **engine: Any) -> Scenario:
    """Shared prefixes, an abort, and a pool that is too small for all."""
    steps = [
        add("A", ("s", 96), ("a", 5), max_tokens=60),
        {"step": 2},
        add("B", ("s", 96), ("b", 5), max_tokens=6),
        add("C", ("s", 60), ("c", 80), max_tokens=60),
        add("D", ("d", 90), max_tokens=30),
        {"step": 4},
        {"abort": "D"},
        add("E", ("s", 96), ("A.out", 8), ("e", 7), max_tokens=30),
        {"run": 300},
    ]
    connector = connector or {"name": "DecodeBenchConnector"}
    return scenario(steps, groups, connector, **{"blocks": 16 * len(groups), "max_model_len": 512, **engine})


# ------------------------------------------------------------------------------------------------------- nothing changes

OFFLOADING = {"block_size": 16, "cpu_bytes_to_use": 100_000_000}
CONNECTORS: dict[str, tuple[dict[str, Any], bool, int]] = {
    # Settings; whether the worker side runs without a device or a service; groups that it takes.
    "DecodeBenchConnector": ({}, True, 2),
    "ExampleConnector": ({"shared_storage_path": "unused"}, False, 1),
    "OffloadingConnector": (OFFLOADING, False, 2),
    "SimpleCPUOffloadConnector": ({"cpu_bytes_to_use": 100_000_000}, False, 2),
    "NixlConnector": ({}, False, 2),
    "MooncakeConnector": ({}, False, 2),
}
CHILDREN = [
    {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"},
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": OFFLOADING},
]


def histories(cases: list[tuple[Scenario, bool]], folder: Path) -> list[list[dict[str, Any]]]:
    """What each scenario's run looks like, metadata in plain form; [reason] where the connector does not run here."""
    text = "".join(json.dumps([plain(case), with_worker]) + "\n" for case, with_worker in cases)
    command = [sys.executable, "-m", "diff_tests.vllm_target.probed_run"]
    (folder / "kvprobe.py").write_text(probe_text())
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(folder)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [[json.loads(line) for line in run.splitlines()] for run in done.stdout.split("\n\n")[:-1]]


def test_the_probe_of_a_class_is_that_class_with_hooks(target: Target):
    """Of every registered connector that imports here: name, support for hybrid caches and abstractness are its own."""
    code = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
from diff_tests.vllm_target import kvprobe
for name, get in sorted(KVConnectorFactory._registry.items()):
    try:
        base = get()
    except ImportError:
        continue
    probe = getattr(kvprobe, name)
    same = [supports_hma(kind) for kind in (probe, base)], probe.__abstractmethods__ == base.__abstractmethods__
    print("probe of", name, issubclass(probe, base), probe.__name__ == base.__name__, *same)
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=environment)
    lines = [line.split(maxsplit=3) for line in done.stdout.splitlines() if line.startswith("probe of ")]
    assert {name for _, _, name, _ in lines} > set(CONNECTORS), done.stderr[-2000:]
    assert {told for *_, told in lines} == {f"True True [{hma}, {hma}] True" for hma in (True, False)}


def _pairs(folder: Path) -> dict[str, list[tuple[Scenario, bool]]]:
    pairs = {}
    for name, (extra, with_worker, most_groups) in CONNECTORS.items():
        for groups in ([FULL], [FULL, WINDOW])[:most_groups]:
            case = busy(groups, {"name": name, "extra": extra})
            there = folder / f"{name}-{len(groups)}"
            pairs[f"{name}, {len(groups)} groups"] = [(case, with_worker), (probed_scenario(case, there), with_worker)]
    settings = {"dir": str(folder / "multi")}
    children = probed({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": CHILDREN}}, settings)
    pairs["children of MultiConnector"] = [
        (busy([FULL], {"name": "MultiConnector", "extra": extra}), False)
        for extra in ({"connectors": CHILDREN}, children["kv_connector_extra_config"])
    ]
    outer = busy([FULL], {"name": "MultiConnector", "extra": {"connectors": CHILDREN}})
    pairs["MultiConnector itself"] = [(outer, False), (probed_scenario(outer, folder / "outer"), False)]
    return pairs


def _timeless(record: dict[str, Any]) -> dict[str, Any]:
    """Without the connector's name and what is a clock's reading on both sides."""
    text = json.dumps(record).replace(f"{PROBE}:", "")
    plainly: dict[str, Any] = json.loads(text, object_hook=lambda d: {k: v for k, v in d.items() if k != "scheduler_clock"})
    return plainly


def test_a_run_is_the_same_with_and_without_the_probe(target: Target, tmp_path: Path):
    pairs = _pairs(tmp_path / "traces")
    runs = iter(histories([case for pair in pairs.values() for case in pair], tmp_path))
    for name in pairs:
        without, with_probe = next(runs), next(runs)
        assert "unavailable" not in without[0], (name, without)
        assert len(without) > 20, (name, without[-1])
        assert list(map(_timeless, with_probe)) == list(map(_timeless, without)), name
    for folder in (tmp_path / "traces").iterdir():
        checked = check_trace(read_trace([folder]))
        assert checked.verdict == "same", folder
        # Within a MultiConnector, the one that has a contract is judged by it; the others are named.
        names = [child.name for child in checked.rebuilt.children if child.contract is not None]
        assert names == ["DecodeBenchConnector"] * (folder.name == "multi")
        # That one stores from and loads into blocks that it takes from the pool itself.
        assert (checked.gap is not None) == folder.name.startswith("SimpleCPUOffload"), (folder, checked.gap)


# --------------------------------------------------------------------------------------------------- what happened is told


def _records(history: History) -> list[Any]:
    return [(r, state.tables) for r, state in resolve(history) if isinstance(r, (Scheduled, Updated))]


_DECIDED = ("step", "scheduled", "admitted", "resumed", "preempted", "hits", "external", "asked")
_TOLD: dict[Any, tuple[str, ...]] = {
    Scheduled: (*_DECIDED, "zeroed", "copies", "selected", "received"),
    Updated: ("step", "finished", "new_tokens"),
}


def _told(history: History) -> list[Any]:
    """All that a trace could tell of a history."""
    return [([getattr(r, field) for field in _TOLD[type(r)]], tables) for r, tables in _records(history)]


def _cases(target: Target, num_cases: int) -> list[Scenario]:
    """Generated scenarios in which no ID comes twice, so that names in trace and scenario are the same, and no prompt comes
    as embeddings, which `check` does not follow."""
    cases: list[Scenario] = []
    seeds = iter(range(10_000))
    while len(cases) < num_cases:
        case = generate(SeededChooser(case_seed(4, next(seeds))), target.info.rules)
        adds = [step for step in case.steps if isinstance(step, Add)]
        ids = [add.id for add in adds]
        is_probed = case.connector is not None and case.connector.name == "DecodeBenchConnector"
        # With frees deferred, a trace does not tell an attempt that failed without a victim from none: states may be let go
        # a step apart.
        is_told = not (case.engine.async_scheduling and any(group.kind == "mamba" for group in case.groups))
        is_told = is_told and len(ids) == len(set(ids)) and not any(add.embeds for add in adds)
        if case.driver == "scheduler" and is_probed and is_told:
            cases.append(case)
    return cases


def test_a_trace_tells_what_the_scheduler_did_and_the_model_follows_it(target: Target, tmp_path: Path):
    num_followed = 0
    for number, case in enumerate(_cases(target, 40)):
        folder = tmp_path / str(number)
        history = target.run(probed_scenario(case, folder))
        if isinstance(history[0], Refusal) or isinstance(history[-1], Failure):
            continue
        trace = read_trace([folder])
        checked = check_trace(trace)
        assert [j.finding.message for j in checked.findings if j.issue is None] == [], number
        assert checked.num_followed == checked.num_steps
        num_followed += checked.num_steps
        assert _told(checked.rebuilt.history) == _told(history), number
    assert num_followed > 300


def test_decisions_of_any_run_are_followed(target: Target):
    """Also without a connector: from the decisions alone the model finds tables, free queue, references and keys."""
    for seed in range(60):
        case = generate(SeededChooser(case_seed(5, seed)), target.info.rules)
        history = target.run(case) if case.driver == "scheduler" else []
        steps = [record for record in history if isinstance(record, Scheduled)]
        if steps and not isinstance(history[-1], Failure):
            predicted = Simulator(case, target.info.rules, observed=Observed(steps)).history()
            assert compare(predicted, history) is None, seed


def test_fills_are_read_back_and_judged(target: Target, tmp_path: Path):
    case = busy([FULL, {"kind": "circular", "block": 16}], {"name": "DecodeBenchConnector", "extra": {"fill_mean": 0.5}})
    for verify in ("sample", "all"):
        target.run(probed_scenario(case, tmp_path / verify, verify=verify))
        checked = check_trace(read_trace([tmp_path / verify]))
        assert checked.verdict == "same"
        written = [entry for r in checked.rebuilt.history for entry in getattr(r, "written", None) or ()]
        assert {(entry.group, entry.state, entry.value) for entry in written} == {
            (0, "filled", "003f"),
            (1, "filled", "0000"),
        }


def several(folder: Path, num_children: int, **options: Any) -> Scenario:
    """A MultiConnector over probed children."""
    child = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"fill_mean": 0.5}}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [child] * num_children}}
    extra = probed(config, {"dir": str(folder), **options})["kv_connector_extra_config"]
    for each in extra["connectors"]:
        each["kv_connector_module_path"] = PROBE
    return busy([FULL, {"kind": "circular", "block": 16}], {"name": "MultiConnector", "extra": extra})


def _edit(folder: Path, role: str, change: Callable[[list[dict[str, Any]]], None]) -> None:
    (path,) = folder.glob(f"{role}-*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_each_of_several_connectors_is_judged_by_its_own_contract(target: Target, tmp_path: Path):
    target.run(several(tmp_path / "trace", 2, verify="all"))
    checked = check_trace(read_trace([tmp_path / "trace"]))
    assert (checked.verdict, checked.num_followed, checked.notes) == ("same", checked.num_steps, [])

    def first(lines: list[dict[str, Any]], kind: str, key: str, c: int = 0) -> dict[str, Any]:
        return next(line for line in lines if line["t"] == kind and line.get(key) and line.get("c", 0) == c)

    def shift(lines: list[dict[str, Any]]) -> None:
        next(iter(first(lines, "step", "selected")["selected"].values()))["groups"][0][0] += 1

    def ask_for_more(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["t"] == "meta")["selected"] = {"1": {"groups": [[3], []], "tokens": 16}}

    def lose(lines: list[dict[str, Any]]) -> None:
        next(iter(first(lines, "received", "selected")["selected"].values()))["groups"][0].pop()

    def spoil(lines: list[dict[str, Any]]) -> None:
        first(lines, "load", "written")["written"][0]["values"][0][0] = "0000"

    for role, change, law, cause in (
        ("scheduler", shift, 4, "duplicate_block"),
        ("scheduler", ask_for_more, 4, "unasked_selection"),
        ("worker", lose, 5, "missing_block"),
        ("worker", spoil, 6, "wrong_value"),
    ):
        folder = shutil.copytree(tmp_path / "trace", tmp_path / change.__name__)
        _edit(folder, role, change)
        findings = [judged.finding for judged in check_trace(read_trace([folder])).findings]
        assert (law, cause) in [(finding.law, finding.cause) for finding in findings], change.__name__
        assert all("(DecodeBenchConnector)" in finding.message for finding in findings if finding.law == law)
        # Only where the second is told to load, it is missed that it did not.
        assert ((6, "never_loaded") in [(finding.law, finding.cause) for finding in findings]) == (change is ask_for_more)


# ------------------------------------------------------------------------------------------------- privacy, size, failures


def _trace_text(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*.jsonl")))


def private(**options: Any) -> Scenario:
    steps = [
        {"add": {"id": "alice-1", "prompt": [["s", 40]], "max_tokens": 4, "salt": "hush", "lora": "medical"}},
        {"add": {"id": "bob-1", "prompt": [["s", 40]], "max_tokens": 4, "salt": "hush", "lora": "medical"}},
        {"add": {"id": "carol-1", "prompt": [["s", 40]], "max_tokens": 4}},
        {"run": 20},
    ]
    return scenario(steps, [FULL], {"name": "DecodeBenchConnector", "extra": {"note": "10.0.0.7"}})


def test_a_trace_keeps_secrets_and_equality(target: Target, tmp_path: Path):
    target.run(probed_scenario(private(), tmp_path / "plain", rename=True))
    text = _trace_text(tmp_path / "plain")
    for secret in ("alice", "bob", "hush", "medical", "10.0.0.7", "token_ids"):
        assert secret not in text, secret
    trace = read_trace([tmp_path / "plain"])
    alice, bob, carol = (line.record for line in trace.scheduler.lines if isinstance(line.record, AddRecord))
    assert alice.prefix == bob.prefix != carol.prefix
    assert (alice.salt, alice.lora) == (bob.salt, bob.lora)
    assert check_trace(trace).verdict == "same"


def test_two_engines_have_nothing_in_common_without_a_salt(target: Target, tmp_path: Path):
    prefixes = {}
    for name, options in {"a": {}, "b": {}, "c": {"salt": "ours"}, "d": {"salt": "ours"}}.items():
        target.run(probed_scenario(private(), tmp_path / name, **options))
        lines = read_trace([tmp_path / name]).scheduler.lines
        prefixes[name] = next(line.record.prefix for line in lines if isinstance(line.record, AddRecord))
    assert prefixes["a"] != prefixes["b"]
    assert prefixes["c"] == prefixes["d"]


def test_tokens_are_recorded_only_when_asked_for(target: Target, tmp_path: Path):
    target.run(probed_scenario(private(), tmp_path, tokens=True))
    lines = read_trace([tmp_path]).scheduler.lines
    assert [len(line.record.token_ids or ()) for line in lines if isinstance(line.record, AddRecord)] == [40, 40, 40]


def test_a_trace_has_a_bounded_size_and_goes_on_being_judged(target: Target, tmp_path: Path):
    steps = [add(f"R{i}", ("s", 48), (f"p{i}", 20), max_tokens=20) for i in range(150)]
    case = scenario([*steps, {"run": 2000}], [FULL], blocks=100, max_num_seqs=4)
    target.run(probed_scenario(case, tmp_path, max_mb=0.1))
    parts = sorted(tmp_path.glob("scheduler-*.jsonl"))
    assert len(parts) == 8
    assert sum(path.stat().st_size for path in parts) < 8 * 20_000
    trace = read_trace([tmp_path])
    assert isinstance(trace.scheduler.lines[0].record, StartRecord)
    assert trace.start.part > 0
    checked = check_trace(trace)
    assert (checked.verdict, checked.num_followed) == ("same", 0)
    assert checked.num_steps > 10
    assert any("first parts" in note for note in checked.notes)


def test_a_probe_that_cannot_write_disturbs_nobody(target: Target, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    case = busy([FULL])
    with_probe = target.run(probed_scenario(case, tmp_path / "file"))
    assert _told(with_probe) == _told(target.run(case))


def test_a_probe_with_a_bad_option_disturbs_nobody(target: Target, tmp_path: Path):
    case = busy([FULL])
    assert _told(target.run(probed_scenario(case, tmp_path, verify="nonsense"))) == _told(target.run(case))
    assert not list(tmp_path.glob("*.jsonl"))


# --------------------------------------------------------------------------------------------------------- the command line


def test_the_probe_is_one_file_of_the_standard_library():
    code = compile(probe_text(), "kvprobe.py", "exec")
    namespace: dict[str, Any] = {"__name__": "kvprobe"}
    before = set(sys.modules)
    exec(code, namespace)
    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert loaded <= set(sys.stdlib_module_names)


def test_record_puts_the_probe_in_place(tmp_path: Path):
    config = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"fill_mean": 1.0}}
    recording = prepare(["my-model", "--kv-transfer-config", json.dumps(config)], tmp_path, {"verify": "all"})
    assert recording.command[:4] == ["vllm", "serve", "my-model", "--kv-transfer-config"]
    assert json.loads(recording.command[4]) == {
        **config,
        "kv_connector_module_path": "kvprobe",
        "kv_connector_extra_config": {"fill_mean": 1.0, "kvprobe": {"dir": str(tmp_path), "verify": "all"}},
    }
    assert (tmp_path / "kvprobe.py").read_text() == probe_text()
    assert recording.shell().startswith(f"PYTHONPATH={tmp_path}")


def test_record_wraps_classes_of_ones_own_and_children(tmp_path: Path):
    own = {"kv_connector": "Mine", "kv_connector_module_path": "my.module"}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [own]}}
    (child,) = probed(config, {"dir": "x"})["kv_connector_extra_config"]["connectors"]
    assert (child["kv_connector"], child["kv_connector_module_path"]) == ("Probe_my.module.Mine", "kvprobe")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "what to record"),
        (["my-model"], "has no --kv-transfer-config"),
        (["my-model", "--kv-transfer-config", "{"], "not valid JSON"),
        (["my-model", "--kv-transfer-config", "{}"], "names no kv_connector"),
        (["my-model", "--kv-transfer-config.kv_connector", "X"], "as one JSON value"),
    ],
)
def test_record_says_what_is_wrong(tmp_path: Path, arguments: list[str], reason: str):
    with pytest.raises(RecordError, match=reason):
        prepare(arguments, tmp_path, {})

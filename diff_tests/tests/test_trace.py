"""What `check` makes of a recorded trace: whole, cut off, changed by hand, from an unknown vLLM. Needs no vLLM.

The trace in `traces` is of vLLM 0.32.0: two groups, shared prefixes, a follow-up, an abort, a preemption, every fill read
back.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diff_tests.cli import run_cli
from diff_tests.live.check import Checked, check_document, check_trace
from diff_tests.live.export import export
from diff_tests.live.trace import TraceError, TraceFiles, read_trace
from sim.scenario import Add, dump, loads

TRACES = Path(__file__).parent / "traces"
SCHEDULER, WORKER = "scheduler.000.jsonl", "worker.000.jsonl"
Edit = Callable[[list[dict]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy to be tampered with."""
    return shutil.copytree(TRACES, tmp_path / "trace")


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit(path: Path, change: Edit) -> None:
    lines = records(path)
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def check(folder: Path) -> Checked:
    return check_trace(read_trace([folder]))


def sentences(checked: Checked) -> str:
    return "\n".join(judged.finding.message for judged in checked.findings)


def test_a_recorded_run_is_followed_to_its_end():
    checked = check(TRACES)
    assert (checked.verdict, checked.num_followed, checked.gap) == ("same", checked.num_steps, None)
    assert checked.num_steps > 50
    preempted = [r.preempted for r in checked.rebuilt.history if getattr(r, "preempted", None)]
    assert preempted, "the trace is to have preemptions"
    assert checked.notes == []


@pytest.mark.parametrize("num_bytes", [3000, 6000, 12000, 26000])
def test_a_trace_cut_off_anywhere_is_judged_as_far_as_it_goes(folder: Path, num_bytes: int):
    path = folder / SCHEDULER
    path.write_bytes(path.read_bytes()[:num_bytes])
    checked = check(folder)
    assert checked.verdict == "same"
    assert checked.num_followed == checked.num_steps
    assert any("torn" in note for note in checked.notes)


def test_a_trace_without_workers_says_what_was_not_judged(folder: Path):
    (folder / WORKER).unlink()
    checked = check(folder)
    assert checked.verdict == "same"
    assert any("no worker's files" in note for note in checked.notes)


def _first(lines: list[dict], kind: str, key: str) -> dict:
    return next(line for line in lines if line["t"] == kind and line.get(key))


def _change_table(lines: list[dict]) -> None:
    _first(lines, "step", "tables")["tables"][0][1][0][0][1][2] += 1


def _change_selection(lines: list[dict]) -> None:
    selected = _first(lines, "step", "selected")["selected"]
    next(iter(selected.values()))["groups"][0][0] += 1


def _change_received(lines: list[dict]) -> None:
    selected = _first(lines, "received", "selected")["selected"]
    next(iter(selected.values()))["groups"][1].pop()


def _change_value(lines: list[dict]) -> None:
    _first(lines, "load", "written")["written"][0]["values"][0][0] = "0000"


def _write_outside(lines: list[dict]) -> None:
    _first(lines, "load", "written")["written"][1]["outside"] = [29]


@pytest.mark.parametrize(
    ("name", "change", "kind", "law", "cause"),
    [
        (SCHEDULER, _change_table, "allocation", None, "block_table"),
        (SCHEDULER, _change_selection, "selection", 4, "duplicate_block"),
        (WORKER, _change_received, "routing", 5, "missing_block"),
        (WORKER, _change_value, "fill", 6, "wrong_value"),
        (WORKER, _write_outside, "fill", 6, "outside_selection"),
    ],
)
def test_one_changed_number_is_found_and_located(
    folder: Path, name: str, change: Edit, kind: str, law: int | None, cause: str
):
    edit(folder / name, change)
    checked = check(folder)
    found = [judged.finding for judged in checked.findings]
    assert (kind, law, cause) in [(f.kind, f.law, f.cause) for f in found], sentences(checked)
    first = next(f for f in found if (f.kind, f.law) == (kind, law))
    number = 1 + next(i for i, line in enumerate(records(folder / SCHEDULER)) if line["t"] == "step" and line.get("new"))
    assert checked.place(first) == f"{SCHEDULER}:{number}"


@pytest.mark.parametrize("name", [SCHEDULER, WORKER])
def test_any_missing_line_is_noticed(folder: Path, name: str):
    """Each line in turn is left out, but the last: a trace may end anywhere."""
    path = folder / name
    whole = records(path)
    for i, left_out in enumerate(whole[:-1]):
        path.write_text("".join(json.dumps(line) + "\n" for line in whole if line is not left_out))
        with pytest.raises(TraceError, match=rf"{name}, line {i + 1}: "):
            check(folder)


def test_a_line_that_is_no_record_is_an_error_that_names_it(folder: Path):
    path = folder / SCHEDULER
    lines = path.read_text().splitlines(keepends=True)
    lines[7] = '{"t":"step","k":"five"}\n'
    path.write_text("".join(lines))
    with pytest.raises(TraceError, match=rf"{SCHEDULER}, line 8: not a record of a trace: .*"):
        read_trace([folder])


def test_files_of_two_engines_are_told_apart(folder: Path):
    shutil.copy(folder / SCHEDULER, folder / "scheduler-other.000.jsonl")
    with pytest.raises(TraceError, match="several engines"):
        read_trace([folder])


def test_what_the_connector_raised_is_a_finding(folder: Path):
    path = folder / WORKER
    count = len(records(path))
    with path.open("a") as file:
        file.write(json.dumps({"i": count, "t": "raised", "hook": "start_load_kv", "type": "IndexError"}) + "\n")
    (judged,) = check(folder).findings
    assert (judged.finding.law, judged.finding.cause) == (7, "connector_exception")
    assert "IndexError in the connector's start_load_kv" in judged.finding.message


def test_a_probe_that_stopped_says_so(folder: Path):
    path = folder / SCHEDULER
    lines = path.read_text().splitlines(keepends=True)[:60]
    path.write_text("".join(lines) + json.dumps({"i": 60, "t": "stopped", "hook": "take_events", "type": "OSError"}) + "\n")
    checked = check(folder)
    assert checked.verdict == "same"
    assert any("the probe failed (OSError in take_events)" in note for note in checked.notes)


def test_an_unknown_vllm_is_judged_by_the_laws_alone(folder: Path):
    def from_the_future(lines: list[dict]) -> None:
        lines[0]["vllm"] = "0.99.1"

    edit(folder / SCHEDULER, from_the_future)
    checked = check(folder)
    assert (checked.verdict, checked.num_followed, checked.gap) == ("same", 0, "no rules for vLLM 0.99.1")
    edit(folder / SCHEDULER, _change_selection)
    assert {judged.finding.law for judged in check(folder).findings} == {4, 5}


@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        ({"method": "ngram"}, None),
        ({"method": "medusa"}, "speculation by medusa is not modelled"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": "[[1, 2]]"}, "drafts whose number depends on"),
        ({"method": "deepseek_mtp", "disable_eagle_block_drop": True}, "EAGLE that keeps the last block"),
    ],
)
def test_speculators_that_the_model_does_not_know_are_named(folder: Path, settings: dict, gap: str | None):
    """The trace has no drafts, which a speculator on n-grams of the prompt may well have none of."""
    edit(folder / SCHEDULER, lambda lines: lines[0]["engine"].update(num_speculative_tokens=2, **settings))
    checked = check(folder)
    assert checked.verdict == "same"
    assert gap in str(checked.gap) if gap else checked.num_followed == checked.num_steps


def test_a_second_rank_that_was_told_otherwise_is_named(folder: Path):
    other = folder / "worker-1.000.jsonl"
    shutil.copy(folder / WORKER, other)

    def second(lines: list[dict]) -> None:
        lines[0]["rank"] = 1
        _change_received(lines)

    edit(other, second)
    checked = check(folder)
    assert [judged.finding.law for judged in checked.findings] == [5]
    assert "worker of rank 1" in sentences(checked)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_after_the_forward_pass_that_needs_it_is_a_finding(folder: Path, rank: int):
    """A forward pass that began before the load; after it, nothing is wrong."""

    path = folder / ("worker-1.000.jsonl" if rank else WORKER)
    lines = records(TRACES / WORKER)
    lines[0]["rank"] = rank
    load = next(i for i, line in enumerate(lines) if line["t"] == "load")
    for before in (False, True):
        order = [*lines]
        order.insert(load if before else load + 1, {"t": "forward", "k": lines[load]["k"]})
        path.write_text("".join(json.dumps({**line, "i": i}) + "\n" for i, line in enumerate(order)))
        checked = check(folder)
        assert [(j.finding.law, j.finding.cause) for j in checked.findings] == [(11, "forward_before_fill")] * before
    assert ("worker of rank 1" in sentences(checked)) == bool(rank)


def test_a_growing_trace_is_read_on(tmp_path: Path):
    text = (TRACES / SCHEDULER).read_bytes()
    path = tmp_path / SCHEDULER
    files = TraceFiles([tmp_path])
    num_steps = []
    for size in (3000, 3001, 20000, len(text)):
        path.write_bytes(text[:size])
        files.poll()
        trace = files.trace()
        assert trace is not None
        num_steps.append(check_trace(trace).num_followed)
    assert num_steps == sorted(num_steps)
    assert num_steps[-1] == check(TRACES).num_followed
    assert files.poll() is False


def test_the_run_as_a_scenario_says_the_same_prompts(folder: Path):
    scenario = export(check(folder).rebuilt, None)
    assert loads(dump(scenario)) == scenario
    adds = {step.id: step for step in scenario.steps if isinstance(step, Add)}
    assert list(adds) == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert [tuple(span) for span in adds["r2"].prompt] == [("r1.in", 0, 96), ("r2.in", 0, 5)]
    # The last whole hash block of the shared part ends at 96; the follow-up shares no whole block of outputs.
    assert adds["r5"].prompt[0] == ("r1.in", 0, 96)


def test_the_scenario_around_a_finding_has_only_what_matters(folder: Path):
    edit(folder / SCHEDULER, _change_selection)
    checked = check(folder)
    scenario = export(checked.rebuilt, checked.findings[0].finding)
    assert [step.id for step in scenario.steps if isinstance(step, Add)] == ["r1"]


def test_command_and_document(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_cli(["check", str(folder), "--json", "--scenario", str(tmp_path / "case.yaml")]) == 0
    document = json.loads(capsys.readouterr().out)
    trace = read_trace([folder])
    assert document == json.loads(json.dumps(check_document(trace, check_trace(trace))))
    assert document["verdict"] == "same"
    assert document["target"] == {"vllm": "0.32.0", "connector": "DecodeBenchConnector"}
    assert run_cli(["simulate", str(tmp_path / "case.yaml")]) == 0
    edit(folder / SCHEDULER, _change_table)
    assert run_cli(["check", str(folder)]) == 1
    assert run_cli(["check", str(tmp_path)]) == 2


# ----------------------------------------------------------------------------------------------------- a stranger's trace


def _with(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return change


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "bytes": (lambda _: bytes(range(256)) * 50, "line 1: not a record of a trace"),
    "zeros": (lambda _: b"\0" * 9999, "no trace of a scheduler here"),
    "pickle": (lambda _: pickle.dumps({"t": "start"}) + b"\n", "line 1: not a record of a trace"),
    "compressed": (lambda data: gzip.compress(data), "line 1: not a record of a trace"),
    "other encoding": (lambda data: data.decode().encode("utf-16"), "line 1: not a record of a trace"),
    "nested": (_with(b'"selected":{', b'"selected":{"x":' + b"[" * 99_999 + b"]" * 99_999 + b","), "nested too deep"),
    "a line without end": (lambda data: b"{" + b" " * (1 << 21) + data, "line 1: longer than"),
    "a number without end": (_with(b'"num_blocks":30', b'"num_blocks":' + b"9" * 9999), "at `$.num_blocks`"),
    "a pool beyond all memory": (_with(b'"num_blocks":30', b'"num_blocks":999999999'), "<= 16777216 - at `$.num_blocks`"),
    "a prompt beyond all time": (_with(b'"prompt":101', b'"prompt":999999999'), "<= 16777216 - at `$.prompt`"),
    "a block of nothing": (_with(b'"block_size":16,"dcp', b'"block_size":0,"dcp'), "at `$.groups[0].spec.block_size`"),
    "no block": (_with(b'"block_size":16,"dcp', b'"dcp'), "line 1: a group of FullAttentionSpec without block_size"),
    "a setting of another type": (_with(b'"max_num_seqs":16', b'"max_num_seqs":"16"'), "at `$.engine.max_num_seqs`"),
    "a negative block": (_with(b"[[-1,[1,2", b"[[-1,[-1,2"), "Expected `int` >= 0"),
    "a terminal's commands": (_with(b'"vllm":"0.32.0"', b'"vllm":"\\u001b[2J"'), "at `$.vllm`"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_trace_is_one_clear_error(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("diff_tests.live.trace._LONGEST_LINE", 1 << 20)
    change, reason = HOSTILE[name]
    path = folder / SCHEDULER
    path.write_bytes(change(path.read_bytes()))
    for command in ("check", "explain"):
        assert run_cli([command, str(folder)]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1, said
        assert said[0].startswith(f"Error: {folder}")
        assert reason in said[0]


def test_what_is_no_file_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A pipe would be waited for, a device never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for path in (tmp_path, Path("/dev/zero")):
        assert run_cli(["check", str(path)]) == 2
        assert capsys.readouterr().err.endswith(": not a file\n")


def test_names_say_nothing_to_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]):
    path = folder / SCHEDULER
    path.write_text(path.read_text().replace('"id":"A"', '"id":"\\u001b[2J\\nA"'))
    edit(path, _change_selection)
    assert run_cli(["check", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "request \\x1b[2J\\nA, group 0" in said
    assert "\x1b" not in said


_STRANGE = [None, True, -1, 0, 1, 17, 1 << 31, 1 << 70, 1e308, "", "x", [], [None], [[0, 1]], {}, {"1": {"groups": [[1]]}}]


def _places(value: object, place: tuple = ()) -> Iterator[tuple]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


@pytest.mark.parametrize("seed", range(80))
def test_whatever_is_changed_the_answer_is_a_verdict_or_one_error(
    folder: Path, seed: int, capsys: pytest.CaptureFixture[str]
):
    rng = random.Random(seed)
    path = folder / rng.choice((SCHEDULER, WORKER))
    lines = records(path)
    number = rng.choice((0, rng.randrange(len(lines))))
    *way, last = rng.choice([place for place in _places(lines[number]) if place])
    inner = lines[number]
    for key in way:
        inner = inner[key]
    inner[last] = rng.choice(_STRANGE)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = run_cli(["check", str(folder), "--scenario", str(folder / "case.yaml")])
    said = capsys.readouterr()
    assert code in (0, 1, 2)
    assert len(said.err.splitlines()) == (code == 2), said.err


def test_reading_a_trace_runs_no_code(folder: Path):
    """Python itself tells whatever is compiled, executed, unpickled or started."""
    seen: list[str] = []
    is_watched = False

    def hook(event: str, _: object) -> None:
        if is_watched and event in ("compile", "exec", "pickle.find_class", "os.system", "os.exec", "subprocess.Popen"):
            seen.append(event)

    sys.addaudithook(hook)
    for text in ("__import__('os').system('true')", "!!python/object/apply:os.system [true]"):
        path = folder / SCHEDULER
        path.write_text(path.read_text().replace('"id":"A"', f'"id":"{text}"'))
        check(folder)  # once before: modules are loaded when they are first needed
        is_watched = True
        scenario = export(check(folder).rebuilt, None)
        is_watched = False
        assert loads(dump(scenario)) == scenario
    assert seen == []
    is_watched = True
    eval("1")
    is_watched = False
    assert seen == ["compile", "exec"]

"""Judges a recorded run: the model follows its decisions, the laws look at what was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from diff_tests.explain.words import count
from diff_tests.live.children import histories
from diff_tests.live.rebuild import Rebuilt, rebuild
from diff_tests.live.trace import (
    LoadRecord,
    MetaRecord,
    RaisedRecord,
    ReceivedRecord,
    StepRecord,
    StoppedRecord,
    Stream,
    Trace,
)
from diff_tests.report import MOST_SHOWN, finding_document, headline
from diff_tests.run import Judged, Verdict, explain_known, verdict_of
from oracle.compare import compare
from oracle.findings import Finding
from oracle.laws import judge
from sim.follow import Observed
from sim.history import Act, History, Scheduled, Selections, Updated
from sim.scenario import ScenarioError
from sim.simulator import Simulator

_CONNECTOR_LAWS = (4, 5, 6)
_RANK_LAWS = (5, 11)


@dataclass
class Checked:
    """What a trace showed. num_followed: steps through which the model followed; gap: why not further, or None.
    predicted: what it said meanwhile. places: the line of the trace that a step came from."""

    rebuilt: Rebuilt
    findings: list[Judged]
    num_steps: int
    num_followed: int
    gap: str | None
    notes: list[str] = field(default_factory=list)
    places: dict[int, str] = field(default_factory=dict)
    predicted: History = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.findings)

    def place(self, finding: Finding) -> str | None:
        """File and line of the step that a finding is about."""
        return self.places.get(finding.step or 0)


def check_trace(trace: Trace) -> Checked:
    """Follows and judges a trace as far as it goes. Raises TraceError."""
    return check_rebuilt(trace, rebuild(trace))


def check_rebuilt(trace: Trace, rebuilt: Rebuilt) -> Checked:
    """The same, of a run that has been rebuilt, and to whose history the caller may have added what it saw itself."""
    findings: list[Finding] = []
    predicted, divergence, num_followed, gap = _follow(rebuilt)
    if divergence is not None:
        findings.append(divergence)
    broken = judge(rebuilt.scenario, rebuilt.history, rebuilt.geometry.rules, rebuilt.contract)
    findings += broken if rebuilt.has_beginning else [f for f in broken if f.law in _CONNECTOR_LAWS]
    findings += _other_ranks(rebuilt)
    findings += _children(rebuilt)
    findings += _workers(trace, rebuilt)
    places = {
        record.step: place
        for record, place in zip(rebuilt.history, rebuilt.places, strict=True)
        if isinstance(record, Scheduled)
    }
    judged = explain_known(findings, rebuilt.scenario, rebuilt.geometry.rules)
    return Checked(
        rebuilt=rebuilt,
        findings=judged,
        num_steps=len(places),
        num_followed=num_followed,
        gap=gap,
        notes=_notes(trace, rebuilt),
        places=places,
        predicted=predicted,
    )


# ------------------------------------------------------------------------------------------------------------- the model


def _follow(rebuilt: Rebuilt) -> tuple[History, Finding | None, int, str | None]:
    """(what the model says, first divergence, steps followed, what ended it if not the trace)."""
    gaps = sorted(rebuilt.gaps)
    observed = rebuilt.history
    if gaps:
        end, _ = gaps[0]
        observed = [record for record in observed if end and getattr(record, "step", 0) <= end]
    reason = "; ".join(dict.fromkeys(text for step, text in gaps if step == gaps[0][0])) if gaps else None
    steps = [record for record in observed if isinstance(record, Scheduled)]
    if not steps:
        return [], None, 0, reason
    try:
        simulator = Simulator(rebuilt.scenario, rebuilt.geometry.rules, observed=_observed(rebuilt, steps))
    except ScenarioError as error:
        return [], None, 0, f"not modelled: {error.reason}"
    predicted = [record for _ in observed if (record := simulator.step()) is not None]
    divergence = compare(predicted, observed)
    num_followed = len(steps) if divergence is None else max((divergence.step or 1) - 1, 0)
    return predicted, divergence, num_followed, reason


def _observed(rebuilt: Rebuilt, steps: list[Scheduled]) -> Observed:
    return Observed(
        steps,
        [record for record in rebuilt.history if isinstance(record, Updated)],
        rebuilt.computed_at_end,
        requires_kv_delivery=rebuilt.requires_kv_delivery,
        restores_windows=rebuilt.restores_windows,
    )


# ---------------------------------------------------------------------------------------------- children and the workers


def _children(rebuilt: Rebuilt) -> list[Finding]:
    """Laws 4, 5, 6 and 11 for each connector within a MultiConnector, as if it were alone."""
    findings: list[Finding] = []
    for child in rebuilt.children:
        if child.contract is None:
            continue
        for turn, (rank, history) in enumerate(histories(rebuilt, child)):
            # What the scheduler's side did is the same for every rank.
            laws = (*_CONNECTOR_LAWS, *_RANK_LAWS) if turn == 0 else (6, *_RANK_LAWS)
            broken = judge(rebuilt.scenario, history, rebuilt.geometry.rules, child.contract)
            found = [_by(finding, child.name) for finding in broken if finding.law in laws]
            findings += found if turn == 0 else [_on_rank(finding, rank or 0) for finding in found]
    return findings


def _by(finding: Finding, name: str) -> Finding:
    return msgspec.structs.replace(finding, message=f"{finding.message} ({name})")


def _other_ranks(rebuilt: Rebuilt) -> list[Finding]:
    """Laws 5 and 11 for the ranks after the first, whose part the history does not have."""
    findings: list[Finding] = []
    scheduled = [record for record in rebuilt.history if isinstance(record, Scheduled)]
    for rank, received in rebuilt.others.items():
        acts = rebuilt.other_acts.get(rank, {})
        if all(_did_the_same(record, received.get(record.step), acts.get(record.step)) for record in scheduled):
            continue
        history = [
            msgspec.structs.replace(record, received=received.get(record.step), acts=acts.get(record.step), written=None)
            if isinstance(record, Scheduled)
            else record
            for record in rebuilt.history
        ]
        broken = judge(rebuilt.scenario, history, rebuilt.geometry.rules, rebuilt.contract)
        findings += [_on_rank(finding, rank) for finding in broken if finding.law in _RANK_LAWS]
    return findings


def _did_the_same(record: Scheduled, received: Selections | None, acts: list[Act] | None) -> bool:
    """Whether there is nothing in another rank's step that the first one's does not show too."""
    return (received is None or received == record.selected) and (acts is None or acts == record.acts)


def _on_rank(finding: Finding, rank: int) -> Finding:
    return msgspec.structs.replace(finding, message=f"{finding.message} (worker of rank {rank})")


def _workers(trace: Trace, rebuilt: Rebuilt) -> list[Finding]:
    """What laws 5 and 6 say of metadata whose form nobody knows, and of steps that a worker left out."""
    sent: dict[tuple[int, int], dict[str, Any]] = {}
    scheduled = {record.step for record in rebuilt.history if isinstance(record, Scheduled) and record.scheduled}
    for line in trace.scheduler.lines:
        record = line.record
        if isinstance(record, StepRecord):
            sent[record.k, 0] = record.selected
        elif isinstance(record, MetaRecord):
            sent[record.k, record.c] = record.selected
    findings: list[Finding] = []
    for stream in _streams(trace):
        findings += _raised(stream)
    for stream in trace.workers:
        findings += _routed(stream, sent, rebuilt)
        for c in range(max(len(rebuilt.children), 1)):
            findings += _left_out(stream, sent, scheduled, c)
    return findings


def _raised(stream: Stream) -> list[Finding]:
    """Law 7: what the connector raised."""
    findings = []
    step = 0
    for line in stream.lines:
        record = line.record
        step = getattr(record, "k", step)
        if isinstance(record, RaisedRecord):
            message = f"step {step}: {record.type} in the connector's {record.hook} ({line.place})"
            finding = Finding(
                kind="crash", law=7, cause="connector_exception", step=step, observed=record.type, message=message
            )
            findings.append(finding)
    return findings


def _routed(stream: Stream, sent: dict[tuple[int, int], dict[str, Any]], rebuilt: Rebuilt) -> list[Finding]:
    """Metadata that is not judged block by block must arrive as it was."""
    for line in stream.lines:
        record = line.record
        if not isinstance(record, ReceivedRecord) or (record.k, record.c) not in sent:
            continue
        told = sent[record.k, record.c]
        if "form" not in told and _is_judged(rebuilt, record.c):
            continue  # block by block, as law 5
        if rebuilt.by_name(told) != rebuilt.by_name(record.selected):
            message = f"step {record.k}: the metadata that arrived ({line.place}) is not what the scheduler had built"
            finding = Finding(
                kind="routing",
                law=5,
                cause="changed_metadata",
                step=record.k,
                expected=told,
                observed=record.selected,
                message=message,
            )
            return [_on_rank(finding, stream.start.rank)]
    return []


def _is_judged(rebuilt: Rebuilt, c: int) -> bool:
    """Whether law 5 looks at this connector's metadata block by block."""
    return rebuilt.is_alone or any(child.c == c and child.contract is not None for child in rebuilt.children)


def _left_out(
    stream: Stream, sent: dict[tuple[int, int], dict[str, Any]], scheduled: set[int], c: int = 0
) -> list[Finding]:
    """Steps that a worker was told nothing of, or whose load never began, from the first that it saw to the one before the
    last; of one connector."""
    bound = {line.record.k for line in stream.lines if isinstance(line.record, ReceivedRecord) and line.record.c == c}
    loaded = {line.record.k for line in stream.lines if isinstance(line.record, LoadRecord) and line.record.c == c}
    findings = []
    for step in range(min(bound, default=0), max(bound, default=0)):
        told = sent.get((step, c), {})
        if step not in bound and (step in scheduled or told):
            message = f"step {step}: the worker was told nothing"
            finding = Finding(kind="routing", law=5, cause="step_left_out", step=step, message=message)
            findings.append(_on_rank(finding, stream.start.rank))
            break
        if step in bound and told and "form" not in told and step not in loaded:
            message = f"step {step}: blocks were selected, but the load never began"
            finding = Finding(kind="fill", law=6, cause="never_loaded", step=step, message=message)
            findings.append(_on_rank(finding, stream.start.rank))
            break
    return findings


# -------------------------------------------------------------------------------------------------------------- reports


def _notes(trace: Trace, rebuilt: Rebuilt) -> list[str]:
    notes = list(rebuilt.notes)
    name = trace.start.connector.name
    judged = [(child.name, child.contract) for child in rebuilt.children] or [(name, rebuilt.contract)]
    notes += [
        f"no contract for connector {name}: selection and fills were not judged"
        for name, contract in judged
        if contract is None
    ]
    if not trace.workers:
        notes.append("no worker's files: what the workers received was not judged")
    notes += [
        f"{line.place}: the probe failed ({line.record.type} in {line.record.hook}) and recorded no more"
        for stream in _streams(trace)
        for line in stream.lines
        if isinstance(line.record, StoppedRecord)
    ]
    notes += [f"{stream.parts[-1].name}: the last line is torn" for stream in _streams(trace) if stream.is_cut]
    return notes


def _streams(trace: Trace) -> list[Stream]:
    return [trace.scheduler, *trace.workers]


def _model_words(checked: Checked) -> str:
    if checked.gap is None:
        return f"the model followed {checked.num_followed} of {checked.num_steps} steps"
    if not checked.num_followed:
        return f"the model was not consulted: {checked.gap}"
    return f"the model followed {checked.num_followed} of {checked.num_steps} steps, then no more: {checked.gap}"


def check_document(trace: Trace, checked: Checked) -> dict[str, Any]:
    """The JSON document of `check --json`."""
    return {
        "verdict": checked.verdict,
        "target": {"vllm": trace.start.vllm, "connector": trace.start.connector.name},
        "steps": checked.num_steps,
        "requests": len(checked.rebuilt.ids),
        "workers": [stream.start.rank for stream in trace.workers],
        "model": {"steps": checked.num_followed, "not_consulted": checked.gap},
        "findings": [{**finding_document(judged), "place": checked.place(judged.finding)} for judged in checked.findings],
        "notes": checked.notes,
    }


def print_finding(console: Console, checked: Checked, number: int, judged: Judged) -> None:
    """A finding with its sentence, and where in the trace it shows."""
    known = f"  [known issue {judged.issue.id}]" if judged.issue is not None else ""
    _say(console, f"{number}. {headline(judged.finding)}{known}")
    place = checked.place(judged.finding)
    _say(console, f"   {judged.finding.message}" + (f"  [{place}]" if place else ""))


def print_checked(console: Console, trace: Trace, checked: Checked, num_shown_before: int = 0) -> None:
    """All findings that were not shown before, notes, and last the verdict."""
    for number, judged in enumerate(checked.findings[:MOST_SHOWN], start=1):
        if number > num_shown_before:
            print_finding(console, checked, number, judged)
    if len(checked.findings) > MOST_SHOWN:
        _say(console, f"... and {len(checked.findings) - MOST_SHOWN} more; --json has them all")
    for note in checked.notes:
        _say(console, f"note: {note}")
    _say(console, _model_words(checked))
    findings = count(len(checked.findings), "finding")
    _say(
        console,
        f"{checked.verdict}: {findings} in {checked.num_steps} steps of {len(checked.rebuilt.ids)} requests, "
        f"vLLM {trace.start.vllm}, {trace.start.connector.name}",
    )


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)

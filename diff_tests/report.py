"""Reports: the same outcome as text for a person and as a JSON document for a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diff_tests.coverage import Coverage, accepted_kind_sets, can_hit, kind_sets, refusal_of_kinds
from diff_tests.explain.words import count, ranges

if TYPE_CHECKING:
    from diff_tests.campaign import Summary
    from diff_tests.corpus import Replayed
    from diff_tests.run import Judged, Outcome
    from diff_tests.vllm_target.target import TargetInfo
    from oracle.findings import Finding

MOST_SHOWN = 20
"""Findings of one case shown to a person; the JSON document has them all."""


def finding_document(judged: Judged) -> dict[str, Any]:
    """A finding as plain data, with the known issue that explains it."""
    document: dict[str, Any] = msgspec.to_builtins(judged.finding)
    document["known_issue"] = judged.issue.id if judged.issue is not None else None
    return document


def outcome_document(outcome: Outcome, info: TargetInfo) -> dict[str, Any]:
    """The JSON document of `run --json`."""
    return {
        "verdict": outcome.verdict,
        "target": {"vllm": info.version, "connector": _connector_name(outcome, info)},
        "steps": outcome.num_steps,
        "findings": [finding_document(judged) for judged in outcome.findings],
        "notes": outcome.notes,
    }


def _connector_name(outcome: Outcome, info: TargetInfo) -> str | None:
    """The connector that ran: the one asked for, else the scenario's own."""
    if info.connector is not None:
        return info.connector
    return outcome.scenario.connector.name if outcome.scenario.connector is not None else None


def headline(finding: Finding) -> str:
    """`selection, law 4, starts_early: step 3, request B, group 0 (full), positions 0..101`."""
    law = "divergence" if finding.law is None else f"law {finding.law}"
    places = [f"step {finding.step}"] if finding.step is not None else []
    if finding.request is not None:
        places.append(f"request {finding.request}")
    if finding.group is not None:
        places.append(f"group {finding.group}" + (f" ({finding.group_kind})" if finding.group_kind else ""))
    if finding.positions:
        positions = ", ".join(ranges(sorted(set(finding.positions))))
        places.append(f"position{'s' if len(finding.positions) > 1 else ''} {positions}")
    return f"{finding.kind}, {law}, {finding.cause}" + (f": {', '.join(places)}" if places else "")


def print_outcome(console: Console, outcome: Outcome, info: TargetInfo) -> None:
    """One scenario's outcome: the findings, and last the verdict."""
    for number, judged in enumerate(outcome.findings[:MOST_SHOWN], start=1):
        known = f"  [known issue {judged.issue.id}]" if judged.issue is not None else ""
        _say(console, f"{number}. {headline(judged.finding)}{known}")
        _say(console, f"   {judged.finding.message}")
    if len(outcome.findings) > MOST_SHOWN:
        _say(console, f"... and {len(outcome.findings) - MOST_SHOWN} more; --json has them all")
    for note in outcome.notes:
        _say(console, f"note: {note}")
    connector = _connector_name(outcome, info) or "no connector"
    findings = count(len(outcome.findings), "finding")
    _say(console, f"{outcome.verdict}: {findings} in {outcome.num_steps} steps, vLLM {info.version}, {connector}")


def _say(console: Console, line: str) -> None:
    """A line as it is: no markup, no wrapping that would break a command."""
    console.print(Text(line), soft_wrap=True)


def print_summary(console: Console, summary: Summary, with_coverage: bool = False) -> None:
    """A campaign: faults with the command that repeats each, known issues, coverage, and last the verdict.

    with_coverage: with the tables of what was exercised.
    """
    for number, report in enumerate(summary.faults.values(), start=1):
        _say(console, f"{number}. {headline(report.first)}  [{count(report.num_cases, 'case')}]")
        _say(console, f"   {report.first.message}")
        _say(console, f"   {report.command}")
    for issue_id, number in sorted(summary.known.items()):
        _say(console, f"known issue {issue_id}: {count(number, 'finding')}")
    if with_coverage:
        print_coverage(console, summary.coverage)
    if (size := summary.scope_size) is None:
        _print_zero(console, summary.coverage)
    else:
        _say(console, f"scope: {summary.num_cases:,} of {size:,} cases ({100 * summary.num_cases / size:.1f} %)")
    if summary.lost:
        _say(console, f"lost to a child that died once, and passed when run again: {count(summary.lost, 'case')}")
    for reason, number in summary.unsaved.items():
        _say(
            console,
            f"{count(number, 'file')} could not be written: {reason}; free some space and run the campaign again",
        )
    if summary.interrupted:
        _say(console, f"interrupted; what was found is in {summary.plan.folder}")
    rate = summary.num_cases / summary.seconds if summary.seconds else 0.0
    _say(
        console,
        f"{summary.verdict}: {summary.num_cases} cases in {summary.seconds:.1f} s ({rate:.0f} cases/s), "
        f"{count(len(summary.faults), 'fault')}, vLLM {summary.info.version}, seed {summary.plan.seed}, "
        f"saved in {summary.plan.folder}",
    )


def _print_zero(console: Console, coverage: Coverage) -> None:
    """How much was exercised, and what was not."""
    zero, kinds = coverage.at_zero, coverage.kinds_at_zero
    num_promised = sum(behaviour.promised for behaviour in coverage.behaviours)
    _say(console, f"exercised: {num_promised - len(zero)} of {num_promised} behaviours; --coverage lists them")
    if zero:
        _say(console, f"stayed at zero: {', '.join(zero[:MOST_SHOWN])}{_and_more(zero)}")
    if kinds:
        _say(console, f"stayed at zero for kinds of groups: {', '.join(kinds[:MOST_SHOWN])}{_and_more(kinds)}")


def _and_more(items: Sequence[str]) -> str:
    return f" and {len(items) - MOST_SHOWN} more" if len(items) > MOST_SHOWN else ""


def print_coverage(console: Console, coverage: Coverage) -> None:
    """Every behaviour with its count, every kind and pair of kinds, and what was refused."""
    for section in dict.fromkeys(behaviour.section for behaviour in coverage.behaviours):
        table = Table(title=section, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for behaviour in coverage.behaviours:
            if behaviour.section == section:
                table.add_row(f"{coverage.counts[behaviour.name]:,}", behaviour.name)
        console.print(table)
    _print_kinds(console, coverage)
    for reason, number in sorted(coverage.refusals.items()):
        _say(console, f"refused, {number:,} cases: {reason}")


def _print_kinds(console: Console, coverage: Coverage) -> None:
    table = Table(title="kinds of groups, alone and in pairs", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for title in ("cases", "hits", "refused for now", "preemptions"):
        table.add_column(title, justify="right")
    table.add_column(no_wrap=True)
    accepted = set(accepted_kind_sets(coverage.rules))
    for kinds in kind_sets(coverage.rules):
        name = " + ".join(kinds)
        if kinds not in accepted:
            refused = refusal_of_kinds(kinds, coverage.rules)
            table.add_row("", "", "", "", f"{name}: {refused.type}, {refused.message}" if refused else name)
            continue
        seen = coverage.kinds[kinds]
        hits = f"{seen.hits:,}" if can_hit(kinds) else "-"
        table.add_row(f"{seen.cases:,}", hits, f"{seen.refused:,}", f"{seen.preemptions:,}", name)
    console.print(table)


def replay_document(replayed: Sequence[Replayed], not_run: Sequence[str]) -> dict[str, Any]:
    """The JSON document of `replay --json`."""
    return {
        "verdict": "fail" if any(r.bad for r in replayed) else "pass",
        "cases": [
            {
                "case": r.case.name,
                "path": str(r.case.path),
                "release": r.release,
                "status": r.status,
                "verdict": r.outcome.verdict,
                "findings": [finding_document(judged) for judged in r.outcome.findings],
            }
            for r in replayed
        ],
        "not_cached": list(not_run),
    }


def print_replay(console: Console, replayed: Sequence[Replayed], not_run: Sequence[str]) -> None:
    """One line a case and release, and last the verdict."""
    for r in replayed:
        _say(console, f"{r.status:<6} {r.release}  {r.case.name}" + (f": {r.sentence}" if r.sentence else ""))
    if not_run:
        _say(console, f"not cached, so not run: {', '.join(not_run)} (kvoracle vllm add RELEASE)")
    num_bad = sum(r.bad for r in replayed)
    _say(console, f"{'fail' if num_bad else 'pass'}: {len(replayed)} replayed, {num_bad} not as expected")

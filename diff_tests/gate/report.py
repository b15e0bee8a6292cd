"""A gate's result for a person and as one JSON document. Nothing but `seconds` differs between two runs of one gate."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from diff_tests.explain.words import count
from diff_tests.gate.running import Candidate, Entry, Result
from diff_tests.report import headline
from diff_tests.vllm_target.target import TargetInfo

_LABELS = {"new failure": "NEW", "fixed": "FIXED", "known": "KNOWN", "same": "SAME", None: "CHANGE"}
_BOTH = ("known", "same")  # what says nothing about head
_ORDER = ("new failure", "fixed", "same", "known")
MOST_SHOWN = 10


def document(result: Result, is_strict: bool) -> dict[str, Any]:
    """The JSON document of `gate --json`."""
    plan = result.plan
    return {
        "verdict": verdict(result, is_strict),
        "head": _target(result.head),
        "base": _target(result.base),
        "seed": plan.seed,
        "cases": result.num_seeded,
        "corpus": result.num_corpus,
        "repeat": repeat(result),
        "candidates": [_candidate(candidate) for candidate in result.candidates],
        "changes": [{"candidate": candidate.name, **_entry(entry)} for candidate, entry in result.changes],
        "interrupted": result.interrupted,
        "seconds": round(result.seconds, 3),
    }


def verdict(result: Result, is_strict: bool) -> str:
    """pass or fail; strict: changes of behaviour fail too."""
    return "fail" if is_strict and result.changes else result.verdict


def exit_code(result: Result, is_strict: bool) -> int:
    """0 pass, 1 new failures or what strictness adds, 2 nothing failed but something could not be run, 130 interrupted
    with nothing found."""
    verdicts = {candidate.verdict for candidate in result.candidates}
    if "fail" in verdicts or (is_strict and result.changes):
        return 1
    if "error" in verdicts:
        return 2
    return 130 if result.interrupted else 0


def repeat(result: Result) -> str:
    """The options that run the same cases again."""
    return f"--cases {max(result.num_seeded, result.plan.cases)} --seed {result.plan.seed}"


def _target(info: TargetInfo) -> dict[str, Any]:
    return {
        "vllm": info.vllm,
        "version": info.version,
        "rules": info.rules.release,
        "is_release": info.known_release,
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    first = candidate.headline
    return {
        "name": candidate.name,
        "connector": candidate.connector,
        "verdict": candidate.verdict,
        "headline": first and f"{headline(first)}: {first.message}",
        "error": candidate.error,
        "cases": candidate.num_cases,
        "findings": [_entry(entry) for entry in entries(candidate) if entry.word not in _BOTH],
        "known": [_entry(entry) for entry in entries(candidate) if entry.word in _BOTH],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(entry.finding),
        "verdict": entry.word or "change",
        "known_issue": entry.known_issue,
        "cases": entry.num_cases,
        "case": entry.case.name,
        "scenario": str(entry.scenario) if entry.scenario else None,
        "repeat": entry.command,
    }


def entries(candidate: Candidate) -> list[Entry]:
    """A candidate's verdicts: new failures, the telling one first, then what is fixed, the same, and known."""
    others = [entry for entry in candidate.entries.values() if entry.word != "new failure"]
    others.sort(key=lambda entry: _ORDER.index(entry.word or ""))
    return candidate.new_failures + others


def print_result(console: Console, result: Result, is_strict: bool) -> None:
    """Sides, every candidate with its verdicts, and last what came out."""
    _say(console, f"head: {_sentence(result.head)}")
    _say(console, f"base: {_sentence(result.base)}")
    for candidate in result.candidates:
        _print_candidate(console, candidate)
    if result.interrupted:
        _say(console, "interrupted; this is what was found until then")
    cases = f"{result.num_corpus} cases of the corpus and {result.num_seeded} seeded ones in {result.seconds:.1f} s"
    _say(console, f"{verdict(result, is_strict)}: {cases}; the same again: {repeat(result)}")


def _sentence(info: TargetInfo) -> str:
    by = "its own rules" if info.known_release else f"the rules of {info.rules.release}, as it is no release"
    return f"vLLM {info.version} ({info.vllm}), judged by {by}"


def _print_candidate(console: Console, candidate: Candidate) -> None:
    if candidate.error is not None:
        return _say(console, f"{candidate.name}: error: {candidate.error}")
    first = candidate.headline
    shown = [entry for entry in entries(candidate) if entry.word not in _BOTH] + [*candidate.changes.values()]
    word = candidate.verdict if shown else "same"
    _say(console, f"{candidate.name}: {word}" + (f": {first.message}" if first else ""))
    for entry in shown[:MOST_SHOWN]:
        _print_entry(console, entry)
    if len(shown) > MOST_SHOWN:
        _say(console, f"  ... and {len(shown) - MOST_SHOWN} more; --json has them all")
    for entry in entries(candidate):
        if entry.word == "same":
            _print_entry(console, entry)
    issues = dict.fromkeys(entry.known_issue for entry in entries(candidate) if entry.word == "known")
    if issues:
        _say(console, f"  KNOWN  {', '.join(str(issue) for issue in issues)}; see `kvoracle issues`")
    return None


def _print_entry(console: Console, entry: Entry) -> None:
    cases = f"{count(entry.num_cases, 'case')}, first {entry.case.name}"
    issue = f", known issue {entry.known_issue}" if entry.known_issue else ""
    _say(console, f"  {_LABELS[entry.word]:<6} {headline(entry.finding)}  [{cases}{issue}]")
    if entry.word in ("new failure", None):
        _say(console, f"         {entry.finding.message}")
    if entry.command is not None:
        _say(console, f"         {entry.command}")


def _say(console: Console, line: str) -> None:
    """A line as it is: no markup, no wrapping that would break a command."""
    console.print(Text(line), soft_wrap=True)

"""Known issues for people: the list, and for each a page of evidence that can be sent to vLLM as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from diff_tests.explain.explanation import law_words
from diff_tests.explain.standalone import ROOT, module_of_issue
from diff_tests.run import Outcome
from oracle.findings import Finding
from oracle.known_issues import KnownIssue, load
from sim.releases import RELEASES
from sim.scenario import Scenario
from sim.scenario import load as load_scenario


def issue_named(name: str) -> KnownIssue:
    """The known issue with this id. Raises ValueError where there is none."""
    issues = {issue.id: issue for issue in load()}
    if name not in issues:
        raise ValueError(f"no known issue {name!r}; `kvoracle issues` lists them")
    return issues[name]


def scenario_of(issue: KnownIssue) -> Scenario:
    """The smallest scenario that shows it."""
    return load_scenario(ROOT / issue.scenario)


def affected_release(issue: KnownIssue, installed: str | None, cached: Sequence[str]) -> str:
    """A release that has the issue and needs no download: the installed one, else the newest in the cache. Raises
    ValueError where there is none."""
    at_hand = [release for release in issue.releases if release in (installed, *cached)]
    if not at_hand:
        raise ValueError(f"no release that has it is installed or in the cache; name one: --vllm {issue.releases[-1]}")
    return installed if installed is not None and installed in at_hand else at_hand[-1]


def findings_of(issue: KnownIssue, outcome: Outcome) -> list[Finding]:
    """What a run of its scenario shows of it."""
    return [judged.finding for judged in outcome.findings if judged.issue is not None and judged.issue.id == issue.id]


def list_document() -> dict[str, Any]:
    """All issues as plain data."""
    return {"issues": [msgspec.to_builtins(issue) for issue in load()]}


def document(issue: KnownIssue, version: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """An issue as plain data, with what its scenario showed on this vLLM."""
    return {
        **msgspec.to_builtins(issue),
        "vllm": version,
        "findings": msgspec.to_builtins(list(findings)),
        "page": page(issue, version, findings),
    }


def print_list(console: Console) -> None:
    """A line for each."""
    table = Table(box=None, pad_edge=False)
    for title in ("issue", "law", "releases", "what happens"):
        table.add_column(title, no_wrap=title in ("issue", "law"))
    for issue in load():
        table.add_row(issue.id, str(issue.law), _releases(issue.releases), issue.title)
    console.print(table)


def page(issue: KnownIssue, version: str, findings: Sequence[Finding]) -> str:
    """The evidence, in Markdown. version: of the vLLM on which the scenario showed these findings."""
    return "\n".join(_lines(issue, version, findings)) + "\n"


def _lines(issue: KnownIssue, version: str, findings: Sequence[Finding]) -> Iterator[str]:
    others = [release for release in RELEASES if release not in issue.releases]
    test = f"test_{Path(issue.script).name}"
    yield f"# {issue.title[0].upper()}{issue.title[1:]}"
    yield ""
    yield issue.reason.strip()
    yield ""
    yield f"Affected: vLLM {_releases(issue.releases)}. Not affected: {_releases(others) or 'none that was tried'}."
    if issue.upstream:
        yield f"Reported as {issue.upstream}."
    yield ""
    yield "## Expected and observed"
    yield ""
    sentences = dict.fromkeys(sentence for finding in findings for sentence in law_words(finding))
    yield from (f"What must hold (law {issue.law}): {sentence}" for sentence in sentences)
    yield ""
    yield f"On vLLM {version}, with the scenario below:" if findings else f"vLLM {version} does not have it."
    yield ""
    yield from (f"* {finding.message}" for finding in findings)
    yield ""
    yield "## Smallest scenario"
    yield ""
    yield "```yaml"
    yield (ROOT / issue.scenario).read_text(encoding="utf-8").strip()
    yield "```"
    yield ""
    yield "## A test that needs vLLM alone"
    yield ""
    yield f"As `{test}`, it fails on an affected release and passes on the others."
    yield ""
    yield "```python"
    yield module_of_issue(issue).strip()
    yield "```"


def _releases(releases: Sequence[str]) -> str:
    """`0.29.0 to 0.31.0`, or each."""
    places = [list(RELEASES).index(release) for release in releases]
    if len(places) > 2 and places == list(range(places[0], places[-1] + 1)):
        return f"{releases[0]} to {releases[-1]}"
    return ", ".join(releases)

"""What one case says about head, given what base did with it. Pure: two outcomes in, verdicts out."""

from __future__ import annotations

from typing import Literal, NamedTuple

from diff_tests.run import Judged, Outcome
from oracle.compare import compare
from oracle.findings import Finding
from sim.history import Failure, History, Refusal, Scheduled
from sim.releases import Rules

Word = Literal["new failure", "fixed", "known", "same"]

SIDES = ("base", "head")


class Ran(NamedTuple):
    """What a side did with a case. is_release: an unmodified release, of which the model knows everything."""

    outcome: Outcome
    rules: Rules
    is_release: bool

    @property
    def broke_off(self) -> bool:
        """Whether the history ends before the scenario does."""
        return isinstance(self.outcome.observed[-1], (Refusal, Failure))


class Weighed(NamedTuple):
    """A finding of head, or of base where it is fixed, and what it means."""

    word: Word
    judged: Judged


def weigh(base: Ran, head: Ran) -> list[Weighed]:
    """The verdict on each finding: those of head in the order in which they count, then what base alone shows.

    known: a known issue that base has as well, or that head has as an unmodified release. same: base shows the fault in
    this case too. What base cannot show, because it broke off before, is not held against head if base's release has the
    known issue. In a case with a new failure nothing counts as fixed: head may just not get there.
    """
    are_releases = base.is_release and head.is_release
    ours, theirs = findings_of(head, are_releases), findings_of(base, are_releases)
    base_faults = {judged.finding.fault for judged in theirs}
    head_faults = {judged.finding.fault for judged in ours}
    may_know = {base.rules.release, *((head.rules.release,) if head.is_release else ())}
    weighed = [Weighed(_word(judged, judged.finding.fault in base_faults, may_know), judged) for judged in ours]
    if not head.broke_off and all(w.word != "new failure" for w in weighed):
        weighed += [Weighed("fixed", j) for j in theirs if j.finding.fault not in head_faults and not _is_refusal(base)]
    return weighed


def _word(judged: Judged, is_in_base: bool, releases: set[str]) -> Word:
    """releases: those whose known issues are not held against head."""
    if judged.issue is not None and (is_in_base or not releases.isdisjoint(judged.issue.releases)):
        return "known"
    return "same" if is_in_base else "new failure"


def findings_of(ran: Ran, are_releases: bool) -> list[Judged]:
    """The findings that count: breaks of laws first, then divergences. Where a side is changed code, a divergence that
    breaks no law is a change of behaviour, unless the configuration is refused."""
    judged = ran.outcome.findings
    broken = [j for j in judged if j.finding.law is not None]
    counts_divergences = are_releases or _is_refusal(ran)
    return broken + [j for j in judged if j.finding.law is None and counts_divergences]


def _is_refusal(ran: Ran) -> bool:
    return isinstance(ran.outcome.observed[0], Refusal)


def change_of(base: Ran, head: Ran, weighed: list[Weighed]) -> Finding | None:
    """The first place where head's behaviour parts from base's, in a case where that is no failure and no repair."""
    if base.outcome.observed == head.outcome.observed or any(w.word in ("new failure", "fixed") for w in weighed):
        return None
    return compare(base.outcome.observed, head.outcome.observed, SIDES) or _other_selection(base, head)


def _other_selection(base: Ran, head: Ran) -> Finding | None:
    """The first step with another selection, where no contract says which one is right."""
    if not head.outcome.notes:
        return None
    for mine, theirs in zip(_steps(base.outcome.observed), _steps(head.outcome.observed), strict=False):
        if mine.selected != theirs.selected:
            message = f"step {theirs.step}: base says {mine.selected}, head has {theirs.selected}"
            return Finding(kind="selection", cause="other_selection", step=theirs.step, message=message)
    return None


def _steps(history: History) -> list[Scheduled]:
    return [record for record in history if isinstance(record, Scheduled)]

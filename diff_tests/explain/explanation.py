"""What a person has to know of one run: the sentence, the moment, the tables position by position, and what decides.

Built from a story and what was found in it. `text`, `page` and `document` show it, each in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diff_tests.explain.lookups import Lookup
from diff_tests.explain.rules import Rule, deciding, rule_of_kind
from diff_tests.explain.story import Step, Story
from diff_tests.explain.tables import Row, TableView, table_view
from diff_tests.explain.words import count, names, ranges
from diff_tests.run import Judged, Outcome
from oracle.contracts import contract_for
from oracle.findings import Finding, place, token_range
from oracle.laws import LAWS
from oracle.selection import NULL
from sim.history import History, Scheduled, Tables, resolve
from sim.releases import Rules

NOTHING = "nothing"
"""What is said of a step in which nothing happened."""

MOST_REQUESTS = 2
"""Requests whose tables are shown."""
MOST_LISTED = 8
"""Requests named in a hint."""


class Moment(NamedTuple):
    """A step in one line. is_focus: the step that is explained."""

    step: int
    words: str
    is_focus: bool


@dataclass
class Explanation:
    """All of it. headline: what went wrong, or that nothing did. finding: what is explained, if anything. known_issue: its
    id and reason. others: further findings. requests: those concerned. decided_by: (title, sentence, place in the code).
    """

    title: str
    headline: str
    story: Story
    finding: Finding | None
    known_issue: tuple[str, str] | None
    others: list[Finding]
    step: int
    requests: list[str]
    decided_by: list[tuple[str, str, str]]
    timeline: list[Moment]
    tables: list[TableView]
    lookups: list[Lookup]
    notes: list[str] = field(default_factory=list)


def explain(outcome: Outcome, rules: Rules, title: str, request: str | None = None, step: int | None = None) -> Explanation:
    """Explains the first finding of an outcome, or the run where there is none.

    request, step: look there instead. Raises ValueError for a request or step that the history does not have.
    """
    story = Story(outcome.scenario, outcome.observed, rules, contract_for(outcome.scenario, rules))
    if request is not None and request not in story.requests:
        raise ValueError(f"request {request}: not in this history; it has {names(story.requests, 10) or 'none'}")
    if step is not None and step not in story.steps:
        raise ValueError(f"step {step}: not in this history; it has steps 1 to {story.last_step}")
    return _Explainer(story, outcome, title, request, step).explanation()


class _Explainer:
    """Finds the place to look at, then describes it."""

    def __init__(self, story: Story, outcome: Outcome, title: str, request: str | None, step: int | None) -> None:
        self.story = story
        self.outcome = outcome
        self.title = title
        self.judged: Judged | None = outcome.findings[0] if outcome.findings else None
        self.finding = self.judged.finding if self.judged is not None else None
        self.predicted = _tables_by_step(outcome.predicted) if outcome.predicted is not outcome.observed else {}
        self.step = self._focus(request, step)
        self.requests = [request] if request is not None else self._concerned()

    # -- where to look -------------------------------------------------------------------------------------------------

    def _focus(self, request: str | None, step: int | None) -> int:
        if step is not None:
            return step
        if self.finding is not None and self.finding.step is not None and request in (None, self.finding.request):
            return max((n for n in self.story.steps if n <= (self.finding.step or 0)), default=0)
        if request is not None:
            admission = self.story.admission(request, self.story.last_step)
            return admission.number if admission is not None else self.story.last_step
        granted = [n for n, step in self.story.steps.items() if step.record is not None and step.record.hits]
        return granted[-1] if granted else self.story.last_step

    def _concerned(self) -> list[str]:
        """The finding's request, and the others that it is about; without one those that hold the blocks it names."""
        finding = self.finding
        if finding is None:
            record = self.story.steps[self.step].record
            granted = list(record.hits) if record is not None else []
            return (granted or list(self.story.steps[self.step].tables))[:MOST_REQUESTS]
        found = [finding.request] if finding.request in self.story.requests else []
        if finding.kind in ("content", "allocation", "pool") or not found:
            found += self._holders_of(finding.observed)
        if not found:
            found = list(self.story.steps[self.step].tables) or self.story.requests
        return list(dict.fromkeys(name for name in found if name is not None))[:MOST_REQUESTS]

    def _holders_of(self, observed: object) -> list[str]:
        """Requests with blocks that a finding names."""
        blocks = observed if isinstance(observed, list) else [observed]
        named = [block for block in blocks if isinstance(block, int) and not isinstance(block, bool) and block != NULL]
        return [holder.request for block in named for holder in self.story.holders(block, self.step)]

    # -- all of it -----------------------------------------------------------------------------------------------------

    def explanation(self) -> Explanation:
        tables = [table for request in self.requests for table in self._tables(request)]
        issue = self.judged.issue if self.judged is not None else None
        return Explanation(
            title=self.title,
            headline=self._headline(tables),
            story=self.story,
            finding=self.finding,
            known_issue=(issue.id, issue.reason) if issue is not None else None,
            others=[judged.finding for judged in self.outcome.findings[1:]],
            step=self.step,
            requests=self.requests,
            decided_by=self._decided_by(),
            timeline=[self._moment(step) for step in self.story.steps.values() if step.record is not None or step.notes],
            tables=tables,
            lookups=self._lookups(),
            notes=[*self.outcome.notes, *self._end_notes(), *self._hints()],
        )

    def _decided_by(self) -> list[tuple[str, str, str]]:
        if self.finding is None:
            kinds = dict.fromkeys(group.kind for group in self.story.groups)
            rules: list[Rule] = [rule for kind in kinds if (rule := rule_of_kind(kind)) is not None]
            return [(f"rule {rule.section}", rule.sentence, rule.place) for rule in rules]
        laws = [(f"law {self.finding.law}", words, "") for words in law_words(self.finding)]
        return laws + [(f"rule {rule.section}", rule.sentence, rule.place) for rule in deciding(self.finding)]

    def _end_notes(self) -> list[str]:
        end = self.story.end
        return [f"ended by {end.type}: {end.message}"] if end is not None else []

    def _hints(self) -> list[str]:
        others = [name for name in self.story.requests if name not in self.requests]
        if self.finding is not None or not others:
            return []
        return [f"--request and --step look elsewhere; there is also {names(others, MOST_LISTED)}"]

    def _lookups(self) -> list[Lookup]:
        found = []
        for request in self.requests:
            admission = self.story.admission(request, self.step)
            for lookup in admission.lookups if admission is not None else ():
                if lookup.request == request:
                    found.append(lookup)
        return found

    # -- headline ------------------------------------------------------------------------------------------------------

    def _headline(self, tables: Sequence[TableView]) -> str:
        finding = self.finding
        if finding is None:
            return self._all_well()
        if finding.kind == "selection" and finding.group is not None:
            for table in tables:
                if (table.request, table.group) == (finding.request, finding.group) and table.step == finding.step:
                    words = _selection_words(self.story, table)
                    if words:
                        where = place(finding.request, finding.group, finding.group_kind)
                        return f"Step {finding.step}, {where}the connector {words}."
        return finding.message[:1].upper() + finding.message[1:] + "."

    def _all_well(self) -> str:
        steps = count(self.story.last_step, "step")
        if self.story.end is not None:
            return f"{self.story.end.type}, as the rules of vLLM {self.story.release} foresee, after {steps}."
        if self.outcome.predicted is self.outcome.observed:
            return f"Predicted by the model for vLLM {self.story.release}: {steps}; nothing was run beside it."
        judged = "the model and vLLM agree" if self.outcome.predicted is not None else "the model was not asked"
        return f"Nothing is wrong in {steps}: {judged}, and no law is broken."

    # -- timeline ------------------------------------------------------------------------------------------------------

    def _moment(self, step: Step) -> Moment:
        return Moment(step.number, "; ".join(self._parts(step)) or NOTHING, step.number == self.step)

    def _parts(self, step: Step) -> list[str]:
        record = step.record
        parts: list[str] = []
        if record is not None:
            parts += [f"{request} preempted" for request in record.preempted]
            parts += _running_words(record)
            parts += [_admission_words(record, request) for request in record.hits]
        if step.finished:
            parts.append(f"{names(step.finished)} finished")
        return parts + step.notes

    # -- tables --------------------------------------------------------------------------------------------------------

    def _tables(self, request: str) -> list[TableView]:
        known = [step for number, step in self.story.steps.items() if number <= self.step and request in step.tables]
        step = known[-1] if known else None
        if self.finding is None and step is not None:
            step = self.story.admission(request, step.number) or step
        if step is None or request not in step.tables:
            return []
        predicted = self.predicted.get(step.number, {}).get(request) if step.number == self.step else None
        return [
            table_view(self.story, step, request, group, predicted[group] if predicted is not None else None)
            for group in range(len(self.story.groups))
        ]


def law_words(finding: Finding) -> list[str]:
    """What the law of a finding says. Where one number has several sentences, the one about findings of this kind: drawn
    values have a law of their own, and so have answers to the scheduler."""
    sentences = [law.sentence for law in LAWS if law.number == finding.law]
    if len(sentences) < 2:
        return sentences
    words = _LAW_WORDS.get(finding.cause) or _LAW_WORDS.get(finding.kind, finding.kind)
    return [sentence for sentence in sentences if words in sentence] or sentences


# A piece of the sentence that findings of a kind, or of a cause, are about.
_LAW_WORDS = {
    "selection": "are selected",
    "fill": "every byte",
    "wrong_distribution": "drawn at random",
    "hit": "question of the scheduler",
}


def _tables_by_step(history: History | None) -> dict[int, Tables]:
    return {record.step: state.tables or {} for record, state in resolve(history or ()) if isinstance(record, Scheduled)}


def _running_words(record: Scheduled) -> list[str]:
    """`A and B compute 1`, for the requests that go on."""
    by_count: dict[int, list[str]] = {}
    for request, num_tokens in record.scheduled.items():
        if request not in record.hits:
            by_count.setdefault(num_tokens, []).append(request)
    return [f"{names(who)} compute{'s' if len(who) == 1 else ''} {n}" for n, who in by_count.items()]


def _admission_words(record: Scheduled, request: str) -> str:
    """`B admitted: 1616 hit + 4 external, 1 computed`."""
    verb = "resumed" if request in record.resumed else "admitted" if request in record.admitted else "starts loading"
    parts = [f"{record.hits[request]} hit"]
    if record.external.get(request):
        parts.append(f"{record.external[request]} external")
    num_tokens = record.scheduled.get(request, 0)
    return f"{request} {verb}: {' + '.join(parts)}" + (f", {num_tokens} computed" if num_tokens else "")


def _selection_words(story: Story, table: TableView) -> str:
    """`overwrote block 1 (position 0), which ...; block 103 (position 101), meant for ..., stayed empty`."""
    parts = []
    wrong = [row for row in table.rows if row.is_wrong and not row.marks.expected]
    empty = [row for row in table.rows if row.is_wrong and row.marks.expected]
    if wrong:
        parts.append(_wrong_words(story, table, wrong))
    if empty:
        parts.append(_empty_words(story, table, empty, has_subject=bool(wrong)))
    return "; ".join(parts)


def _wrong_words(story: Story, table: TableView, wrong: Sequence[Row]) -> str:
    first = wrong[0]
    verb = "selected" if first.marks.written is not True else "overwrote"
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    if first.block == NULL:
        return f"selected the null block ({_positions(wrong)})"
    if first.position is None:
        return f"{verb} block {first.block}{more}, which is not in this table: {first.origin}"
    holders = dict.fromkeys(holder.request for holder in story.holders(first.block or 0, table.step))
    shared = f"{names(list(holders))} share and which " if len(holders) > 1 else ""
    whose = story.owner(first.block or 0, table.step)
    size = table.block_size
    held = token_range(first.position * size, (first.position + 1) * size)
    return f"{verb} block {first.block} (position {first.position}){more}, which {shared}holds {held} of {whose}"


def _empty_words(story: Story, table: TableView, empty: Sequence[Row], has_subject: bool) -> str:
    step = story.steps[table.step].record
    assert step is not None
    num_local, num_external = step.hits.get(table.request, 0), step.external.get(table.request, 0)
    block_ids = ", ".join(ranges(row.block or 0 for row in empty))
    blocks = f"block{'s' if len(empty) > 1 else ''} {block_ids} ({_positions(empty)})"
    meant = f"meant for external {token_range(num_local, num_local + num_external)}"
    verdict = empty[0].verdict
    if has_subject and verdict != "wrong value":
        return f"{blocks}, {meant}, {verdict}"
    verb = {
        "wrong value": "wrote a wrong value into",
        "stayed empty": "did not fill",
        "not selected": "did not select",
        "not received": "did not pass on",
    }[verdict]
    return f"{verb} {blocks}, {meant}"


def _positions(rows: Sequence[Row]) -> str:
    positions = [row.position for row in rows if row.position is not None]
    return f"position{'s' if len(positions) > 1 else ''} {', '.join(ranges(positions))}"

"""A history before the laws: what the checks share, and how a law is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from oracle.content import Content, Replay, Stay
from oracle.contracts import Contract, keeps_content, restores_windows
from oracle.findings import Finding, Kind, place
from sim.history import Acted, Record, Scheduled, Selections, Start, Updated
from sim.releases import Rules
from sim.scenario import LoadFailed, Scenario
from sim.startup import smallest_pool

if TYPE_CHECKING:
    from oracle.laws.answers import Dialogue

STATES = (Start, Scheduled, Updated, Acted)
"""Records with state fields."""

MAX_FINDINGS = 50


class End(NamedTuple):
    """Stands for the end of a history; `last` is its last record."""

    last: Record


class Pending(NamedTuple):
    """A store that is not over yet: block, place, and what the block held when the store was sent."""

    job: int
    request: str
    group: int
    block: int
    place: str
    content: Content


class Kept:
    """What is outside, by place, the stores that are under way, and what every block held before the record at hand."""

    def __init__(self, num_blocks: int, stores_parts: bool) -> None:
        self.stores_parts = stores_parts
        self.before: list[Content | None] = [None] * num_blocks
        self.contents: dict[str, Content | None] = {}
        self.pending: list[Pending] = []


class Trial:
    """One history before the laws. replay: what the records show so far.

    rows_per_block: kernel blocks in a manager block, by group. layers: names by group. last_sent: the metadata sent last,
    by request. dialogue: the contract's answers so far. drawn: by group, and state tensor if it is
    one, (elements, mean, deviation) of each random fill.
    states: how often a state came back since a token was gained. loads: how often a request was granted a load since it was
    scheduled last; failing: those whose loads the scenario lets fail. wrong_keys: (group, block) of keys that should not be
    linked to it -> why, and who wrote the block; who hits what that one wrote shows the same fault. kept: what
    the connector keeps outside, if any.
    """

    def __init__(self, scenario: Scenario, rules: Rules, contract: Contract | None) -> None:
        self.scenario = scenario
        self.rules = rules
        self.contract = contract
        self.replay = Replay(scenario, rules, restores_windows(contract))
        self.findings: list[Finding] = []
        self.rows_per_block = [group.block // (group.kernel_block or group.block) for group in scenario.groups]
        self.layers: list[list[str]] = [[] for _ in scenario.groups]
        self.last_sent: Selections = {}
        self.dialogue: Dialogue | None = None
        self.drawn: dict[tuple[int, int | None], list[tuple[int, float, float]]] = {}
        self.states: dict[object, int] = {}
        self.loads: dict[str, int] = {}
        self.failing = {step.id for step in scenario.steps if isinstance(step, LoadFailed)}
        self.wrong_keys: dict[tuple[int, int], tuple[str, Stay | None]] = {}
        self.kept: Kept | None = None
        if keeps_content(contract):
            self.kept = Kept(scenario.engine.blocks, contract.stores_parts)
        self._reported: set[object] = set()

    def report(
        self,
        kind: Kind,
        law: int,
        cause: str,
        message: str,
        *,
        request: str | None = None,
        group: int | None = None,
        positions: Sequence[int] = (),
        expected: Any = None,
        observed: Any = None,
    ) -> None:
        """Notes a finding; a request shows each fault of a group once."""
        if (kind, law, cause, request, group) in self._reported or len(self.findings) >= MAX_FINDINGS:
            return
        self._reported.add((kind, law, cause, request, group))
        group_kind = self.scenario.groups[group].kind if group is not None else None
        step = self.replay.step
        self.findings.append(
            Finding(
                kind=kind,
                law=law,
                cause=cause,
                step=step,
                request=request,
                group=group,
                group_kind=group_kind,
                positions=list(positions),
                expected=expected,
                observed=observed,
                message=f"step {step}: {place(request, group, group_kind)}{message}",
            )
        )

    def promises_progress(self) -> bool:
        """Whether the pool is one that vLLM's start-up check accepts."""
        return self.scenario.engine.blocks >= smallest_pool(self.scenario, self.rules)


Check = Callable[[Trial, Any], None]


class Law(NamedTuple):
    """A law: its check is called with every record of the types in `looks_at`, after the replay has taken it in; End is
    one of them. judges_direct: it also holds of hand-made block tables."""

    number: int
    sentence: str
    looks_at: tuple[type, ...]
    judges_direct: bool
    check: Check


LAWS: list[Law] = []
"""All laws, in the order in which they look at a record. One number may have two entries with a sentence each."""


def law(
    number: int, sentence: str, looks_at: tuple[type, ...], judges_direct: bool = False
) -> Callable[[Callable[[Trial, Any], None]], Check]:
    """Enters a check into LAWS."""

    def enter(check: Check) -> Check:
        LAWS.append(Law(number, sentence, looks_at, judges_direct, check))
        return check

    return enter

"""What a campaign exercised: behaviours counted from scenarios and histories, alone and by kinds of groups.

What stays at zero is a part of vLLM that the campaign has not tested. Counting reads nothing but scenario and history, and
a campaign holds every observed history against the predicted one, so a predicted history counts as much as an observed one
wherever the two do not part (the behaviours that only a worker can show aside).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diff_tests.behaviours import KINDS, TABLE, Behaviour, Moment, kind_exists
from diff_tests.walk import Walk, kind_of
from sim.geometry import is_prefix_cacheable
from sim.history import Acted, Failure, History, Refusal, Scheduled, Updated
from sim.refusals import refusal
from sim.releases import Rules
from sim.scenario import (
    MLA,
    RSWA,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Engine,
    Full,
    Mamba,
    Scenario,
    SlidingWindow,
    SlidingWindowMLA,
)

KindSet = tuple[str, ...]
"""One kind, or two in the order of KINDS."""


Condition = tuple[str | None, Callable[[Scenario], bool] | None]
"""A kind that a case must have, and what else must hold of its scenario."""

Detectors = dict[Moment, list[tuple[str, Callable[..., int]]]]
"""What to ask at each moment: a behaviour's name, and how many times it shows."""


@dataclass
class KindCount:
    """What the cases of one set of kinds showed. hits: admissions with local tokens; refused: steps in which somebody
    waited for blocks."""

    cases: int = 0
    hits: int = 0
    refused: int = 0
    preemptions: int = 0

    def add(self, other: KindCount) -> None:
        """Adds another's numbers."""
        self.cases += other.cases
        self.hits += other.hits
        self.refused += other.refused
        self.preemptions += other.preemptions


class Coverage:
    """Counts over many cases of one release. counts: by behaviour, those that the release does not have left out; kinds:
    by the kinds of a case's groups; refusals: refused configurations by reason."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.behaviours = [behaviour for behaviour in TABLE.values() if behaviour.exists(rules)]
        self.counts: Counter[str] = Counter({behaviour.name: 0 for behaviour in self.behaviours})
        self.kinds: dict[KindSet, KindCount] = defaultdict(KindCount)
        self.refusals: Counter[str] = Counter()
        self._by_condition = _by_condition(self.behaviours)
        self._seen: set[str] = set()  # what the case at hand has shown

    def add(self, scenario: Scenario, history: History) -> None:
        """Counts what one case showed. history: empty where nobody ran it, then its settings count alone."""
        if history and isinstance(history[0], Refusal):
            foreseen = refusal(scenario, self.rules)
            self.refusals[foreseen.message if foreseen is not None else "not foreseen"] += 1
            return
        detectors = self._detectors(scenario)
        self._seen = set()
        self._count(detectors["scenario"], scenario)
        if scenario.driver == "direct":
            self.counts["fills judged"] += sum(len(r.written or ()) for r in history if isinstance(r, Scheduled))
            return
        self._walk(Walk(scenario, self.rules), history, detectors)

    def numbers(self) -> NDArray[np.int64]:
        """The counts in the order of `behaviours`."""
        return np.fromiter((self.counts[behaviour.name] for behaviour in self.behaviours), np.int64, len(self.behaviours))

    def merge(self, other: Coverage) -> None:
        """Adds what was counted elsewhere for the same release."""
        self.counts.update(other.counts)
        self.refusals.update(other.refusals)
        for kinds, count in other.kinds.items():
            self.kinds[kinds].add(count)

    def plain(self) -> dict[str, Any]:
        """The counts as plain data."""
        kinds = [[list(kinds), asdict(count)] for kinds, count in sorted(self.kinds.items())]
        return {"counts": dict(self.counts), "kinds": kinds, "refusals": dict(self.refusals)}

    def restore(self, plain: dict[str, Any]) -> None:
        """Adds what `plain` gave."""
        self.counts.update(plain["counts"])
        self.refusals.update(plain["refusals"])
        for kinds, numbers in plain["kinds"]:
            self.kinds[tuple(kinds)].add(KindCount(**numbers))

    @property
    def at_zero(self) -> list[str]:
        """What was promised and never seen."""
        return [behaviour.name for behaviour in self.behaviours if behaviour.promised and not self.counts[behaviour.name]]

    @property
    def kinds_at_zero(self) -> list[str]:
        """What some kind alone, or some pair, was to show and never did: `rswa + circular: preemptions`."""
        missing = []
        for kinds in accepted_kind_sets(self.rules):
            count = self.kinds[kinds]
            columns = [name for name in ("cases", "refused", "preemptions") if not getattr(count, name)]
            if can_hit(kinds) and not count.hits:
                columns.append("hits")
            missing += [f"{' + '.join(kinds)}: {column}" for column in columns]
        return missing

    def kinds_document(self) -> list[dict[str, object]]:
        """The counts of every kind alone and every pair that the release accepts, as plain data."""
        return [{"kinds": kinds, **asdict(self.kinds[kinds])} for kinds in accepted_kind_sets(self.rules)]

    # -- counting ------------------------------------------------------------------------------------------------------

    def _detectors(self, scenario: Scenario) -> Detectors:
        chosen: Detectors = defaultdict(list)
        kinds = {kind_of(group) for group in scenario.groups}
        for (kind, possible), by_moment in self._by_condition.items():
            if (kind is None or kind in kinds) and (possible is None or possible(scenario)):
                for moment, detectors in by_moment.items():
                    chosen[moment] += detectors
        return chosen

    def _walk(self, walk: Walk, history: History, detectors: Detectors) -> None:
        groups = walk.scenario.groups
        count = self.kinds[kind_set(groups)]
        count.cases += 1
        for record in walk.follow(history):
            if isinstance(record, Scheduled):
                self._count_scheduled(walk, record, detectors, count)
            elif isinstance(record, Updated):
                self._count(detectors["update"], walk, record)
                if walk.free is not walk.free_before:
                    self._count(detectors["free"], walk, record)
            elif isinstance(record, Acted):
                self._count(detectors["action"], walk, record)
            elif isinstance(record, Failure):
                self._count(detectors["failure"], walk, record)
        walk.seen = self._seen
        self._count(detectors["end"], walk)

    def _count_scheduled(self, walk: Walk, record: Scheduled, detectors: Detectors, count: KindCount) -> None:
        """Most steps are plain decode steps: what they cannot show is not asked of them."""
        self._count(detectors["schedule"], walk, record)
        for life in walk.admissions:
            self._count(detectors["admission"], walk, life, record)
            count.hits += life.local > 0
        if walk.tables is not walk.tables_before:
            self._count(detectors["allocation"], walk, record)
        if walk.keys is not walk.keys_before:
            self._count(detectors["keys"], walk, record)
        if walk.computes_prompt:
            self._count(detectors["prefill"], walk, record)
        if record.copies:
            self._count(detectors["copy"], walk, record)
        if record.preempted:
            self._count(detectors["preemption"], walk, record)
            count.preemptions += len(record.preempted)
        if walk.somebody_waits:
            self._count(detectors["wait"], walk, record)
            count.refused += walk.is_refused

    def _count(self, detectors: Sequence[tuple[str, Callable[..., int]]], *what: object) -> None:
        for name, detect in detectors:
            number = detect(*what)
            if number:
                self.counts[name] += number
                self._seen.add(name)


def _by_condition(behaviours: Sequence[Behaviour]) -> dict[Condition, Detectors]:
    """Detectors by the condition on scenarios that their behaviours share: each condition is asked once a case."""
    grouped: dict[Condition, Detectors] = {}
    for behaviour in behaviours:
        by_moment = grouped.setdefault((behaviour.kind, behaviour.possible), {})
        by_moment.setdefault(behaviour.moment, []).append((behaviour.name, behaviour.detect))
    return grouped


# ----------------------------------------------------------------------------------------------------------------- kinds


def kind_set(groups: Sequence[AnyGroup]) -> KindSet:
    """The kinds of some groups, each once."""
    kinds = {kind_of(group) for group in groups}
    return tuple(kind for kind in KINDS if kind in kinds)


def kind_sets(rules: Rules) -> list[KindSet]:
    """Every kind alone and every pair of kinds that a release knows. An engine has one mode of Mamba's."""
    kinds = [kind for kind in KINDS if kind_exists(kind)(rules)]
    pairs = [pair for pair in combinations(kinds, 2) if sum(kind.startswith("mamba") for kind in pair) < 2]
    return [*((kind,) for kind in kinds), *pairs]


def sample_groups(kinds: KindSet, block: int = 4) -> tuple[AnyGroup, ...]:
    """One small group of each kind."""
    return tuple(_SAMPLES[kind](block) for kind in kinds)


_SAMPLES: dict[str, Callable[[int], AnyGroup]] = {
    "full": lambda block: Full(block=block),
    "mla": lambda block: MLA(block=block),
    "rswa": lambda block: RSWA(block=block, window=block),
    "sliding_window": lambda block: SlidingWindow(block=block, window=block + 1),
    "sliding_window_mla": lambda block: SlidingWindowMLA(block=block, window=block + 1),
    "sliding_window_mla replayed": lambda block: SlidingWindowMLA(block=block, window=block + 1, bounded_replay=True),
    "chunked_local": lambda block: ChunkedLocal(block=block, chunk=2 * block),
    "mamba none": lambda block: Mamba(block=block, mode="none"),
    "mamba align": lambda block: Mamba(block=block, mode="align"),
    "mamba all": lambda block: Mamba(block=block, mode="all"),
    "circular": lambda block: Circular(block=block),
}


def can_cache(kinds: KindSet) -> bool:
    """Whether prefix caching can be on: a state that is kept nowhere rules it out."""
    return "mamba none" not in kinds


def can_hit(kinds: KindSet) -> bool:
    """Whether a local hit is possible."""
    return can_cache(kinds) and any(is_prefix_cacheable(group) for group in sample_groups(kinds))


def refusal_of_kinds(kinds: KindSet, rules: Rules) -> Refusal | None:
    """What a release answers to groups of these kinds in their plainest setting."""
    engine = Engine(blocks=100, prefix_caching=can_cache(kinds), max_model_len=64)
    return refusal(Scenario(engine=engine, groups=sample_groups(kinds), steps=()), rules)


def accepted_kind_sets(rules: Rules) -> list[KindSet]:
    """The kinds alone and in pairs that a release accepts."""
    return [kinds for kinds in kind_sets(rules) if refusal_of_kinds(kinds, rules) is None]

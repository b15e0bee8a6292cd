"""The connectors within a MultiConnector: each is asked, granted tokens and told to load on its own, and judged so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from diff_tests.live.workers import Worker
from oracle.contracts import Contract
from sim.history import History, Scheduled, Selections, Start

if TYPE_CHECKING:
    from diff_tests.live.rebuild import Rebuilt

Asked = list[tuple[str, int, int | None]]


@dataclass
class Part:
    """A child's part of a step; see Scheduled. external: what it was granted, 0 where another child loads."""

    asked: Asked
    external: dict[str, int]
    selected: Selections | None = None


@dataclass
class Child:
    """A connector within a MultiConnector. parts: by step. workers: by rank, and what each was told, by step."""

    c: int
    name: str
    contract: Contract | None
    asked: Asked = field(default_factory=list)
    external: dict[str, int] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    workers: list[tuple[Worker, dict[int, Selections | None]]] = field(default_factory=list)

    def schedule(self, step: int, admissions: dict[str, int]) -> None:
        """A step was scheduled; what came before belongs to it."""
        self.parts[step] = Part(self.asked, {**admissions, **self.external})
        self.asked, self.external = [], {}


def histories(rebuilt: Rebuilt, child: Child) -> Iterator[tuple[int | None, History]]:
    """(rank, the run as if there were only this child) for each worker; without any, once for the scheduler alone."""
    # Where a child may load later, as its contract would say, memory changes under the others' eyes.
    sees_outside = all(other.contract is not None for other in rebuilt.children)
    for worker, received in child.workers:
        yield worker.rank, [_of_child(record, child, worker, received, sees_outside) for record in rebuilt.history]
    if not child.workers:
        yield None, [_of_child(record, child, None, {}, sees_outside) for record in rebuilt.history]


def _of_child(
    record: Any, child: Child, worker: Worker | None, received: dict[int, Selections | None], sees_outside: bool
) -> Any:
    if isinstance(record, Start) and worker is not None:
        groups = [replace(group, layers=sorted(worker.looked_at & set(group.layers))) for group in record.groups]
        return replace(record, connector=child.name, groups=groups)
    if not isinstance(record, Scheduled):
        return record
    part = child.parts[record.step]
    return replace(
        record,
        asked=part.asked,
        external=part.external,
        selected=part.selected,
        received=received.get(record.step),
        acts=worker.acts.get(record.step) if worker is not None else None,
        written=worker.written(record.step, child.contract, sees_outside) if worker is not None else None,
    )

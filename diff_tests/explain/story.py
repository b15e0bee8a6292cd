"""The story of a history: what became of every block, where the entries of every block table came from, what each step
did, and why each lookup ended where it did.

Pure analysis. It works on any history, predicted or observed; what a source cannot see is left out. Blocks are followed
with the same replay as the laws use, so that both speak of the same content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from diff_tests.explain.blocks import BlockLives, Cell, Event, Origin, Place
from diff_tests.explain.lookups import Lookup, Lookups
from diff_tests.explain.words import count, names
from oracle.content import Replay
from oracle.contracts import Contract, restores_windows
from sim.history import Acted, Failure, History, Record, Refusal, Scheduled, Start, State, Tables, Updated, resolve
from sim.releases import Rules
from sim.scenario import Scenario


@dataclass
class Step:
    """One engine step, and what was done after it and before the next. Step 0 is the time before the first.

    tables: after scheduling. computed: by request, leading tokens that are there once the step has run. lookups: of its
    admissions, in order. notes: what happened outside scheduling. num_free: blocks in the free queue after scheduling;
    None where the source does not see it.
    """

    number: int
    record: Scheduled | None = None
    tables: Tables = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)
    lookups: list[Lookup] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    new_tokens: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    num_free: int | None = None


class Story:
    """What a history tells. end: the exception or refusal that it ends with, if any."""

    def __init__(self, scenario: Scenario, history: History, rules: Rules, contract: Contract | None) -> None:
        self.scenario = scenario
        self.rules = rules
        self.contract = contract
        self.replay = Replay(scenario, rules, restores_windows(contract))
        self.groups = self.replay.groups
        self.num_blocks = scenario.engine.blocks
        self.source = "trace"
        self.release = rules.release
        self.sees: tuple[str, ...] = ()
        self.end: Failure | Refusal | None = None
        self.steps: dict[int, Step] = {0: Step(0)}
        self._lookups = Lookups(scenario, rules)
        self._blocks = BlockLives(self.replay, self._lookups, scenario.driver == "direct")
        for record, state in resolve(history):
            self._tell(record, state)
        self._blocks.colour(self.last_step + 1)

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The number of the last step; 0 where there was none."""
        return max(self.steps)

    @property
    def requests(self) -> list[str]:
        """IDs of all requests that were ever admitted or held blocks, in order."""
        seen: dict[str, None] = {}
        for step in self.steps.values():
            seen.update(dict.fromkeys(step.record.hits if step.record is not None else ()))
            seen.update(dict.fromkeys(step.tables))
        return list(seen)

    def life(self, block: int) -> list[Event]:
        """What happened to a block, in order."""
        return self._blocks.lives[block]

    def cells(self, block: int) -> list[Cell]:
        """The states of a block after scheduling, each from its step on; the last step + 1 stands for the end."""
        return self._blocks.cells[block]

    def origin(self, place: Place, step: int) -> Origin | None:
        """Where the block that stood at a place after this step came from; None where nothing is known."""
        return self._blocks.origin(place, step)

    def admission(self, request: str, up_to: int) -> Step | None:
        """The last step, no later than `up_to`, in which the request was granted tokens and blocks."""
        for number in range(up_to, 0, -1):
            step = self.steps.get(number)
            if step is not None and step.record is not None and request in step.record.hits:
                return step
        return None

    def holders(self, block: int, step: int) -> list[Place]:
        """The table entries that name the block after scheduling in this step."""
        return [
            Place(request, group, position)
            for request, tables in self.steps[step].tables.items()
            for group, table in enumerate(tables)
            for position, held in enumerate(table)
            if held == block
        ]

    def owner(self, block: int, step: int) -> str | None:
        """Whose tokens the block holds after scheduling in this step, or held last."""
        found = None
        for cell in self.cells(block):
            if cell.step <= step:
                found = cell.owner
        return found

    # -- one record ----------------------------------------------------------------------------------------------------

    def _tell(self, record: Record, state: State) -> None:
        if isinstance(record, (Failure, Refusal)):
            self.end = record
            return
        if isinstance(record, Start):
            self.source, self.sees = record.source, record.sees
        if isinstance(record, Scheduled):
            self._begin_step(record, state)
        self.replay.advance(record)
        self._blocks.take(record, state)
        if isinstance(record, Scheduled):
            self.steps[record.step].computed = {name: stay.num_computed for name, stay in self.replay.stays.items()}
        elif isinstance(record, Updated):
            self._take_output(record)
        elif isinstance(record, Acted):
            self._take_action(record)

    def _begin_step(self, record: Scheduled, state: State) -> None:
        num_free = len(state.free) if state.free is not None else None
        step = Step(record.step, record, state.tables or {}, num_free=num_free)
        self.steps[record.step] = step
        if record.hits and "keys" in self.sees and self.scenario.driver == "scheduler":
            step.lookups = list(self._looked_up(record, state))

    def _looked_up(self, record: Scheduled, state: State) -> Iterator[Lookup]:
        """The lookups of a step's admissions, over the keys as they were then: those before the step, less what was taken
        and with what was registered for requests that the same call had scheduled before."""
        gone, come = self._blocks.key_changes(state.keys or [])
        for request, hit in record.hits.items():
            if request in self._blocks.tables:
                continue  # it held the blocks of its load already
            earlier = _scheduled_before(record, request)
            tables = state.tables or {}
            theirs = {block for name in earlier for table in tables.get(name, ()) for block in table}
            others = {block for name in tables if name not in earlier for table in tables[name] for block in table}
            # A state that a request goes on from is copied, and its key moves to the copy, which stands in no table.
            theirs |= {target for source, target in record.copies if source in theirs and target not in others}
            links = set(self._blocks.links)
            links.difference_update(link for link in gone if link.block in theirs)
            links.update(link for link in come if link.block in theirs)
            lookup = self._lookups.explain(request, record.step, links, hit)
            if lookup is not None:
                yield lookup

    def _take_output(self, record: Updated) -> None:
        step = self.steps.get(record.step) or self.steps[self.last_step]
        step.finished += record.finished
        if record.arrived:
            step.notes.append(f"the load of {names(record.arrived)} arrived")
        if record.lost:
            step.notes.append(f"{count(len(record.lost), 'block')} reported as not loaded")
        step.new_tokens = record.new_tokens
        self._lookups.add_outputs(record.new_tokens)
        for request in record.finished:
            self._lookups.end(request)

    def _take_action(self, record: Acted) -> None:
        if record.action == "run":
            if record.result != "idle":
                self.steps[self.last_step].notes.append(f"the run ended: {record.result}")
            return
        who = f" {record.request}" if record.request is not None else ""
        self.steps[self.last_step].notes.append(f"{record.action}{who}: {record.result}")
        if record.action == "abort" and record.result == "done" and record.request is not None:
            self._lookups.end(record.request)


def _scheduled_before(record: Scheduled, request: str) -> list[str]:
    """Who was given blocks before a request that the same call admitted: in the order of the schedule; loads, which are
    not in it, in the order in which they were granted."""
    order = list(record.scheduled)
    if request in order:
        return order[: order.index(request)]
    granted = list(record.hits)
    return [name for name in order if name not in record.hits] + granted[: granted.index(request)]

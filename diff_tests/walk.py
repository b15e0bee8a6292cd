"""Follows a history record by record, with what each request is doing: the state that behaviours are recognised in.

Everything is read from scenario and history, so the walk is the same for a predicted and for an observed history.
"""

from __future__ import annotations

from collections.abc import Iterator

from sim.geometry import effective_block_size, is_prefix_cacheable
from sim.history import Acted, Failure, History, Scheduled, Start, Table, Updated
from sim.releases import Rules
from sim.scenario import (
    Abort,
    Add,
    AnyGroup,
    AnyStep,
    Mamba,
    Pause,
    ResetPrefixCache,
    Run,
    Scenario,
    Schedule,
    SlidingWindowMLA,
    Span,
    Step,
)

Key = tuple[int, int, int]
"""(group, request index, tokens): see CachedKey."""


def kind_of(group: AnyGroup) -> str:
    """The kind of a group, told apart where one kind is allocated in several ways."""
    if isinstance(group, Mamba):
        return f"mamba {group.mode}"
    if isinstance(group, SlidingWindowMLA) and group.bounded_replay:
        return "sliding_window_mla replayed"
    return group.kind


class Life:
    """One life of a request. Counts in tokens.

    state: `waiting`, `loading`, `running` or `ended`. num_tokens: the prompt and the outputs seen; num_computed: those
    scheduled since its admission, less rejected drafts. local, external: of the last admission. num_unseen: steps with an
    output that is not processed yet. facts: what else happened to it.
    """

    __slots__ = (
        "add",
        "external",
        "facts",
        "id",
        "index",
        "local",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "num_tokens",
        "num_unseen",
        "state",
    )

    def __init__(self, add: Add, index: int) -> None:
        self.add = add
        self.id = add.id
        self.index = index
        self.num_prompt = self.num_tokens = add.num_prompt_tokens
        self.state = "waiting"
        self.num_computed = 0
        self.num_preemptions = 0
        self.num_unseen = 0
        self.local = 0
        self.external = 0
        self.facts: set[str] = set()

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is through and its last step gives it a token."""
        return "decoding" in self.facts


class Flight:
    """A step whose output is not processed yet. drafts: drafted tokens by request ID; samples: who gets a token."""

    __slots__ = ("drafts", "lives", "samples", "scheduled")

    def __init__(self, scheduled: dict[str, int]) -> None:
        self.scheduled = scheduled
        self.drafts: dict[str, int] = {}
        self.lives: dict[str, Life] = {}
        self.samples: list[Life] = []


class Walk:
    """One case. `before`-fields are the state before the record at hand, the others the state after it.

    groups: (group, kind, effective block size, whether it caches prefixes). keys: blocks by key. admissions: who was let
    in by this record. new_keys: those that the schedule before this one brought. landed: the step of an update. seen: the
    behaviours of this case so far. is_refused: somebody waits though sequences and tokens are left, nobody was preempted,
    and nothing is paused. computes_prompt: the step computes a part of a prompt.
    """

    def __init__(self, scenario: Scenario, rules: Rules) -> None:
        self.scenario = scenario
        self.engine = scenario.engine
        self.rules = rules
        self.groups = [
            (group, kind_of(group), effective_block_size(group, scenario.engine.dcp, rules), is_prefix_cacheable(group))
            for group in scenario.groups
        ]
        self.sizes = [size for _, _, size, _ in self.groups]
        self.num_spec = scenario.engine.speculative.tokens if scenario.engine.speculative else 0
        self.tables: dict[str, list[Table]] = {}
        self.tables_before = self.tables
        self.keys: dict[Key, list[int]] = {}
        self.keys_before = self.keys
        self.new_keys: set[Key] = set()
        self.free: list[int] = []
        self.free_before = self.free
        self.refs: list[int] = []
        self.refs_before = self.refs
        self.deferred: list[list[int]] = []
        self.deferred_before = self.deferred
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}
        self.running: list[Life] = []
        self.running_before = self.running
        self.admissions: list[Life] = []
        self.flights: dict[int, Flight] = {}
        self.landed: Flight | None = None
        self.somebody_waits = False
        self.is_refused = False
        self.computes_prompt = False
        self.seen: set[str] = set()
        self.paused = "none"
        self._steps = scenario.steps
        self._position = 0
        self._num_schedules = 0
        self._runs = False
        self._common: dict[tuple[int, int], int] = {}
        self._newest_keys: set[Key] = set()
        self._tracks_new_keys = any(kind == "mamba align" for _, kind, _, _ in self.groups)

    # -- the scenario beside the history -------------------------------------------------------------------------------

    def follow(self, history: History) -> Iterator[Start | Scheduled | Updated | Acted | Failure]:
        """Each record once the state around it stands."""
        for record in history:
            if isinstance(record, Scheduled):
                self._reach_schedule()
                self._take_state(record)
                self._schedule(record)
            elif isinstance(record, Updated):
                self._take_state(record)
                self._update(record)
            elif isinstance(record, Acted):
                self._reach_action(record.action)
                self._take_state(record)
            elif isinstance(record, Start):
                self._take_state(record)
            elif not isinstance(record, Failure):
                continue
            yield record
            if isinstance(record, Acted) and record.action == "abort" and record.result == "done":
                self._end(self.live[record.request or ""])

    def _reach_schedule(self) -> None:
        """Goes on to the step of the scenario that asks for this call of the scheduler."""
        while not self._num_schedules and not self._runs and self._position < len(self._steps):
            self._pass(self._next())
        if not self._runs:
            self._num_schedules -= 1

    def _reach_action(self, action: str) -> None:
        if action == "run" and self._runs:
            self._runs = False
            return
        wanted = {"run": Run, "abort": Abort, "reset_prefix_cache": ResetPrefixCache}[action]
        while self._position < len(self._steps):
            step = self._next()
            if isinstance(step, wanted):
                break
            self._pass(step)

    def _next(self) -> AnyStep:
        self._position += 1
        return self._steps[self._position - 1]

    def _pass(self, step: AnyStep) -> None:
        if isinstance(step, Add):
            life = Life(step, len(self.lives))
            self.lives.append(life)
            self.live[step.id] = life
        elif isinstance(step, (Step, Schedule)):
            self._num_schedules = step.count
        elif isinstance(step, Run):
            self._runs = True
        elif isinstance(step, Pause):
            self.paused = step.what

    def waiting(self) -> list[Life]:
        """Who waits, in the order of arrival."""
        return [life for life in self.lives if life.state == "waiting"]

    # -- state ---------------------------------------------------------------------------------------------------------

    def _take_state(self, record: Start | Scheduled | Updated | Acted) -> None:
        self.tables_before, self.keys_before, self.free_before = self.tables, self.keys, self.free
        self.refs_before, self.deferred_before = self.refs, self.deferred
        # Sources differ in what they repeat; a state that has not changed stays the same object.
        if record.tables is not None and record.tables != self.tables:
            self.tables = record.tables
        if record.free is not None and record.free != self.free:
            self.free = record.free
        if record.refs is not None:
            self.refs = record.refs
        if record.deferred is not None:
            self.deferred = record.deferred
        if record.keys is not None:
            keys = {(group, index, num_tokens): blocks for group, index, num_tokens, blocks in record.keys}
            if keys != self.keys:
                self.keys = keys

    @property
    def lost_keys(self) -> set[Key]:
        """Keys that the record at hand took away."""
        return self.keys_before.keys() - self.keys.keys() if self.keys is not self.keys_before else set()

    def _schedule(self, record: Scheduled) -> None:
        self.new_keys, self._newest_keys = self._newest_keys, set()
        if self._tracks_new_keys and self.keys is not self.keys_before:
            self._newest_keys = self.keys.keys() - self.keys_before.keys()
        self.running_before = self.running
        for request_id in record.preempted:
            self._preempt(self.live[request_id])
        self.admissions = []
        for request_id in record.external:
            life = self.live[request_id]
            life.local, life.external = record.hits.get(request_id, 0), record.external[request_id]
            life.num_computed = life.local + life.external
            if request_id not in record.scheduled:
                life.state = "loading"
                life.facts.add("loading")
        for request_id in (*record.admitted, *record.resumed):
            life = self.live[request_id]
            if life.state == "loading":  # its load has arrived, and nothing was looked up again
                life.local = life.external = 0
                life.facts.discard("loading")
                life.facts.add("loaded")
            self.admissions.append(life)
            self.running = [*self.running, life]
            life.state = "running"
        self._fly(record)
        self.somebody_waits = any(life.state == "waiting" for life in self.lives)
        self.is_refused = self.somebody_waits and self._is_refused(record)

    def _is_refused(self, record: Scheduled) -> bool:
        return (
            self.paused == "none"
            and not record.preempted
            and len(self.running) < self.engine.max_num_seqs
            and sum(record.scheduled.values()) < self.engine.max_num_batched_tokens
        )

    def _preempt(self, life: Life) -> None:
        self.running = [other for other in self.running if other is not life]
        life.state = "waiting"
        life.num_preemptions += 1
        life.facts.add("decoding at preemption" if life.is_decoding else "preempted in its prefill")
        if life.num_unseen:
            life.facts.add("preempted in flight")
        life.facts.discard("decoding")

    def _fly(self, record: Scheduled) -> None:
        flight = self.flights[record.step] = Flight(record.scheduled)
        self.computes_prompt = False
        for request_id, num_tokens in record.scheduled.items():
            life = flight.lives[request_id] = self.live[request_id]
            if "decoding" in life.facts:
                flight.drafts[request_id] = num_tokens - 1
                life.num_computed += num_tokens
                life.num_unseen += 1
                flight.samples.append(life)
                continue
            self.computes_prompt = True
            if self.num_spec and num_tokens == 1 + self.num_spec and life.num_computed + 1 == life.num_tokens:
                flight.drafts[request_id] = self.num_spec
                life.facts.add("padded")
            life.num_computed += num_tokens
            if life.num_computed >= life.num_tokens:
                life.facts.add("decoding")
                life.num_unseen += 1
                flight.samples.append(life)

    def _update(self, record: Updated) -> None:
        flight = self.landed = self.flights.pop(record.step, None)
        if flight is None:
            return
        for life in flight.samples:
            life.num_unseen -= 1
        for request_id, life in flight.lives.items():
            num_new = record.new_tokens.get(request_id, 0)
            life.num_tokens += num_new
            rejected = flight.drafts.get(request_id, 0) - max(num_new - 1, 0)
            if rejected > 0 and life.state == "running":
                life.num_computed -= rejected
        if record.lost:
            self._fall_back(set(record.lost))
        for request_id in record.finished:
            self._end(self.live[request_id])

    def _fall_back(self, lost: set[int]) -> None:
        """Who runs on blocks whose load failed computes from the first of them on."""
        for life in self.running:
            table, size = self.tables_before.get(life.id, [[]])[0], self.sizes[0]
            first = next((index for index, block in enumerate(table[: life.num_computed // size]) if block in lost), None)
            if first is not None:
                life.num_computed = first * size
                life.facts.discard("decoding")

    def _end(self, life: Life) -> None:
        if life.state == "waiting":
            life.facts.add("ended while waiting")
        life.state = "ended"
        self.running = [other for other in self.running if other is not life]

    # -- prefixes ------------------------------------------------------------------------------------------------------

    def key(self, group_index: int, life: Life, num_tokens: int) -> Key:
        """The key of a request's leading tokens in a group, as CachedKey names it."""
        for other in self.lives[: life.index]:
            if self._num_common(other, life) >= num_tokens and is_alike(other.add, life.add):
                return group_index, other.index, num_tokens
        return group_index, life.index, num_tokens

    def num_common(self, one: Life, other: Life) -> int:
        """Leading tokens that two requests have in common, outputs included."""
        first, second = sorted((one, other), key=lambda life: life.index)
        return self._num_common(first, second)

    def _num_common(self, one: Life, other: Life) -> int:
        pair = one.index, other.index
        if pair not in self._common:
            self._common[pair] = _common_prefix(_spans(one.add), _spans(other.add))
        return self._common[pair]


def is_alike(one: Add, other: Add) -> bool:
    """Whether equal tokens of two requests have equal keys."""
    return one.salt == other.salt and one.lora == other.lora


def _spans(add: Add) -> tuple[Span, ...]:
    """Prompt and output."""
    num_given = sum(span.count for span in add.output)
    return (*add.prompt, *add.output, Span(f"{add.id}.out", num_given, add.max_tokens))


def _common_prefix(one: tuple[Span, ...], other: tuple[Span, ...]) -> int:
    """The number of leading tokens that are equal."""
    num_common = 0
    left, right = list(reversed(one)), list(reversed(other))
    while left and right:
        a, b = left.pop(), right.pop()
        if a[:2] != b[:2]:
            break
        count = min(a[2], b[2])
        num_common += count
        for stack, span in ((left, a), (right, b)):
            if span[2] > count:
                stack.append(Span(span[0], span[1] + count, span[2] - count))
    return num_common

"""The first place where two histories part: what the model predicted and what was observed.

Fields that one side does not see are skipped. State fields left out because nothing changed are compared by the value
they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from oracle.findings import Finding, Kind, place
from sim.history import STATE_FIELDS, Acted, CachedKey, Failure, History, Record, Refusal, Scheduled, Start, Updated

# Field -> (kind, cause) of a difference in it.
_SCHEDULED: dict[str, tuple[Kind, str]] = {
    "step": ("schedule", "step"),
    "preempted": ("schedule", "preempted"),
    "hits": ("hit", "local_hit"),
    "asked": ("hit", "connector_answers"),
    "external": ("hit", "external_tokens"),
    "admitted": ("schedule", "admitted"),
    "resumed": ("schedule", "resumed"),
    "scheduled": ("schedule", "scheduled_tokens"),
}
_ACTED_UPON: dict[str, tuple[Kind, str]] = {
    "zeroed": ("allocation", "zeroed_blocks"),
    "copies": ("allocation", "copies"),
}
_UPDATED: dict[str, tuple[Kind, str]] = {
    "step": ("schedule", "step"),
    "new_tokens": ("schedule", "new_tokens"),
    "arrived": ("schedule", "arrived"),
    "lost": ("schedule", "lost_blocks"),
    "finished": ("schedule", "finished"),
    "events": ("event", "kv_events"),
}
_ACTED: dict[str, tuple[Kind, str]] = {
    "step": ("schedule", "step"),
    "action": ("schedule", "action"),
    "request": ("schedule", "action"),
    "result": ("schedule", "result"),
}
_FAILURE: dict[str, tuple[Kind, str]] = {
    "step": ("crash", "failure"),
    "phase": ("crash", "failure"),
    "type": ("crash", "failure"),
}
_STATE: dict[str, tuple[Kind, str]] = {
    "tables": ("allocation", "block_table"),
    "refs": ("pool", "reference_counts"),
    "free": ("pool", "free_queue"),
    "keys": ("pool", "cached_keys"),
    "deferred": ("pool", "deferred_frees"),
}
_WORDS = {
    "scheduled": "scheduled tokens",
    "hits": "local hits",
    "asked": "questions to the connector (request, local tokens, answer)",
    "external": "external tokens",
    "zeroed": "zeroed blocks",
    "copies": "copied blocks",
    "new_tokens": "new tokens",
    "arrived": "loads that arrived",
    "lost": "blocks whose load failed",
    "events": "KV events",
    "refs": "reference counts",
    "free": "free queue",
    "keys": "cached keys",
    "deferred": "deferred frees",
}


def compare(predicted: History, observed: History, sides: tuple[str, str] = ("the model", "vLLM")) -> Finding | None:
    """The first divergence of an observed history from the predicted one, or None. sides: what messages call the two.

    The model does not predict the worker: an exception there ends the comparison, and is left to the laws.
    """
    return _Comparison(predicted, observed, sides).first()


class _Comparison:
    """Walks both histories side by side, with the state fields of each as they stand."""

    def __init__(self, predicted: History, observed: History, sides: tuple[str, str]) -> None:
        self._predicted = predicted
        self._observed = observed
        self._sides = sides
        self._kinds: list[str] = []
        self._states: list[dict[str, Any]] = [{}, {}]
        self._fields: tuple[str, ...] = ()

    def first(self) -> Finding | None:
        for mine, theirs in zip(self._predicted, self._observed, strict=False):
            if isinstance(theirs, Failure) and theirs.phase in ("worker", "connector"):
                return None  # the laws judge that
            finding = self._compare(mine, theirs)
            if finding is not None:
                return finding
        if len(self._predicted) != len(self._observed):
            return self._lengths()
        return None

    def _compare(self, mine: Record, theirs: Record) -> Finding | None:
        if type(mine) is not type(theirs):
            return self._types(mine, theirs)
        if isinstance(mine, Scheduled):
            assert isinstance(theirs, Scheduled)
            return self._scheduled(mine, theirs)
        if isinstance(mine, Updated):
            assert isinstance(theirs, Updated)
            same = (
                mine.new_tokens == theirs.new_tokens
                and mine.finished == theirs.finished
                and mine.arrived == theirs.arrived
                and mine.lost == theirs.lost
                and mine.step == theirs.step
                and (mine.events == theirs.events or mine.events is None or theirs.events is None)
            )
            return (None if same else self._field(mine, theirs, _UPDATED)) or self._state(mine, theirs)
        if isinstance(mine, Acted):
            return self._field(mine, theirs, _ACTED) or self._state(mine, theirs)
        if isinstance(mine, Failure):
            return self._field(mine, theirs, _FAILURE)
        if isinstance(mine, Start):
            assert isinstance(theirs, Start)
            return self._start(mine, theirs)
        assert isinstance(mine, Refusal)
        return self._field(mine, theirs, {"type": ("crash", "refusal")})

    def _start(self, mine: Start, theirs: Start) -> Finding | None:
        """Geometry, then the initial state."""
        self._kinds = [group.kind for group in mine.groups]
        self._fields = tuple(field for field in STATE_FIELDS if field in mine.sees and field in theirs.sees)
        sizes = [
            (start.scheduler_block_size, start.hash_block_size, *(g.block_size for g in start.groups))
            for start in (mine, theirs)
        ]
        if theirs.groups and sizes[0] != sizes[1]:
            words = "block sizes in tokens (scheduler, hash, each group)"
            return self._difference("allocation", "geometry", 0, words, list(sizes[0]), list(sizes[1]))
        return self._state(mine, theirs)

    def _scheduled(self, mine: Scheduled, theirs: Scheduled) -> Finding | None:
        """Decisions first, then what follows from them. Token counts are compared in vLLM's order too."""
        same = (
            mine.scheduled == theirs.scheduled
            and list(mine.scheduled) == list(theirs.scheduled)
            and mine.hits == theirs.hits
            and mine.external == theirs.external
            and mine.admitted == theirs.admitted
            and mine.resumed == theirs.resumed
            and mine.preempted == theirs.preempted
            and mine.step == theirs.step
            and (mine.asked == theirs.asked or mine.asked is None or theirs.asked is None)
        )
        if not same:
            found = self._field(mine, theirs, _SCHEDULED)
            return found or self._difference(
                "schedule",
                "schedule_order",
                mine.step,
                "order of the scheduled requests",
                list(mine.scheduled),
                list(theirs.scheduled),
            )
        finding = self._state(mine, theirs)
        if finding is None and (mine.zeroed != theirs.zeroed or mine.copies != theirs.copies):
            return self._field(mine, theirs, _ACTED_UPON)
        return finding

    def _field(self, mine: Record, theirs: Record, fields: dict[str, tuple[Kind, str]]) -> Finding | None:
        """The first of these fields that differs."""
        for field, (kind, cause) in fields.items():
            ours, real = getattr(mine, field), getattr(theirs, field)
            if ours != real and ours is not None and real is not None:
                return self._difference(kind, cause, _step(mine), _WORDS.get(field, field), ours, real)
        return None

    def _state(self, mine: Any, theirs: Any) -> Finding | None:
        states = self._states
        for field in self._fields:
            ours, real = getattr(mine, field), getattr(theirs, field)
            if ours is None and real is None:
                continue
            ours = states[0].get(field) if ours is None else ours
            real = states[1].get(field) if real is None else real
            if ours != real:
                return self._state_difference(field, _step(mine), ours, real)
            states[0][field], states[1][field] = ours, real
        return None

    def _state_difference(self, field: str, step: int, ours: Any, real: Any) -> Finding:
        kind, cause = _STATE[field]
        if field == "tables":
            return self._table_difference(step, ours, real)
        if field == "keys":
            return self._key_difference(step, ours, real)
        index, mine, theirs = _first_difference(ours, real)
        where = {"refs": f"block {index}", "free": f"place {index} from the head", "deferred": f"entry {index}"}[field]
        message = f"step {step}: {_WORDS[field]}: {where}: {self._both(mine, theirs)}"
        if field == "free":
            message += f" ({len(ours)} free blocks in {self._sides[0]}, {len(real)} in {self._sides[1]})"
        shown = slice(index, index + 8)  # enough to see a swap or a shift, however large the pool
        return Finding(
            kind=kind,
            cause=cause,
            step=step,
            positions=[index],
            expected=list(ours[shown]),
            observed=list(real[shown]),
            message=message,
        )

    def _table_difference(self, step: int, ours: dict[str, list[list[int]]], real: dict[str, list[list[int]]]) -> Finding:
        for request in dict.fromkeys([*ours, *real]):
            if request not in ours or request not in real:
                who = self._sides[request not in ours]
                return Finding(
                    kind="allocation",
                    cause="block_table",
                    step=step,
                    request=request,
                    expected=ours.get(request),
                    observed=real.get(request),
                    message=f"step {step}: {place(request)}only {who} holds blocks for it",
                )
            none: list[int] = []
            for group, (mine, theirs) in enumerate(zip_longest(ours[request], real[request], fillvalue=none)):
                if mine != theirs:
                    kind = self._kinds[group] if group < len(self._kinds) else None
                    position, block, other = _first_difference(mine, theirs)
                    return Finding(
                        kind="allocation",
                        cause="block_table",
                        step=step,
                        request=request,
                        group=group,
                        group_kind=kind,
                        positions=[position],
                        expected=mine,
                        observed=theirs,
                        message=f"step {step}: {place(request, group, kind)}position {position}: "
                        f"{self._both(_block(block), _block(other))}",
                    )
        raise AssertionError("the tables are equal")

    def _key_difference(self, step: int, ours: Sequence[CachedKey], real: Sequence[CachedKey]) -> Finding:
        """The first key that is not linked alike on both sides."""
        mine: dict[tuple[int, int, int], list[int]] = {key[:3]: key.blocks for key in ours}
        theirs: dict[tuple[int, int, int], list[int]] = {key[:3]: key.blocks for key in real}
        group, request_index, num_tokens = min(
            name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
        )
        name = (group, request_index, num_tokens)
        kind = self._kinds[group] if group < len(self._kinds) else None
        return Finding(
            kind="pool",
            cause="cached_keys",
            step=step,
            group=group,
            group_kind=kind,
            expected=mine.get(name, []),
            observed=theirs.get(name, []),
            message=f"step {step}: {place(None, group, kind)}key of the first {num_tokens} tokens of add {request_index}: "
            f"{self._sides[0]} links {_blocks(mine.get(name))}, {self._sides[1]} {_blocks(theirs.get(name))}",
        )

    def _types(self, mine: Record, theirs: Record) -> Finding:
        ends: dict[type, str] = {Failure: "failure", Refusal: "refusal"}
        cause = ends.get(type(theirs)) or ends.get(type(mine))
        kind: Kind = "crash" if cause else "schedule"
        return Finding(
            kind=kind,
            cause=cause or "record",
            step=_step(theirs),
            expected=_describe(mine),
            observed=_describe(theirs),
            message=f"{self._sides[0]} expects {_describe(mine)}, {self._sides[1]} answers with {_describe(theirs)}",
        )

    def _lengths(self) -> Finding:
        """One history goes on where the other has ended."""
        longer, who = (
            (self._predicted, self._sides[0])
            if len(self._predicted) > len(self._observed)
            else (self._observed, self._sides[1])
        )
        extra = longer[min(len(self._predicted), len(self._observed))]
        kind: Kind = "crash" if isinstance(extra, Failure) else "schedule"
        return Finding(
            kind=kind,
            cause="failure" if kind == "crash" else "length",
            step=_step(extra),
            expected=len(self._predicted),
            observed=len(self._observed),
            message=f"only {who} goes on, with {_describe(extra)}",
        )

    def _difference(self, kind: Kind, cause: str, step: int, words: str, ours: Any, real: Any) -> Finding:
        """A difference in a plain field; where it belongs to one request, the finding names it."""
        request = None
        where = ""
        if isinstance(ours, dict) and isinstance(real, dict):
            request = next(name for name in [*ours, *real] if ours.get(name) != real.get(name))
            ours, real, where = ours.get(request), real.get(request), place(request)
        return Finding(
            kind=kind,
            cause=cause,
            step=step,
            request=request,
            expected=ours,
            observed=real,
            message=f"step {step}: {where}{words}: {self._both(ours, real)}",
        )

    def _both(self, ours: object, real: object) -> str:
        return f"{self._sides[0]} says {ours}, {self._sides[1]} has {real}"


def _first_difference(ours: Sequence[Any], real: Sequence[Any]) -> tuple[int, Any, Any]:
    """Index and both values; None stands for an end."""
    for index, (mine, theirs) in enumerate(zip_longest(ours, real)):
        if mine != theirs:
            return index, mine, theirs
    raise AssertionError("the sequences are equal")


def _step(record: Record) -> int:
    return getattr(record, "step", 0)


def _block(block_id: int | None) -> str:
    if block_id is None:
        return "no block"
    return f"block {block_id}" if block_id else "null"


def _blocks(ids: list[int] | None) -> str:
    return f"blocks {ids}" if ids else "no block"


def _describe(record: Record) -> str:
    if isinstance(record, Failure):
        return f"an exception in step {record.step} ({record.phase}: {record.type}: {record.message})"
    if isinstance(record, Refusal):
        return f"a refusal of the configuration ({record.type}: {record.message})"
    if isinstance(record, Acted):
        return f"{record.action} -> {record.result} after step {record.step}"
    if isinstance(record, Start):
        return "a start"
    return f"the {'schedule' if isinstance(record, Scheduled) else 'output'} of step {record.step}"

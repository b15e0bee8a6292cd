"""The history: what happened, as records of one schema, whoever produced it.

The model, the real scheduler, the direct driver and a recorded server all write these records. A history is a list of
them, one JSON line each. The first is a `Start` (or a `Refusal`, then the only one); a `Failure` is the last.

State fields (`tables`, `free`, `refs`, `keys`, `deferred`) are None where nothing changed since the record before;
what a source cannot see at all is missing from `Start.sees`. `resolve` fills them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

Table = list[int]
"""One request's block table in one group: block IDs by position, null as 0."""

Tables = dict[str, list[Table]]
"""Block tables of every live request that holds any, per group."""


class CachedKey(NamedTuple):
    """A key of the prefix cache and the blocks linked to it, earliest link first.

    The key is named by the request that first had this prefix: `num_tokens` leading tokens of the `request_index`-th
    `add` of the scenario (from 0). Equal prefixes have equal names, so hash bytes never matter.
    """

    group: int
    request_index: int
    num_tokens: int
    blocks: list[int]


class Selection(Struct, frozen=True, omit_defaults=True):
    """What a connector's metadata tells the worker about one request: block IDs per group in order; announced tokens, None
    if it announces none."""

    groups: list[list[int]]
    tokens: int | None = 0


Selections = dict[str, Selection]


class Move(Struct, frozen=True, omit_defaults=True):
    """Blocks of one request and group that a connector stores outside the KV cache, or loads into it.

    places: by block, where it is kept outside; equal places are one. job: the connector's number of a transfer that ends
    in a later step, None where it is over with this one.
    """

    request: str
    group: int
    blocks: list[int]
    places: list[str]
    job: int | None = None


class Moves(Struct, frozen=True, omit_defaults=True):
    """All that a connector moves in one step. Loads come before the forward pass, stores after it. hurried: numbers of
    stores, sent in this step or before, that have to be over before the step writes anything."""

    loads: list[Move] = []
    stores: list[Move] = []
    hurried: list[int] = []


class Written(Struct, frozen=True, omit_defaults=True):
    """What a fill did to some manager blocks of one layer, found by comparing every byte with what it should be.

    state: `filled` every byte of the layer's view of these blocks is as the contract says; `unwritten` blocks the worker
    was told to write hold bytes as they were before; `wrong_value` they were written with another value; `outside` the
    blocks were written though nobody asked; `padding` bytes that belong to no layer's view changed (layer is empty).
    value: the element as hex bytes in memory order where it is one constant. num_bytes: how many bytes are concerned.
    tensor: of a layer that is kept as a list of state tensors, which of them; there are no blocks then.
    """

    group: int
    layer: str
    blocks: list[int]
    state: Literal["filled", "unwritten", "wrong_value", "outside", "padding"]
    value: str | None = None
    num_bytes: int = 0
    mean: float | None = None
    std: float | None = None
    tensor: int | None = None


class GroupInfo(Struct, frozen=True, omit_defaults=True):
    """A group as the source sees it. `block_size` is the effective one, in tokens (scaled under DCP)."""

    kind: str
    block_size: int
    layers: list[str] = []


class _State(Struct, kw_only=True, omit_defaults=True):
    """The state after a record. `free`: block IDs from the head of the free queue. `refs`: reference count by block ID,
    the null block's given as 0. `deferred`: lists of blocks whose release waits for a step still in flight."""

    tables: Tables | None = None
    free: list[int] | None = None
    refs: list[int] | None = None
    keys: list[CachedKey] | None = None
    deferred: list[list[int]] | None = None


ALWAYS_READ_BLOCKS = 4096
READ_EVERY_STEPS = 16

STATE_FIELDS = ("tables", "free", "refs", "keys", "deferred")


class Start(_State, kw_only=True, omit_defaults=True, tag_field="record", tag="start"):
    """The first record: who speaks, by which release's rules, and the geometry. Sizes in tokens."""

    source: Literal["model", "vllm", "direct", "trace"]
    release: str
    connector: str | None = None
    scheduler_block_size: int = 0
    hash_block_size: int = 0
    groups: list[GroupInfo] = []
    sees: tuple[str, ...] = ()
    written: list[Written] | None = None


Act = Literal["zero", "copy", "fill", "forward"]


class Scheduled(_State, kw_only=True, omit_defaults=True, tag_field="record", tag="schedule"):
    """Scheduling returned and the worker acted. Steps count from 1.

    scheduled: tokens per request in vLLM's order. admitted, resumed, preempted: request IDs in order. hits, external:
    local and external tokens granted in this step's admissions. asked: answers of the connector to each question of this
    step, (request, local tokens shown, external tokens answered), in order. acts: what the worker did to KV memory, in
    order: `zero` the blocks in `zeroed`, `copy` those in `copies`, `fill` what it received, `forward` pass. moves: what a
    connector that keeps content outside stores and loads; its loads are `selected`, too. expected: what the oracle derives.
    """

    step: int
    scheduled: dict[str, int] = {}
    admitted: list[str] = []
    resumed: list[str] = []
    preempted: list[str] = []
    hits: dict[str, int] = {}
    external: dict[str, int] = {}
    zeroed: list[int] = []
    copies: list[tuple[int, int]] = []
    asked: list[tuple[str, int, int | None]] | None = None
    selected: Selections | None = None
    received: Selections | None = None
    moves: Moves | None = None
    acts: list[Act] | None = None
    written: list[Written] | None = None
    expected: dict[str, list[list[int]]] | None = None


class Updated(_State, kw_only=True, omit_defaults=True, tag_field="record", tag="update"):
    """The step's output was processed. finished: request IDs in order; new_tokens: tokens gained per request; arrived:
    requests whose asynchronous load the worker reported with it, in order; lost: IDs of blocks whose load it reported as
    failed, sorted."""

    step: int
    finished: list[str] = []
    new_tokens: dict[str, int] = {}
    arrived: list[str] = []
    lost: list[int] = []
    events: list[tuple[str, int, int, int]] | None = None


class Acted(_State, kw_only=True, omit_defaults=True, tag_field="record", tag="action"):
    """Something outside a step: `abort`, `reset_prefix_cache`, or how a `run` ended.

    result: for reset_prefix_cache "done" or "refused"; for run "idle", "limit" or "stalled"; for abort "done", "gone", or
    "delayed" where the connector asks to free the blocks later.
    """

    step: int
    action: str
    request: str | None = None
    result: str = "done"


def is_pool_read(num_blocks: int, record: StateRecord) -> bool:
    """Whether `free`, `refs` and `keys` are read for this record: always, except in large pools, where the order is
    read every few steps, after scheduling, and outside steps, so also at the end of a `run`."""
    if num_blocks <= ALWAYS_READ_BLOCKS or isinstance(record, (Start, Acted)):
        return True
    return isinstance(record, Scheduled) and record.step % READ_EVERY_STEPS == 0


class Failure(Struct, kw_only=True, omit_defaults=True, tag_field="record", tag="failure"):
    """An exception, always the last record. phase: add, schedule, connector (its scheduler side), worker, update, action.

    trail: the functions of vLLM that it came through, from outside in; line: the line of source that raised it. Where an
    assertion has no words of its own, these tell it from another.
    """

    step: int
    type: str
    phase: str
    message: str = ""
    trail: list[str] = []
    line: str = ""


class Refusal(Struct, kw_only=True, omit_defaults=True, tag_field="record", tag="refusal"):
    """The configuration was refused before anything ran; the only record."""

    type: str
    message: str = ""


Record = Start | Scheduled | Updated | Acted | Failure | Refusal
StateRecord = Start | Scheduled | Updated | Acted
History = list[Record]

_decoder = msgspec.json.Decoder(Record)
_packed_decoder = msgspec.msgpack.Decoder(list[Record])


def to_lines(history: Iterable[Record]) -> str:
    """JSON lines, one record each."""
    return "".join(msgspec.json.encode(record).decode() + "\n" for record in history)


def from_lines(text: str) -> History:
    """Reads JSON lines. Raises ValueError that names the line."""
    history: History = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                history.append(_decoder.decode(line))
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise ValueError(f"line {number}: {error}") from None
    return history


def pack(history: Sequence[Record]) -> bytes:
    """MessagePack bytes, for pipes."""
    return msgspec.msgpack.encode(history)


def unpack(data: bytes) -> History:
    """Reads what `pack` wrote."""
    return _packed_decoder.decode(data)


class State(NamedTuple):
    """The state fields with nothing left out. A field the source cannot see is None."""

    tables: Tables | None
    free: list[int] | None
    refs: list[int] | None
    keys: list[CachedKey] | None
    deferred: list[list[int]] | None


def resolve(history: Iterable[Record]) -> Iterator[tuple[Record, State]]:
    """Each record with the full state after it."""
    current: list[object] = [None] * len(STATE_FIELDS)
    for record in history:
        if isinstance(record, _State):
            for i, field in enumerate(STATE_FIELDS):
                value = getattr(record, field)
                if value is not None:
                    current[i] = value
        yield record, State(*current)  # type: ignore[arg-type]

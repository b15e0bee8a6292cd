"""Reads what the probe connector wrote: JSON lines, as `kvprobe` documents them, from all processes of one engine.

Reading is strict: a line that is no record, a record of the wrong shape or out of place is an error that names file and
line. What may be missing is the end: the last line of a killed process may be torn, and files may still grow. Nothing of
a trace is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

FORMAT = 1


class TraceError(ValueError):
    """A trace that cannot be used. The message names the file, the line if there is one, and the reason."""

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        super().__init__(f"{path}, line {line}: {reason}" if line is not None else f"{path}: {reason}")


Pairs = list[tuple[int, int]]
Digest = str


class Selected(Struct, frozen=True):
    """Blocks to load for one request, per group, and the tokens they are for."""

    groups: list[list[int]]
    tokens: int


class _Record(Struct, frozen=True, tag_field="t"):
    """A line of a trace. Unknown fields are left aside: a newer probe may tell more."""


class Group(Struct, frozen=True):
    """A KV cache group: layer names, whether a speculator's, and the spec as plain fields."""

    layers: list[str]
    spec: dict[str, Any]
    eagle: bool = False


class Connector(Struct, frozen=True):
    """The probed connector: class name, role, its own settings, whether it must deliver, and whether it may hold blocks of
    the pool that no request holds."""

    name: str
    role: str = ""
    extra: dict[str, Any] = {}
    requires_kv_delivery: bool = False
    holds_blocks: bool = False


class StartRecord(_Record, frozen=True, tag="start"):
    """The first record of every part of every file."""

    format: int
    role: Literal["scheduler", "worker"]
    rank: int
    run: Digest
    pid: int
    part: int
    vllm: str
    engine: dict[str, Any]
    groups: list[Group]
    num_blocks: int
    connector: Connector
    options: dict[str, Any] = {}
    platform: str = ""
    retention_interval: int | None = None
    needs_zeroing: bool | None = None
    at: float = 0.0


class ConnectorRecord(_Record, frozen=True, tag="connector"):
    """Another probed child of the same MultiConnector."""

    c: int
    name: str
    role: str = ""
    extra: dict[str, Any] = {}
    requires_kv_delivery: bool = False
    holds_blocks: bool = False


class BoundRecord(_Record, frozen=True, tag="bound"):
    hash_block_size: int | None = None
    num_blocks: int | None = None
    sees_tables: bool = False


class AddRecord(_Record, frozen=True, tag="add"):
    """A request arrived. prompt: tokens; prefix: a digest for each of its whole hash blocks; parts: what the prompt has
    besides text."""

    n: int
    id: str
    prompt: int
    max_tokens: int
    prefix: list[Digest]
    priority: int = 0
    salt: Digest | None = None
    lora: Digest | None = None
    skip_cache: bool = False
    parts: list[str] = msgspec.field(default_factory=lambda: ["text"])
    token_ids: list[int] | None = None


class LiveRequest(Struct, frozen=True):
    """A request that was there when a part began."""

    n: int
    id: str
    prompt: int
    max_tokens: int
    prefix: list[Digest]
    tokens: int
    tables: list[list[int]] | None = None
    priority: int = 0
    salt: Digest | None = None
    lora: Digest | None = None
    skip_cache: bool = False
    parts: list[str] = msgspec.field(default_factory=lambda: ["text"])


class StateRecord(_Record, frozen=True, tag="state"):
    """What was there when a later part began."""

    k: int
    updates: int
    requests: list[LiveRequest]
    hash_block_size: int | None = None
    num_blocks: int | None = None
    sees_tables: bool = False


class AskRecord(_Record, frozen=True, tag="ask"):
    n: int
    local: int
    answer: tuple[int | None, bool]
    c: int = 0


class AllocRecord(_Record, frozen=True, tag="alloc"):
    n: int
    external: int
    c: int = 0


Patch = tuple[int, list[int]]


class StepRecord(_Record, frozen=True, tag="step"):
    """A call of `schedule`. scheduled, drafts: (request, tokens), `scheduled` None where it is as in the step before;
    start: (request, tokens computed before) of those admitted; tables: (request, patches by group)."""

    k: int
    scheduled: Pairs | None = None
    selected: dict[str, Any] = {}
    at: float = 0.0
    new: list[int] = []
    resumed: list[int] = []
    preempted: list[int] = []
    start: Pairs = []
    drafts: Pairs = []
    zeroed: list[int] = []
    copies: Pairs = []
    tables: list[tuple[int, list[list[Patch]]]] = []


class MetaRecord(_Record, frozen=True, tag="meta"):
    k: int
    c: int
    selected: dict[str, Any]


class LoadedRecord(_Record, frozen=True, tag="loaded"):
    recving: list[int] = []
    sending: list[int] = []
    failed: list[int] = []
    invalid: list[int] = []


class EndRecord(_Record, frozen=True, tag="end"):
    n: int
    status: str = ""
    tokens: int = 0
    computed: int | None = None
    prefix: list[Digest] = []
    delayed: bool = False
    c: int = 0
    token_ids: list[int] | None = None


class UpdateRecord(_Record, frozen=True, tag="update"):
    """The output of step k was processed. new: (request, tokens), None where it is as in the update before."""

    k: int
    new: Pairs | None = None
    prefix: list[tuple[int, list[Digest]]] = []
    at: float = 0.0
    token_ids: list[tuple[int, list[int]]] = []


class ResetRecord(_Record, frozen=True, tag="reset"):
    pass


class RaisedRecord(_Record, frozen=True, tag="raised"):
    hook: str
    type: str


class StoppedRecord(_Record, frozen=True, tag="stopped"):
    """The probe gave up; the engine went on."""

    hook: str
    type: str


class MemoryRecord(_Record, frozen=True, tag="memory"):
    """layers: name, group, shape, strides, dtype, device, kernel rows in a block (0: cannot be told apart)."""

    num_blocks: int
    layers: list[tuple[str, int, list[int] | None, list[int] | None, str, str | None, int]]


class ReceivedRecord(_Record, frozen=True, tag="received"):
    k: int
    selected: dict[str, Any] = {}
    c: int = 0


class ForwardRecord(_Record, frozen=True, tag="forward"):
    """The forward pass begins, in a step with blocks to load."""

    k: int


class WrittenLayer(Struct, frozen=True):
    """What a load left in one layer, of the blocks looked at."""

    layer: str
    group: int
    changed: list[int]
    equal: list[int]
    values: list[tuple[str, list[int]]]
    mixed: list[int]
    outside: list[int]
    num_others: int = 0
    block_bytes: int = 0


class LoadRecord(_Record, frozen=True, tag="load"):
    k: int
    written: list[WrittenLayer] | None = None
    c: int = 0


SchedulerRecord = (
    StartRecord
    | ConnectorRecord
    | BoundRecord
    | StateRecord
    | AddRecord
    | AskRecord
    | AllocRecord
    | StepRecord
    | MetaRecord
    | LoadedRecord
    | EndRecord
    | UpdateRecord
    | ResetRecord
    | RaisedRecord
    | StoppedRecord
)
WorkerRecord = (
    StartRecord
    | ConnectorRecord
    | MemoryRecord
    | ReceivedRecord
    | ForwardRecord
    | LoadRecord
    | RaisedRecord
    | StoppedRecord
)
AnyRecord = SchedulerRecord | WorkerRecord
_decoder = msgspec.json.Decoder(AnyRecord)


class _Counted(Struct, frozen=True):
    """`i` counts a stream's lines over all its parts."""

    i: int


_count_decoder = msgspec.json.Decoder(_Counted)


class Line(NamedTuple):
    """A record and where it stands."""

    record: Any
    path: Path
    number: int

    @property
    def place(self) -> str:
        return f"{self.path.name}:{self.number}"


class Stream:
    """The lines of one process and role, over all parts. cut: the end of the last part is torn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: list[Line] = []
        self.parts: list[Path] = []
        self.is_cut = False
        self._place = 0
        self._offset = 0
        self._number = 0
        self._next_count: int | None = None

    @property
    def start(self) -> StartRecord:
        record: StartRecord = self.lines[0].record
        return record

    def read(self, parts: Iterable[Path]) -> bool:
        """Takes in whatever the files have gained. Returns whether there was anything. Raises TraceError, OSError."""
        self.parts += [path for path in parts if path not in self.parts]
        num_lines = len(self.lines)
        while True:
            place = self._current()
            if place is None:
                return len(self.lines) > num_lines
            path, has_next = place
            self._read_part(path, has_next)
            if not has_next:
                return len(self.lines) > num_lines
            self._place += 1
            self._offset = self._number = 0

    def _current(self) -> tuple[Path, bool] | None:
        if self._place >= len(self.parts):
            return None
        return self.parts[self._place], self._place + 1 < len(self.parts)

    def _read_part(self, path: Path, is_done: bool) -> None:
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole, _, rest = data.rpartition(b"\n")
        self.is_cut = bool(rest)
        if rest and is_done:
            raise TraceError(path, self._number + whole.count(b"\n") + 1 + bool(whole), "torn, though the next part exists")
        if not whole:
            return
        self._offset += len(whole) + 1
        for text in whole.split(b"\n"):
            self._number += 1
            self._take(text, path)

    def _take(self, text: bytes, path: Path) -> None:
        try:
            record, count = _decoder.decode(text), _count_decoder.decode(text).i
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(path, self._number, f"not a record of a trace: {error}") from None
        if isinstance(record, StartRecord) != (self._number == 1):
            reason = "a second start" if self._number > 1 else "a trace begins with a record `start`"
            raise TraceError(path, self._number, reason)
        if isinstance(record, StartRecord) and record.format != FORMAT:
            reason = f"format {record.format}; this kvoracle reads format {FORMAT}"
            raise TraceError(path, self._number, reason)
        if self._next_count is not None and count != self._next_count:
            reason = f"line {count} of the stream where line {self._next_count} was due; lines are missing or doubled"
            raise TraceError(path, self._number, reason)
        self._next_count = count + 1
        self.lines.append(Line(record, path, self._number))


class Trace:
    """All streams of one engine: one of the scheduler, and one of each worker rank."""

    def __init__(self, scheduler: Stream, workers: list[Stream]) -> None:
        self.scheduler = scheduler
        self.workers = sorted(workers, key=lambda stream: stream.start.rank)

    @property
    def start(self) -> StartRecord:
        return self.scheduler.start


_PART = re.compile(r"(.+)\.(\d{3,})\.jsonl")


class TraceFiles:
    """The files of a trace, which may still grow. `poll` reads what is new."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        """paths: files, or folders whose *.jsonl files are taken. Raises TraceError if there is none."""
        self._paths = [Path(path) for path in paths]
        self._streams: dict[str, Stream] = {}

    def poll(self) -> bool:
        """Reads on. Returns whether there was anything new. Raises TraceError, OSError."""
        any_new = False
        for name, parts in self._find().items():
            stream = self._streams.setdefault(name, Stream(name))
            any_new |= stream.read(parts)
        return any_new

    def _find(self) -> dict[str, list[Path]]:
        files: dict[str, list[tuple[int, Path]]] = {}
        for given in self._paths:
            found = sorted(given.glob("*.jsonl")) if given.is_dir() else [given]
            for path in found:
                match = _PART.fullmatch(path.name)
                name, part = (match[1], int(match[2])) if match else (path.name, 0)
                files.setdefault(str(path.with_name(name)), []).append((part, path))
        return {name: [path for _, path in sorted(parts)] for name, parts in files.items()}

    def trace(self) -> Trace | None:
        """What has been read so far; None while the scheduler has written nothing. Raises TraceError if the files are of
        more than one engine."""
        begun = [stream for stream in self._streams.values() if stream.lines]
        schedulers = [stream for stream in begun if stream.start.role == "scheduler"]
        if not schedulers:
            return None
        if len(schedulers) > 1:
            names = " and ".join(stream.lines[0].path.name for stream in schedulers)
            raise TraceError(schedulers[1].lines[0].path, 1, f"files of several engines ({names}); check one at a time")
        run = schedulers[0].start.run
        for stream in begun:
            if stream.start.run != run:
                raise TraceError(stream.lines[0].path, 1, f"of another engine than {schedulers[0].lines[0].path.name}")
        return Trace(schedulers[0], [stream for stream in begun if stream.start.role == "worker"])


def read_trace(paths: Iterable[str | Path]) -> Trace:
    """Reads a trace as far as it goes. Raises TraceError, OSError."""
    paths = [Path(path) for path in paths]
    files = TraceFiles(paths)
    files.poll()
    trace = files.trace()
    if trace is None:
        raise TraceError(paths[0], None, "no trace of a scheduler here; give the folder or the files that the probe wrote")
    return trace

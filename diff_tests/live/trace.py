"""Reads what the probe connector wrote: JSON lines, as `kvprobe` documents them, from all processes of one engine.

Reading is strict: a line that is no record, a record of the wrong shape or out of place is an error that names file and
line. What may be missing is the end: the last line of a killed process may be torn, and files may still grow. Nothing of
a trace is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

FORMAT = 1


class TraceError(ValueError):
    """A trace that cannot be used. The message names the file, the line if there is one, and the reason."""

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        place = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(printable(f"{place}: {reason}"))


# A trace may be a stranger's: what costs time or memory has bounds, far above what a server has.
_MOST = 1 << 24
_LONGEST_LINE = 1 << 28
Number = Annotated[int, Meta(ge=0, le=_MOST)]
"""Of tokens, blocks, or whatever else is counted out."""
Count = Annotated[int, Meta(ge=1, le=_MOST)]
Index = Annotated[int, Meta(ge=0, lt=1 << 53)]
BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Pairs = list[tuple[Index, Number]]
Word = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$", max_length=1000)]
"""A name without control characters."""
Digest = str


def printable(text: str) -> str:
    """With control characters escaped, so that a terminal takes it for text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Selected(Struct, frozen=True):
    """Blocks to load for one request, per group, and the tokens they are for."""

    groups: list[list[BlockId]]
    tokens: Number


class _Record(Struct, frozen=True, tag_field="t"):
    """A line of a trace. Unknown fields are left aside: a newer probe may tell more."""


class Spec(Struct, frozen=True, rename={"kind": "class"}):
    """What block IDs depend on of a KV cache spec, by vLLM's names; None and absent where a kind or release has no such
    field. kind, bases: its class and those below; specs: of a wrapper of several."""

    kind: Word
    bases: list[Word] = []
    specs: list[Spec] = []
    block_size: Count | None = None
    sliding_window: Count | None = None
    rswa_window: Count | None = None
    attention_chunk_size: Count | None = None
    bounded_replay: bool | None = None
    extra_retained_tokens: Number | None = None
    mamba_cache_mode: Word | None = None
    num_speculative_blocks: Number | None = None
    num_prefill_checkpoint_blocks: Number | None = None
    prefill_checkpoint_alignment: Count | None = None
    dcp_sharded: bool | None = None
    is_draft: bool | None = None
    dtype: Word | None = None
    dtypes: list[Word] | None = None
    kv_quant_mode: str | None = None
    cache_dtype_str: str | None = None


class Group(Struct, frozen=True):
    """A KV cache group: layer names, whether a speculator's, and the spec."""

    layers: list[Word]
    spec: Spec
    eagle: bool = False


class Settings(Struct, frozen=True):
    """Settings of an engine that decide block IDs, by vLLM's names; None and absent where a release has no such setting."""

    enable_prefix_caching: bool | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_scheduled_tokens: Count | None = None
    enable_chunked_prefill: bool | None = None
    long_prefill_token_threshold: Number | None = None
    long_prefill_token_threshold_adaptive: bool | None = None
    prefill_schedule_interval: Count | None = None
    policy: Word | None = None
    async_scheduling: bool | None = None
    watermark: Annotated[float, Meta(ge=0.0, lt=1.0)] | None = None
    scheduler_reserve_full_isl: bool | None = None
    prefix_match_unit: Count | None = None
    cache_dtype: Word | None = None
    pipeline_parallel_size: Count | None = None
    decode_context_parallel_size: Count | None = None
    prefill_context_parallel_size: Count | None = None
    method: Word | None = None
    num_speculative_tokens: Number | None = None
    num_speculative_tokens_per_batch_size: str | None = None
    disable_eagle_block_drop: bool | None = None


class Connector(Struct, frozen=True):
    """The probed connector: class name, role, its own settings, whether it must deliver, and whether it may hold blocks of
    the pool that no request holds."""

    name: Word
    role: Word = ""
    extra: dict[str, Any] = {}
    requires_kv_delivery: bool = False
    holds_blocks: bool = False


class StartRecord(_Record, frozen=True, tag="start"):
    """The first record of every part of every file."""

    format: int
    role: Literal["scheduler", "worker"]
    rank: Index
    run: Digest
    pid: int
    part: Index
    vllm: Word
    engine: Settings
    groups: list[Group]
    num_blocks: Count
    connector: Connector
    options: dict[str, Any] = {}
    platform: Word = ""
    retention_interval: Number | None = None
    needs_zeroing: bool | None = None
    at: float = 0.0


class ConnectorRecord(_Record, frozen=True, tag="connector"):
    """Another probed child of the same MultiConnector."""

    c: Index
    name: Word
    role: Word = ""
    extra: dict[str, Any] = {}
    requires_kv_delivery: bool = False
    holds_blocks: bool = False


class BoundRecord(_Record, frozen=True, tag="bound"):
    hash_block_size: Count | None = None
    num_blocks: Count | None = None
    sees_tables: bool = False


class AddRecord(_Record, frozen=True, tag="add"):
    """A request arrived. prompt: tokens; prefix: a digest for each of its whole hash blocks; parts: what the prompt has
    besides text."""

    n: Index
    id: str
    prompt: Number
    max_tokens: Index
    prefix: list[Digest]
    priority: int = 0
    salt: Digest | None = None
    lora: Digest | None = None
    skip_cache: bool = False
    parts: list[Word] = msgspec.field(default_factory=lambda: ["text"])
    token_ids: list[int] | None = None


class LiveRequest(Struct, frozen=True):
    """A request that was there when a part began."""

    n: Index
    id: str
    prompt: Number
    max_tokens: Index
    prefix: list[Digest]
    tokens: Number
    tables: list[list[BlockId]] | None = None
    priority: int = 0
    salt: Digest | None = None
    lora: Digest | None = None
    skip_cache: bool = False
    parts: list[Word] = msgspec.field(default_factory=lambda: ["text"])


class StateRecord(_Record, frozen=True, tag="state"):
    """What was there when a later part began."""

    k: Index
    updates: Index
    requests: list[LiveRequest]
    hash_block_size: Count | None = None
    num_blocks: Count | None = None
    sees_tables: bool = False


class AskRecord(_Record, frozen=True, tag="ask"):
    n: Index
    local: Number
    answer: tuple[Number | None, bool]
    c: Index = 0


class AllocRecord(_Record, frozen=True, tag="alloc"):
    n: Index
    external: Number
    c: Index = 0


Patch = tuple[Annotated[int, Meta(ge=-1, le=_MOST)], list[BlockId]]


class StepRecord(_Record, frozen=True, tag="step"):
    """A call of `schedule`. scheduled, drafts: (request, tokens), `scheduled` None where it is as in the step before;
    start: (request, tokens computed before) of those admitted; tables: (request, patches by group)."""

    k: Index
    scheduled: Pairs | None = None
    selected: dict[str, Any] = {}
    at: float = 0.0
    new: list[Index] = []
    resumed: list[Index] = []
    preempted: list[Index] = []
    start: Pairs = []
    drafts: Pairs = []
    zeroed: list[BlockId] = []
    copies: list[tuple[BlockId, BlockId]] = []
    tables: list[tuple[Index, list[list[Patch]]]] = []


class MetaRecord(_Record, frozen=True, tag="meta"):
    k: Index
    c: Index
    selected: dict[str, Any]


class LoadedRecord(_Record, frozen=True, tag="loaded"):
    recving: list[Index] = []
    sending: list[Index] = []
    failed: list[Index] = []
    invalid: list[BlockId] = []


class EndRecord(_Record, frozen=True, tag="end"):
    n: Index
    status: Word = ""
    tokens: Number = 0
    computed: Number | None = None
    prefix: list[Digest] = []
    delayed: bool = False
    c: Index = 0
    token_ids: list[int] | None = None


class UpdateRecord(_Record, frozen=True, tag="update"):
    """The output of step k was processed. new: (request, tokens), None where it is as in the update before."""

    k: Index
    new: Pairs | None = None
    prefix: list[tuple[Index, list[Digest]]] = []
    at: float = 0.0
    token_ids: list[tuple[int, list[int]]] = []


class ResetRecord(_Record, frozen=True, tag="reset"):
    pass


class RaisedRecord(_Record, frozen=True, tag="raised"):
    hook: Word
    type: Word


class StoppedRecord(_Record, frozen=True, tag="stopped"):
    """The probe gave up; the engine went on."""

    hook: Word
    type: Word


class MemoryRecord(_Record, frozen=True, tag="memory"):
    """layers: name, group, shape, strides, dtype, device, kernel rows in a block (0: cannot be told apart)."""

    num_blocks: Count
    layers: list[tuple[Word, int, list[int] | None, list[int] | None, str, str | None, Number]]


class ReceivedRecord(_Record, frozen=True, tag="received"):
    k: Index
    selected: dict[str, Any] = {}
    c: Index = 0


class ForwardRecord(_Record, frozen=True, tag="forward"):
    """The forward pass begins, in a step with blocks to load."""

    k: Index


class WrittenLayer(Struct, frozen=True):
    """What a load left in one layer, of the blocks looked at."""

    layer: Word
    group: int
    changed: list[BlockId]
    equal: list[BlockId]
    values: list[tuple[str, list[BlockId]]]
    mixed: list[BlockId]
    outside: list[BlockId]
    num_others: Number = 0
    block_bytes: Index = 0


class LoadRecord(_Record, frozen=True, tag="load"):
    k: Index
    written: list[WrittenLayer] | None = None
    c: Index = 0


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
            while text := file.readline(_LONGEST_LINE):
                self.is_cut = not text.endswith(b"\n")
                if self.is_cut:
                    break
                self._offset += len(text)
                self._number += 1
                self._take(text, path)
        if self.is_cut and (is_done or len(text) == _LONGEST_LINE):
            reason = "torn, though the next part exists" if is_done else f"longer than {_LONGEST_LINE} bytes"
            raise TraceError(path, self._number + 1, reason)

    def _take(self, text: bytes, path: Path) -> None:
        try:
            record, count = _decoder.decode(text), _count_decoder.decode(text).i
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(path, self._number, f"not a record of a trace: {error}") from None
        except RecursionError:
            raise TraceError(path, self._number, "not a record of a trace: nested too deep") from None
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
                if path.exists() and not path.is_file():
                    raise TraceError(path, None, "not a file")
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

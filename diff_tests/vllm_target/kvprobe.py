"""A probe for vLLM's KV connectors: records what the scheduler and the workers do, and changes nothing.

One file that needs the standard library and the vLLM that loads it. Put it where the server can import it and name it as
the module of the connector to be watched:

    kv_connector: DecodeBenchConnector          (or Probe_DecodeBenchConnector, or Probe_package.module.Class)
    kv_connector_module_path: kvprobe
    kv_connector_extra_config: {"kvprobe": {"dir": "/tmp/trace"}, ...the connector's own settings...}

The class made for a name is a subclass of the connector's own class, of the same name, so that support for hybrid
caches, class methods, properties, optional hooks and everything that vLLM decides by a connector's name stay as they are.
Inside MultiConnector each child may be probed: give it `kv_connector_module_path` and the options.

Options (all optional):
    dir         folder of the trace (default: kvprobe-trace in the working directory)
    verify      off (default), sample or all: read KV memory before and after each load; nothing is ever written
    max_mb      size of one process's files; beyond it the oldest are deleted (default 1024)
    tokens      true: token IDs are recorded (default: only salted digests that keep equality)
    rename      true: request IDs are recorded as salted digests
    salt        secret of the digests; without one, a random secret of this engine that is recorded nowhere

If the probe itself fails, it logs once and stops recording; serving goes on.

The trace: JSON lines, one object each, in files NAME.PART.jsonl, one name a process and role (`scheduler`, `worker`), parts
counted from 000. `t` says what a line is, `i` counts a name's lines from 0. Every line is written at once; the last one of
a killed process may be torn. Digests are `~` and hex.

Every part begins with `start`: format 1, role, rank, run (same in all files of one engine), pid, vllm, platform, connector,
engine (settings that decide block IDs), groups (class and fields of each KV cache spec, layers), num_blocks. A later
part goes on with `state`: steps so far, and every live request as in `add`, with its tokens and tables.
`c` is the place of the probed connector within MultiConnector, left out for the first.

Scheduler. Requests are numbered (`n`) in order of arrival:
    connector another child of MultiConnector, as `connector` in start
    bound     hash_block_size of the prefix digests, blocks in the pool
    add       n, id, prompt (tokens), max_tokens, priority, salt, lora, skip_cache, parts ("text" or what else the prompt
              has), prefix (a digest for each whole hash block)
    ask       n, local (tokens shown), answer [external or null, asynchronous]
    alloc     n, external: granted tokens
    step      k (from 1), at, scheduled [[n, tokens]] (left out: as in the step before), new [n], resumed [n],
              preempted [n], start [[n, tokens computed before]] of those admitted, drafts [[n, count]], zeroed [block],
              copies [[from, to]], tables [[n, [patches of group 0, ...]]]: each patch [position, block IDs] overwrites
              or extends the table, [-1, block IDs] replaces it; null is 0. selected: see below
    meta      k, c, selected: what another child of MultiConnector built in step k
    loaded    recving, sending, failed [n]: transfers that a worker reported as ended
    end       n, status, tokens, computed (tokens; only with drafts), delayed (the connector keeps the blocks for now)
    update    k, at, new [[n, tokens]] (left out: as in the update before), prefix [[n, [digests of whole hash blocks
              since]]]: output of step k was processed
    reset     the prefix cache was emptied since the record before
    raised    hook, type: the connector raised
Worker:
    memory    num_blocks, layers [name, group, shape, strides, dtype, device, rows_per_block (0: not looked at)]
    received  k, selected: the metadata bound in step k
    forward   k: the first attention layer of the forward pass begins, in a step with blocks to load. Whether it stands
              before or after the step's `load` is the order in which the worker did both. Left out where no Python runs
              between layers, as in the replay of a whole CUDA graph
    load      k, written (with verify): per layer and group: changed, equal [blocks that were to be written], values
              [[element in hex, blocks that consist of it]], mixed [other blocks], outside [blocks changed unasked],
              num_others (blocks looked at that nobody was to write), block_bytes
`selected` is {} where it is left out, else {request: {groups: [[block IDs]], tokens}}, by n in the scheduler and by id in a
worker; metadata of another form is {"form": its plain values}, every string and token list a digest.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import inspect
import itertools
import json
import logging
import os
import platform
import sys
import time
import weakref
from pathlib import Path
from typing import Any

FORMAT = 1
PREFIX = "Probe_"
OPTIONS_KEY = "kvprobe"
_STEP_TAG = "_kvprobe_step"
_NUM_PARTS = 8
_log = logging.getLogger("vllm.kvprobe")


# ------------------------------------------------------------------------------------------------ digests and plain values


class Secret:
    """Salted digests: equal values have equal digests in every process of one engine, and tell nothing else."""

    def __init__(self, salt: str) -> None:
        self._key = hashlib.blake2b(salt.encode(), digest_size=32).digest()

    def of(self, value: bytes | str) -> str:
        data = value.encode() if isinstance(value, str) else value
        return "~" + hashlib.blake2b(data, digest_size=8, key=self._key).hexdigest()


class Plain:
    """Any object as JSON values. Strings, bytes, tensors and long lists of numbers that are no block IDs become digests."""

    _MOST_NODES = 100_000
    _MOST_DEPTH = 12
    _MOST_PLAIN_NUMBERS = 8

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._num_nodes = 0

    def of(self, value: Any) -> Any:
        self._num_nodes = 0
        return self._of(value, "", 0)

    def _of(self, value: Any, name: str, depth: int) -> Any:
        self._num_nodes += 1
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if self._num_nodes > self._MOST_NODES or depth > self._MOST_DEPTH:
            return "..."
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, (str, bytes)):
            return self._secret.of(value)
        if isinstance(value, dict):
            return {self._key(k): self._of(v, str(k), depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._sequence(value, name, depth)
        return self._object(value, name, depth)

    def _key(self, key: Any) -> str:
        return self._secret.of(key) if isinstance(key, str) else str(self._of(key, "", 1))

    def _sequence(self, value: Any, name: str, depth: int) -> Any:
        unordered = isinstance(value, (set, frozenset))
        items = list(value)
        if len(items) > self._MOST_PLAIN_NUMBERS and all(type(item) is int for item in items):
            if unordered:
                items.sort()
            return items if "block" in name else self._secret.of(repr(items))
        plain = [self._of(item, name, depth + 1) for item in items]
        return sorted(plain, key=repr) if unordered else plain

    def _object(self, value: Any, name: str, depth: int) -> Any:
        if hasattr(value, "data_ptr") and hasattr(value, "shape"):
            return self._tensor(value)
        fields = _fields_of(value)
        if fields is None:
            return type(value).__name__
        body = {key: self._of(item, key, depth + 1) for key, item in fields.items() if key != _STEP_TAG}
        return {"class": type(value).__name__, **body}

    def _tensor(self, value: Any) -> Any:
        plain = {"class": "Tensor", "shape": list(value.shape), "dtype": str(value.dtype)}
        if value.device.type == "cpu" and value.numel() <= self._MOST_NODES:
            plain["values"] = self._secret.of(repr(value.tolist()))
        return plain


def _fields_of(value: Any) -> dict[str, Any] | None:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    names = getattr(type(value), "__struct_fields__", None)
    if names is not None:
        return {name: getattr(value, name) for name in names}
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _known_form(metadata: Any) -> dict[str, Any] | None:
    """Blocks to load by request, where the metadata says so in the form that we know."""
    fills = getattr(metadata, "reqs_to_fill", None)
    return fills if isinstance(fills, dict) else None


def _selection(fill: Any) -> dict[str, Any]:
    ids_by_group, num_tokens = fill
    return {"groups": [list(ids) for ids in ids_by_group], "tokens": num_tokens}


# -------------------------------------------------------------------------------------------------------------- the files


class Tape:
    """The trace of one process and role. A failure of the probe ends it, and nothing else. start: the record that every
    part begins with; folder: of the files."""

    def __init__(self, role: str, vllm_config: Any, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config  # also keeps it alive, since its identity names the engine
        transfer = vllm_config.kv_transfer_config
        options = dict((transfer.kv_connector_extra_config or {}).get(OPTIONS_KEY) or {})
        engine_id = str(getattr(transfer, "engine_id", None) or "")
        self.secret = Secret(str(options.get("salt") or engine_id or os.urandom(16).hex()))
        self.plain = Plain(self.secret)
        self.keeps_tokens = bool(options.get("tokens"))
        self.renames = bool(options.get("rename"))
        self.verify = str(options.get("verify") or "off")
        if self.verify not in ("off", "sample", "all"):
            raise ValueError(f"kvprobe option verify: must be off, sample or all, found {self.verify!r}")
        self.is_alive = True
        self._num_connectors = 0
        self.folder = Path(str(options.get("dir") or "kvprobe-trace"))
        self._part_bytes = max(int(float(options.get("max_mb") or 1024) * 1e6) // _NUM_PARTS, 1 << 14)
        self._part = 0
        self._written = 0
        self._num_records = 0
        self._file: Any = None
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        rank = _rank(vllm_config, role)
        self.start = {
            "t": "start",
            "format": FORMAT,
            "role": role,
            "rank": rank,
            "run": self.secret.of("run " + engine_id),
            "pid": os.getpid(),
            **_about(),
            "options": {"verify": self.verify, "tokens": self.keeps_tokens, "rename": self.renames},
            "engine": _engine(vllm_config),
            "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
            "num_blocks": kv_cache_config.num_blocks,
            "retention_interval": getattr(kv_cache_config, "prefix_cache_retention_interval", None),
            "needs_zeroing": getattr(kv_cache_config, "needs_kv_cache_zeroing", None),
        }
        self._name = f"{role}-{rank}-{os.getpid()}-{next(_tape_numbers)}"

    def add_connector(self, connector: Any, name: str, vllm_config: Any) -> int:
        """Enters a probed connector; its place among those that share the tape."""
        transfer = vllm_config.kv_transfer_config
        extra = {k: v for k, v in (transfer.kv_connector_extra_config or {}).items() if k != OPTIONS_KEY}
        about = {
            "name": name,
            "role": str(transfer.kv_role),
            "extra": {k: _public(v, self.secret) for k, v in extra.items()},
            "requires_kv_delivery": bool(getattr(connector, "requires_kv_delivery", False)),
            "holds_blocks": _holds_blocks(connector),
        }
        place = self._num_connectors
        self._num_connectors += 1
        if place == 0:
            self.start["connector"] = about
            self._open()
        else:
            self.write({"t": "connector", "c": place, **about})
        return place

    def state(self) -> dict[str, Any] | None:
        """What a part that is not the first needs to be read alone; the roles add theirs."""
        return None

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._name}.{self._part:03d}.jsonl"
        self._file = path.open("wb", buffering=0)
        self._written = 0
        self.write({**self.start, "part": self._part, "at": round(time.time(), 6)})

    def write(self, record: dict[str, Any]) -> None:
        """One line, handed to the system at once, so that a killed process loses nothing."""
        self.write_body(self._encode(record)[1:])

    def write_body(self, body: str) -> None:
        """A record as JSON text without its opening brace."""
        data = f'{{"i":{self._num_records},{body}\n'.encode()
        self._num_records += 1
        self._written += len(data)
        while data:
            data = data[self._file.write(data) :]

    def rotate_if_due(self) -> None:
        """Between steps, where the state is whole: goes on in a new part if this one is full."""
        if self._written <= self._part_bytes:
            return
        self._file.close()
        self._part += 1
        self._open()
        state = self.state()
        if state is not None:
            self.write(state)
        old = self.folder / f"{self._name}.{self._part - _NUM_PARTS:03d}.jsonl"
        if self._part >= _NUM_PARTS:
            old.unlink(missing_ok=True)

    def fail(self, error: BaseException, hook: str) -> None:
        """The probe failed: say so once, and stop."""
        if not self.is_alive:
            return
        self.is_alive = False
        _log.error("kvprobe stopped recording in %s: %s: %s", hook, type(error).__name__, error, exc_info=error)
        try:
            if self._file is not None:
                self.write({"t": "stopped", "hook": hook, "type": type(error).__name__})
        except OSError:
            pass

    def request_id(self, request_id: str) -> str:
        """A request's ID as it is recorded."""
        return self.secret.of(request_id) if self.renames else request_id


def _holds_blocks(connector: Any) -> bool:
    """Whether the connector wants the pool itself, and so may hold blocks that no request holds."""
    children = connector.__dict__.get("_connectors")
    if isinstance(children, list):
        return any(_holds_blocks(child) for child in children)
    base = next((kind for kind in type(connector).__mro__ if kind.__name__ == "KVConnectorBase_V1"), None)
    for name in ("bind_gpu_block_pool", "bind_kv_cache_manager"):
        own = inspect.unwrap(getattr(type(connector), name, None) or len)
        if own is not (getattr(base, name, None) or len):
            return True
    return False


_tape_numbers = itertools.count()
_tapes: weakref.WeakValueDictionary[tuple[str, int], Tape] = weakref.WeakValueDictionary()


def _tape(role: str, vllm_config: Any, kv_cache_config: Any) -> Tape:
    """The children of one MultiConnector share the tape: they are given the same KV cache config."""
    key = (role, id(kv_cache_config))
    tape = _tapes.get(key)
    if tape is None:
        kind = SchedulerTape if role == "scheduler" else WorkerTape
        tape = _tapes[key] = kind(role, vllm_config, kv_cache_config)
    return tape


def _about() -> dict[str, Any]:
    """Versions and platform."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    return {
        "vllm": str(getattr(vllm, "__version__", "unknown")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": str(getattr(current_platform, "device_type", "")) or type(current_platform).__name__,
        "machine": f"{sys.platform} {platform.machine()}",
    }


def _rank(vllm_config: Any, role: str) -> int:
    parallel = vllm_config.parallel_config
    if role == "worker":
        try:
            import torch.distributed

            if torch.distributed.is_initialized():
                return int(torch.distributed.get_rank())
        except (ImportError, RuntimeError):
            pass
        return int(getattr(parallel, "rank", 0) or 0)
    return int(getattr(parallel, "data_parallel_rank", 0) or 0)


_ENGINE_FIELDS = {
    "scheduler_config": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_num_scheduled_tokens",
        "enable_chunked_prefill",
        "long_prefill_token_threshold",
        "long_prefill_token_threshold_adaptive",
        "prefill_schedule_interval",
        "policy",
        "async_scheduling",
        "watermark",
        "scheduler_reserve_full_isl",
        "disable_hybrid_kv_cache_manager",
    ),
    "cache_config": (
        "block_size",
        "enable_prefix_caching",
        "mamba_cache_mode",
        "prefix_cache_retention_interval",
        "prefix_match_unit",
        "cache_dtype",
        "num_gpu_blocks",
    ),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ),
    "model_config": ("max_model_len", "is_encoder_decoder"),
    "speculative_config": (
        "method",
        "num_speculative_tokens",
        "num_speculative_tokens_per_batch_size",
        "disable_eagle_block_drop",
    ),
    "kv_events_config": ("enable_kv_cache_events",),
    "kv_transfer_config": ("kv_load_failure_policy",),
}


def _engine(vllm_config: Any) -> dict[str, Any]:
    """The settings that decide block IDs, by vLLM's own names. What a release does not have is left out."""
    values: dict[str, Any] = {}
    for config_name, names in _ENGINE_FIELDS.items():
        config = getattr(vllm_config, config_name, None)
        for name in names if config is not None else ():
            if hasattr(config, name):
                values[name] = _scalar(getattr(config, name))
    for name in ("max_concurrent_batches", "use_v2_model_runner"):
        try:
            values[name] = _scalar(getattr(vllm_config, name))
        except Exception:  # a property that this configuration does not answer
            continue
    return values


def _scalar(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _public(value: Any, secret: Secret) -> Any:
    """A connector's own setting: numbers stay, anything that may name a place or a person does not."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return Plain(secret).of(value)


def _group(group: Any) -> dict[str, Any]:
    return {
        "layers": list(group.layer_names),
        "eagle": bool(getattr(group, "is_eagle_group", False)),
        "spec": _spec(group.kv_cache_spec),
    }


def _spec(spec: Any) -> dict[str, Any]:
    """Class and fields of a KV cache spec; of a wrapper of several, the first one's too."""
    plain: dict[str, Any] = {"class": type(spec).__name__, "bases": [base.__name__ for base in type(spec).__mro__[1:-1]]}
    for name, value in (_fields_of(spec) or {}).items():
        if name == "kv_cache_specs":
            plain["specs"] = [_spec(inner) for inner in value.values()]
        elif isinstance(value, (tuple, list)):
            plain[name] = [str(item) if not isinstance(item, int) else item for item in value]
        else:
            plain[name] = _scalar(value)
    for name in ("page_size_bytes", "prefix_cacheable", "is_draft"):
        try:
            plain[name] = _scalar(getattr(spec, name))
        except Exception:  # not there in this release, or not for this spec
            continue
    return plain


# ---------------------------------------------------------------------------------------------------------- the scheduler


class Known:
    """A live request: its number, vLLM's object, and what has been recorded of it. tables: block IDs by group;
    num_nulls: leading nulls by group. lists: the manager's own lists, as the connector was shown them in step
    alloc_step."""

    __slots__ = ("alloc_step", "ended", "lists", "n", "num_nulls", "num_prefixes", "num_tokens", "request", "tables")

    def __init__(self, n: int, request: Any) -> None:
        self.n = n
        self.request = request
        self.num_tokens = request.num_tokens
        self.num_prefixes = 0
        self.tables: list[list[int]] | None = None
        self.num_nulls: list[int] = []
        self.lists: Any = None
        self.alloc_step = 0
        self.ended = False


class SchedulerTape(Tape):
    """What the scheduler does, seen from its connector. Hooks of the first connector speak for the engine."""

    def __init__(self, role: str, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(role, vllm_config, kv_cache_config)
        self._known: dict[str, Known] = {}
        self._num_added = 0
        self._num_steps = 0
        self._num_updates = 0
        self._managers: Any = None
        self._pool: Any = None
        self._key_map: Any = None
        self._bound: dict[str, Any] = {}
        # How a group's tables may change from step to step decides how they are looked at.
        self._watch = [_watch_of(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        self._only_grow = all(watch == "end" for watch in self._watch)
        self._has_drafts = getattr(vllm_config, "speculative_config", None) is not None
        self._allocated: list[str] = []
        # Most steps are like the one before: what repeats is left out.
        self._last_scheduled: dict[str, int] | None = None
        self._last_new: list[list[int]] | None = None
        self._in_flight: collections.deque[list[Known]] = collections.deque()

    # -- hooks: each is called after the connector's own method, with its answer ----------------------------------------

    def bind_kv_cache_manager(self, c: int, answer: Any, manager: Any) -> None:
        if c == 0:
            coordinator = getattr(manager, "coordinator", None)
            self._managers = getattr(coordinator, "single_type_managers", None)
            self._bind_pool(getattr(manager, "block_pool", None))

    def bind_gpu_block_pool(self, c: int, answer: Any, pool: Any) -> None:
        if c == 0 and self._pool is None:
            self._bind_pool(pool)

    def _bind_pool(self, pool: Any) -> None:
        self._pool = pool
        self._key_map = getattr(pool, "cached_block_hash_to_block", None)
        self._bound = {
            "t": "bound",
            "hash_block_size": getattr(pool, "hash_block_size", None),
            "num_blocks": getattr(pool, "num_gpu_blocks", None),
            "sees_tables": self._managers is not None,
        }
        self.write(self._bound)

    def on_new_request(self, c: int, answer: Any, request: Any) -> None:
        if c == 0 and request.request_id not in self._known:
            self._add(request)

    def get_num_new_matched_tokens(self, c: int, answer: Any, request: Any, num_computed_tokens: int) -> None:
        known = self._of(request)
        num_external, is_async = answer
        self.write(_with_c(c, {"t": "ask", "n": known.n, "local": num_computed_tokens, "answer": [num_external, is_async]}))

    def update_state_after_alloc(self, c: int, answer: Any, request: Any, blocks: Any, num_external_tokens: int) -> None:
        known = self._of(request)
        if c == 0:
            known.lists = getattr(blocks, "blocks", None)
            known.alloc_step = self._num_steps + 1
            self._allocated.append(request.request_id)
        self.write(_with_c(c, {"t": "alloc", "n": known.n, "external": num_external_tokens}))

    def build_connector_meta(self, c: int, answer: Any, scheduler_output: Any) -> None:
        if c == 0:
            self._num_steps += 1
            self._step(answer, scheduler_output)
        else:
            self.write({"t": "meta", "k": self._num_steps, "c": c, "selected": self._selected(answer)})
        if answer is not None:
            with contextlib.suppress(AttributeError, TypeError):  # the worker can count for itself
                setattr(answer, _STEP_TAG, self._num_steps)

    def update_connector_output(self, c: int, answer: Any, connector_output: Any) -> None:
        if c:
            return
        ends = {}
        for key, name in (("recving", "finished_recving"), ("sending", "finished_sending"), ("failed", "failed_recving")):
            ids = getattr(connector_output, name, None)
            if ids:
                ends[key] = [self._known[i].n for i in sorted(ids) if i in self._known]
        if getattr(connector_output, "invalid_block_ids", None):
            ends["invalid"] = sorted(connector_output.invalid_block_ids)
        if ends:
            self.write({"t": "loaded", **ends})

    def request_finished_all_groups(self, c: int, answer: Any, request: Any, block_ids: Any) -> None:
        known = self._known.get(request.request_id)
        if known is None:
            return
        delayed = bool(answer[0]) if isinstance(answer, tuple) else False
        status = getattr(request.status, "name", str(request.status))
        if c:
            if delayed:
                self.write({"t": "end", "c": c, "n": known.n, "delayed": True})
            return
        self._tell_reset()
        end: dict[str, Any] = {"t": "end", "n": known.n, "status": status, "tokens": request.num_tokens}
        if self._has_drafts:
            end["computed"] = request.num_computed_tokens
        if request.num_tokens > known.num_tokens:
            end["prefix"] = self._new_prefixes(known)
            if self.keeps_tokens:
                end["token_ids"] = list(request.all_token_ids[known.num_tokens :])
        if delayed:
            end["delayed"] = True
        self.write(end)
        known.ended = True
        del self._known[request.request_id]

    request_finished = request_finished_all_groups

    def take_events(self, c: int, answer: Any) -> None:
        """The scheduler asks for events at the end of each update."""
        if c:
            return
        self._num_updates += 1
        new: list[list[int]] = []
        prefixes: list[Any] = []
        token_ids: list[Any] = []
        for known in self._in_flight.popleft() if self._in_flight else ():
            num_tokens = known.request.num_tokens
            num_before = known.num_tokens
            if num_tokens == num_before or known.ended:
                continue
            new.append([known.n, num_tokens - num_before])
            known.num_tokens = num_tokens
            if self.keeps_tokens:
                token_ids.append([known.n, list(known.request.all_token_ids[num_before:])])
            if len(known.request.block_hashes) > known.num_prefixes:
                prefixes.append([known.n, self._new_prefixes(known)])
        record: dict[str, Any] = {}
        if new != self._last_new:
            record["new"] = self._last_new = new
        if prefixes:
            record["prefix"] = prefixes
        if token_ids:
            record["token_ids"] = token_ids
        head = f'"t":"update","k":{self._num_updates},"at":{time.time():.6f}'
        self.write_body(f"{head},{self._encode(record)[1:]}" if record else f"{head}}}")
        self.rotate_if_due()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _of(self, request: Any) -> Known:
        return self._known.get(request.request_id) or self._add(request)

    def _add(self, request: Any) -> Known:
        self._tell_reset()
        self._num_added += 1
        known = self._known[request.request_id] = Known(self._num_added, request)
        record = {"t": "add", **self._request(known)}
        record["prefix"] = self._new_prefixes(known)
        if self.keeps_tokens:
            record["token_ids"] = list(request.all_token_ids)
        self.write(record)
        return known

    def _request(self, known: Known) -> dict[str, Any]:
        request = known.request
        lora = getattr(request, "lora_request", None)
        salt = getattr(request, "cache_salt", None)
        record: dict[str, Any] = {
            "n": known.n,
            "id": self.request_id(request.request_id),
            "prompt": request.num_prompt_tokens,
            "max_tokens": request.max_tokens,
            "priority": getattr(request, "priority", 0),
        }
        if salt is not None:
            record["salt"] = self.secret.of(salt)
        if lora is not None:
            record["lora"] = self.secret.of(f"{lora.lora_name} {getattr(lora, 'lora_path', '')}")
        if getattr(request, "skip_reading_prefix_cache", False):
            record["skip_cache"] = True
        parts = [name for name in ("mm_features", "prompt_embeds", "pooling_params") if _is_there(request, name)]
        if getattr(request, "resumable", False):
            parts.append("resumable")
        record["parts"] = parts or ["text"]
        return record

    def _new_prefixes(self, known: Known) -> list[str]:
        hashes = known.request.block_hashes
        fresh = [self.secret.of(bytes(key)) for key in hashes[known.num_prefixes :]]
        known.num_prefixes = len(hashes)
        return fresh

    def _tell_reset(self) -> None:
        """Emptying the prefix cache puts a new map in place of the old."""
        key_map = getattr(self._pool, "cached_block_hash_to_block", None)
        if key_map is not self._key_map:
            self._key_map = key_map
            self.write({"t": "reset"})

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _step(self, metadata: Any, output: Any) -> None:
        self._tell_reset()
        known = self._known
        preempted = [known[i].n for i in sorted(getattr(output, "preempted_req_ids", None) or ()) if i in known]
        new: list[int] = []
        resumed: list[int] = []
        starts: list[list[int]] = []
        for fresh in output.scheduled_new_reqs:
            self._admit(known[fresh.req_id], fresh.num_computed_tokens, new, starts)
        cached = output.scheduled_cached_reqs
        for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=False):
            if request_id in cached.resumed_req_ids:
                self._admit(known[request_id], start, resumed, starts)
        scheduled = output.num_scheduled_tokens
        self._in_flight.append([known[i] for i in scheduled])
        record: dict[str, Any] = {}
        if scheduled != self._last_scheduled:
            self._last_scheduled = dict(scheduled)
            record["scheduled"] = [[known[i].n, tokens] for i, tokens in scheduled.items()]
        drafts = output.scheduled_spec_decode_tokens
        optional = {
            "new": new,
            "resumed": resumed,
            "preempted": preempted,
            "start": starts,
            "drafts": [[known[i].n, len(ids)] for i, ids in drafts.items() if i in known] if drafts else None,
            "zeroed": getattr(output, "new_block_ids_to_zero", None),
            "copies": [[c.src_block_id, c.dst_block_id] for c in getattr(output, "kv_cache_block_copies", None) or ()],
            "tables": self._table_patches(preempted, cached),
        }
        record.update((key, value) for key, value in optional.items() if value)
        selected = self._selected(metadata)
        if selected:
            record["selected"] = selected
        head = f'"t":"step","k":{self._num_steps},"at":{time.time():.6f}'
        self.write_body(f"{head},{self._encode(record)[1:]}" if record else f"{head}}}")

    def _admit(self, known: Known, start: int, admitted: list[int], starts: list[list[int]]) -> None:
        admitted.append(known.n)
        starts.append([known.n, start])
        known.tables = None

    def _selected(self, metadata: Any) -> dict[str, Any]:
        fills = _known_form(metadata)
        if fills is None:
            return {"form": self.plain.of(metadata)}
        return {str(self._known[i].n) if i in self._known else i: _selection(fill) for i, fill in fills.items()}

    def _table_patches(self, preempted: list[int], cached: Any) -> list[Any]:
        """(request, patches by group) of every table that has changed since the step before."""
        for request_id in self._preempted_ids(preempted):
            known = self._known[request_id]
            known.tables = None
            if known.alloc_step != self._num_steps:
                known.lists = None  # who was sent back and taken in again in this step has new ones
        patches = []
        for request_id in self._candidates(cached):
            known = self._known[request_id]
            lists = self._lists_of(request_id, known)
            if lists is None:
                continue
            if known.tables is None:
                if any(lists):
                    known.tables = [[block.block_id for block in table] for table in lists]
                    known.num_nulls = [_leading_nulls(table, 0) for table in known.tables]
                    patches.append([known.n, [[[-1, list(table)]] for table in known.tables]])
                continue
            changed = [self._patch(known, group, table) for group, table in enumerate(lists)]
            if any(changed):
                patches.append([known.n, changed])
        self._allocated.clear()
        return patches

    def _preempted_ids(self, preempted: list[int]) -> list[str]:
        return [i for i, known in self._known.items() if known.n in preempted] if preempted else []

    def _candidates(self, cached: Any) -> Any:
        """Requests whose tables may have changed: where tables only grow, those that were given blocks."""
        if not self._only_grow:
            return list(self._known)
        grown = [i for i, ids in zip(cached.req_ids, cached.new_block_ids, strict=False) if ids is not None]
        return dict.fromkeys([*self._allocated, *grown])

    def _lists_of(self, request_id: str, known: Known) -> Any:
        if self._managers is not None:
            return [manager.req_to_blocks.get(request_id, ()) for manager in self._managers]
        return known.lists

    def _patch(self, known: Known, group: int, table: Any) -> list[Any]:
        """What has changed in one table since the last step, and notes it."""
        assert known.tables is not None
        old = known.tables[group]
        watch = self._watch[group]
        num_old = len(old)
        if watch == "all" or len(table) < num_old:
            ids = [block.block_id for block in table]
            if ids == old:
                return []
            known.tables[group] = ids
            return [[-1, list(ids)]]
        patches: list[Any] = []
        if watch == "front" and num_old:
            start = end = known.num_nulls[group]
            while end < num_old and table[end].block_id == 0:
                end += 1
            if end > start:
                old[start:end] = [0] * (end - start)
                patches.append([start, [0] * (end - start)])
                known.num_nulls[group] = end
        if len(table) > num_old:
            fresh = [block.block_id for block in table[num_old:]]
            old.extend(fresh)
            patches.append([num_old, fresh])
            known.num_nulls[group] = _leading_nulls(old, known.num_nulls[group])
        return patches

    def state(self) -> dict[str, Any]:
        self._last_scheduled = self._last_new = None
        requests = []
        for known in self._known.values():
            entry = self._request(known)
            entry.update(tokens=known.num_tokens, tables=known.tables)
            entry["prefix"] = [self.secret.of(bytes(key)) for key in known.request.block_hashes[: known.num_prefixes]]
            requests.append(entry)
        bound = {k: v for k, v in self._bound.items() if k != "t"}
        return {"t": "state", "k": self._num_steps, "updates": self._num_updates, "requests": requests, **bound}


def _with_c(c: int, record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "c": c} if c else record


def _is_there(request: Any, name: str) -> bool:
    value = getattr(request, name, None)
    return value is not None and (not isinstance(value, (list, tuple)) or len(value) > 0)


def _leading_nulls(ids: list[int], start: int) -> int:
    while start < len(ids) and ids[start] == 0:
        start += 1
    return start


def _watch_of(spec: Any) -> str:
    """`end`: a table only grows; `front`: its front also turns null, entry by entry; `all`: anything may happen."""
    names = [base.__name__ for base in type(spec).__mro__]
    if "SlidingWindowSpec" in names or "ChunkedLocalAttentionSpec" in names:
        return "front"
    if "RSWASpec" in names or "SinkFullAttentionSpec" in names:
        return "all"
    return "end" if "FullAttentionSpec" in names or "CircularBufferSpec" in names else "all"


# ------------------------------------------------------------------------------------------------------------- the worker


class WorkerTape(Tape):
    """What one worker is told, and what its loads leave in KV memory."""

    def __init__(self, role: str, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(role, vllm_config, kv_cache_config)
        self._num_bound: dict[int, int] = {}
        self.steps: dict[int, int] = {}  # by place: the step whose metadata is bound
        self._fills: dict[int, dict[str, Any] | None] = {}
        self._memory: Memory | None = None
        self._forward_seen_in = 0

    def register_kv_caches(self, c: int, answer: Any, kv_caches: Any) -> None:
        if c:
            return
        self._memory = Memory(kv_caches, self.kv_cache_config, self.verify)
        self.write({"t": "memory", "num_blocks": self.kv_cache_config.num_blocks, "layers": self._memory.about()})

    def bind_connector_metadata(self, c: int, answer: Any, connector_metadata: Any) -> None:
        if c == 0:
            self.rotate_if_due()
        self._num_bound[c] = self._num_bound.get(c, 0) + 1
        step = getattr(connector_metadata, _STEP_TAG, None)
        self.steps[c] = step if isinstance(step, int) else self._num_bound[c]
        fills = self._fills[c] = _known_form(connector_metadata)
        if fills is None:
            selected: dict[str, Any] = {"form": self.plain.of(connector_metadata)}
        else:
            selected = {self.request_id(i): _selection(fill) for i, fill in fills.items()}
        if selected or c:
            self.write(_with_c(c, {"t": "received", "k": self.steps[c], "selected": selected}))
        else:
            self.write_body(f'"t":"received","k":{self.steps[c]}}}')

    def before_start_load_kv(self, c: int) -> Any:
        """Checksums of the blocks to be written and of some others, before the load."""
        fills = self._fills.get(c)
        if self.verify == "off" or self._memory is None or not fills:
            return None
        wanted: list[list[int]] = [[] for _ in self.kv_cache_config.kv_cache_groups]
        for ids_by_group, _ in fills.values():
            for blocks, ids in zip(wanted, ids_by_group, strict=False):
                blocks.extend(ids)
        return self._memory.look([list(dict.fromkeys(ids)) for ids in wanted])

    def wait_for_layer_load(self, c: int) -> None:
        """A layer of the forward pass is about to run; the first one tells."""
        step = self.steps.get(c, 0)
        if step == self._forward_seen_in:
            return
        self._forward_seen_in = step
        if any(self._fills.values()):
            self.write({"t": "forward", "k": step})

    def start_load_kv(self, c: int, before: Any) -> None:
        fills = self._fills.get(c)
        if fills is not None and not fills:
            return
        record: dict[str, Any] = {"t": "load", "k": self.steps.get(c, 0)}
        if before is not None:
            assert self._memory is not None
            record["written"] = self._memory.compare(before)
        self.write(_with_c(c, record))


class WorkerView:
    """What one connector of a worker is told, for who watches its loads beside the probe. start, folder: of the trace;
    step: whose metadata is bound; requests: per request and group, the IDs of the blocks to be loaded."""

    def __init__(self, connector: Any) -> None:
        """connector: an instance of a probe's class. Raises KeyError if the probe does not record it."""
        self._connector = connector
        self._tape: WorkerTape = connector.__dict__["_kvprobe_tape"]
        self._place: int = connector.__dict__["_kvprobe_place"]
        self.start = self._tape.start
        self.folder = self._tape.folder
        self.kv_cache_config = self._tape.kv_cache_config

    @property
    def step(self) -> int:
        return self._tape.steps[self._place]

    @property
    def requests(self) -> list[list[list[int]]]:
        fills = _known_form(self._connector._get_connector_metadata()) or {}
        return [[list(ids) for ids in ids_by_group] for ids_by_group, _ in fills.values()]


class Layer:
    """A layer's KV memory as rows of one block each. rows_per_block 0: its shape does not tell blocks apart."""

    def __init__(self, name: str, group: int, cache: Any, num_blocks: int) -> None:
        self.name = name
        self.group = group
        self.cache = cache
        is_tensor = hasattr(cache, "shape") and len(cache.shape) > 0
        divides = is_tensor and cache.shape[0] > 0 and cache.shape[0] % num_blocks == 0
        self.rows_per_block = cache.shape[0] // num_blocks if divides else 0
        self.block_bytes = self.rows_per_block * cache[0].numel() * cache.element_size() if divides else 0

    def about(self) -> list[Any]:
        cache = self.cache
        if not hasattr(cache, "shape"):
            return [self.name, self.group, None, None, type(cache).__name__, None, 0]
        stride = list(cache.stride())
        return [self.name, self.group, list(cache.shape), stride, str(cache.dtype), str(cache.device), self.rows_per_block]

    def rows(self, blocks: list[int]) -> Any:
        """A copy of the blocks' bytes: [blocks, bytes of a block]."""
        import torch

        ratio = self.rows_per_block
        rows = [block * ratio + i for block in blocks for i in range(ratio)]
        index = torch.tensor(rows, dtype=torch.long, device=self.cache.device)
        # As integers of the same size, which every device can pick; not all can pick every kind of number.
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.cache.element_size()]
        return self.cache.view(whole).index_select(0, index).contiguous().view(torch.uint8).reshape(len(blocks), -1)


class Memory:
    """Reads KV memory, a bounded piece at a time; never writes."""

    _CHUNK_BYTES = 16 << 20
    _MOST_BLOCKS, _MOST_LAYERS, _MOST_OTHERS = 16, 4, 16

    def __init__(self, kv_caches: Any, kv_cache_config: Any, verify: str) -> None:
        self._num_blocks = kv_cache_config.num_blocks
        self._samples = verify == "sample"
        groups = kv_cache_config.kv_cache_groups
        self._num_groups = len(groups)
        group_of = {name: index for index, group in enumerate(groups) for name in group.layer_names}
        self._layers = [Layer(n, group_of.get(n, -1), t, self._num_blocks) for n, t in kv_caches.items()]
        self._turn = 0

    def about(self) -> list[Any]:
        return [layer.about() for layer in self._layers]

    def look(self, wanted: list[list[int]]) -> list[Any]:
        """[layer, blocks, how many of them are to be written, checksums] of every layer looked at."""
        asked = {block for ids in wanted for block in ids}
        others = self._others(asked)
        looks = []
        for group, ids in enumerate(wanted):
            ids = [block for block in ids if 0 <= block < self._num_blocks]
            chosen = _spread(ids, self._MOST_BLOCKS) if self._samples else ids
            layers = [layer for layer in self._layers if layer.group == group and layer.rows_per_block]
            if self._samples:
                layers = _spread(layers, self._MOST_LAYERS)
            for layer in layers:
                blocks = chosen + others
                looks.append([layer, blocks, len(chosen), self._checksums(layer, blocks)])
        return looks

    def _others(self, asked: set[int]) -> list[int]:
        """Some blocks that nobody is to write, other ones each time."""
        self._turn += 1
        free = self._num_blocks - len(asked)
        step = max(free // self._MOST_OTHERS, 1)
        start = self._turn * 7919 % step
        candidates = itertools.islice((b for b in range(self._num_blocks) if b not in asked), start, None, step)
        return list(itertools.islice(candidates, self._MOST_OTHERS))

    def _chunks(self, layer: Layer, blocks: list[int]) -> Any:
        size = max(self._CHUNK_BYTES // max(layer.block_bytes, 1), 1)
        for start in range(0, len(blocks), size):
            yield layer.rows(blocks[start : start + size])

    def _checksums(self, layer: Layer, blocks: list[int]) -> list[tuple[int, int]]:
        import torch

        sums: list[tuple[int, int]] = []
        for rows in self._chunks(layer, blocks):
            width = next(w for w in (8, 4, 2, 1) if rows.shape[1] % w == 0)
            words = rows.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]).to(torch.int64)
            weights = torch.arange(words.shape[1], device=words.device) * 2_654_435_761 + 1
            plain = words.sum(1).tolist()
            weighted = (words * weights).sum(1).tolist()  # wraps, which is as good
            sums.extend(zip(plain, weighted, strict=True))
        return sums

    def compare(self, looks: list[Any]) -> list[dict[str, Any]]:
        entries = []
        for layer, blocks, num_wanted, before in looks:
            after = self._checksums(layer, blocks)
            changed = [b for b, one, other in zip(blocks, before, after, strict=True) if one != other]
            wanted = blocks[:num_wanted]
            values, mixed = self._values(layer, wanted)
            entries.append(
                {
                    "layer": layer.name,
                    "group": layer.group,
                    "changed": [b for b in wanted if b in changed],
                    "equal": [b for b in wanted if b not in changed],
                    "values": [[value, ids] for value, ids in values.items()],
                    "mixed": mixed,
                    "outside": [b for b in blocks[num_wanted:] if b in changed],
                    "num_others": len(blocks) - num_wanted,
                    "block_bytes": layer.block_bytes,
                }
            )
        return entries

    def _values(self, layer: Layer, blocks: list[int]) -> tuple[dict[str, list[int]], list[int]]:
        """Blocks by the one element that they consist of, and those that do not."""
        values: dict[str, list[int]] = {}
        mixed: list[int] = []
        width = layer.cache.element_size()
        place = iter(blocks)
        for rows in self._chunks(layer, blocks):
            elements = rows.reshape(rows.shape[0], -1, width)
            same = (elements == elements[:, :1]).all(2).all(1).tolist()
            firsts = elements[:, 0].tolist()
            for is_same, first, block in zip(same, firsts, place, strict=False):
                if is_same:
                    values.setdefault(bytes(first).hex(), []).append(block)
                else:
                    mixed.append(block)
        return values, mixed


def _spread(items: list[Any], most: int) -> list[Any]:
    """At most so many, first and last among them, the others evenly between."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# ------------------------------------------------------------------------------------------------------------- the classes

_HOOKS = (
    "bind_kv_cache_manager",
    "bind_gpu_block_pool",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "register_kv_caches",
    "bind_connector_metadata",
)


def _hooked(base: type, name: str) -> Any:
    """The connector's method; afterwards the tape gets its arguments and its answer."""
    method = getattr(base, name)

    @functools.wraps(method)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = self.__dict__.get("_kvprobe_tape")
        try:
            answer = method(self, *args, **kwargs)
        except Exception as error:
            _note_raised(tape, name, error)
            raise
        if tape is not None and tape.is_alive:
            try:
                hook = getattr(tape, name, None)
                if hook is not None:
                    hook(self.__dict__["_kvprobe_place"], answer, *args, *kwargs.values())
            except Exception as error:
                tape.fail(error, name)
        return answer

    return hooked


def _hooked_load(base: type) -> Any:
    """start_load_kv: looked at before, too."""
    method = base.start_load_kv  # type: ignore[attr-defined]

    @functools.wraps(method)
    def start_load_kv(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = self.__dict__.get("_kvprobe_tape")
        place = self.__dict__.get("_kvprobe_place")
        before = None
        if isinstance(tape, WorkerTape) and tape.is_alive:
            try:
                before = tape.before_start_load_kv(place)
            except Exception as error:
                tape.fail(error, "start_load_kv")
        try:
            answer = method(self, *args, **kwargs)
        except Exception as error:
            _note_raised(tape, "start_load_kv", error)
            raise
        if isinstance(tape, WorkerTape) and tape.is_alive:
            try:
                tape.start_load_kv(place, before)
            except Exception as error:
                tape.fail(error, "start_load_kv")
        return answer

    return start_load_kv


def _hooked_layer(base: type) -> Any:
    """wait_for_layer_load: a layer of the forward pass is about to run."""
    method = base.wait_for_layer_load  # type: ignore[attr-defined]

    @functools.wraps(method)
    def wait_for_layer_load(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = self.__dict__.get("_kvprobe_tape")
        if isinstance(tape, WorkerTape) and tape.is_alive:
            try:
                tape.wait_for_layer_load(self.__dict__["_kvprobe_place"])
            except Exception as error:
                tape.fail(error, "wait_for_layer_load")
        return method(self, *args, **kwargs)

    return wait_for_layer_load


def _note_raised(tape: Tape | None, name: str, error: Exception) -> None:
    if tape is not None and tape.is_alive:
        try:
            tape.write({"t": "raised", "hook": name, "type": type(error).__name__})
        except Exception as failure:
            tape.fail(failure, name)


def _hooked_init(base: type, name: str) -> Any:
    method = base.__init__  # type: ignore[misc]

    @functools.wraps(method)
    def __init__(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        method(self, vllm_config, role, kv_cache_config)
        try:
            tape = _tape(role.name.lower(), vllm_config, kv_cache_config)
            if tape.is_alive:
                self.__dict__["_kvprobe_place"] = tape.add_connector(self, name, vllm_config)
                self.__dict__["_kvprobe_tape"] = tape
        except Exception as error:
            _log.error("kvprobe does not record: %s: %s", type(error).__name__, error, exc_info=error)

    return __init__


@functools.cache
def _probe_class(name: str) -> type:
    base = _wrapped_class(name)
    hooks: dict[str, Any] = {hook: _hooked(base, hook) for hook in _HOOKS if hasattr(base, hook)}
    hooks["start_load_kv"] = _hooked_load(base)
    hooks["wait_for_layer_load"] = _hooked_layer(base)
    hooks["__init__"] = _hooked_init(base, base.__name__)
    # The class keeps the connector's name: vLLM files metrics and statistics under it.
    return type(base)(base.__name__, (base,), {**hooks, "__module__": __name__, "__doc__": base.__doc__})


def _wrapped_class(name: str) -> type:
    """The connector's own class: registered, or `package.module.Class`."""
    module_path, _, class_name = name.rpartition(".")
    if module_path:
        found: type = getattr(importlib.import_module(module_path), class_name)
        return found
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        known = ", ".join(sorted(KVConnectorFactory._registry))
        raise AttributeError(f"kvprobe: {name!r} is no registered connector ({known}) and no package.module.Class")
    registered: type = KVConnectorFactory._registry[name]()
    return registered


def __getattr__(name: str) -> type:
    """Connector classes on demand: `Probe_NAME`, or the connector's own name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _probe_class(name.removeprefix(PREFIX))

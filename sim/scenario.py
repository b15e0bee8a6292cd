"""The scenario: what to do, as a plain value with a strict schema.

A scenario comes from YAML or JSON (`load`, `parse`) and goes back to readable YAML (`dump`). Everything is checked here,
once; the rest of the program trusts it. An error names the path of the offending value and the reason.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import yaml
from msgspec import Meta, Struct

VERSION = 1

Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
PlainDtype = Literal["bfloat16", "float16", "float32"]
Dtype = PlainDtype | Literal["fp8", "fp8_e4m3", "fp8_e5m2", "packed"]
"""`fp8` is vLLM's name for the platform's own format, e4m3 on most; `packed`: bytes with scales or indexes among them."""


class ScenarioError(ValueError):
    """Bad input. `path` is a JSON path such as `$.groups[1].window`; `reason` says what is wrong and what is allowed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class _Value(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """An immutable value; equal by content; unknown keys refused; defaults left out when written."""


class Speculative(_Value, frozen=True, kw_only=True):
    """Drafted tokens per request and step, and how many of them are accepted, in turn. Those of an admission that is padded
    to the shape of a decode step stand for none: they are rejected, and take no turn."""

    method: Literal["ngram", "draft_model", "eagle"] = "ngram"
    tokens: Count
    accept: tuple[Natural, ...] = ()


class Engine(_Value, frozen=True, kw_only=True):
    """The settings of vLLM's engine that decide block IDs. Sizes and limits are in tokens, `blocks` in blocks."""

    blocks: Annotated[int, Meta(ge=2)]
    prefix_caching: bool = True
    max_model_len: Annotated[int, Meta(ge=2)] = 4096
    max_num_seqs: Count = 16
    max_num_batched_tokens: Count = 8192
    chunked_prefill: bool = True
    long_prefill_token_threshold: Natural = 0
    long_prefill_adaptive: bool = False
    prefill_schedule_interval: Count = 1
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False
    dcp: Count = 1
    retention_interval: Natural | None = 0
    prefix_match_unit: Count | None = None
    watermark: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    reserve_full_isl: bool = True
    speculative: Speculative | None = None
    kv_events: bool = False


class Connector(_Value, frozen=True, kw_only=True):
    """The KV connector, by its registered name, and its `kv_connector_extra_config`. load_failure: what becomes of a
    request whose load failed, vLLM's `kv_load_failure_policy`."""

    name: Name
    extra: dict[str, Any] = {}
    load_failure: Literal["fail", "recompute"] = "fail"


class StateTensor(_Value, frozen=True, kw_only=True):
    """A tensor in which a worker keeps states of one layer, for all requests, outside of paged memory."""

    dtype: PlainDtype = "bfloat16"
    shape: Annotated[tuple[Count, ...], Meta(min_length=1)] = (4, 32)


class Layers(_Value, frozen=True, kw_only=True):
    """Layers of a group whose pages have a size of their own."""

    layers: Count = 1
    heads: Count = 1
    head_size: Count = 32


class Group(_Value, frozen=True, kw_only=True, tag_field="kind"):
    """One KV cache group. `block` and `kernel_block` are in tokens; `kernel_block` None means the same as `block`.
    uniform: more layers of the same kind in the group, with pages of other sizes; allocation does not tell them apart.
    unknown: how the first layers are registered with the connector where it is not as tensors: not at all (`absent`), as
    some `object`, or as a `list` with such an object in it. It has to leave them alone."""

    block: Count
    layers: Count = 1
    dtype: Dtype = "bfloat16"
    kernel_block: Count | None = None
    heads: Count = 1
    head_size: Count = 32
    draft: bool = False
    dcp_sharded: bool | None = None
    uniform: tuple[Layers, ...] = ()
    unknown: tuple[Literal["absent", "object", "list"], ...] = ()

    @property
    def num_layers(self) -> int:
        """All layers, of whatever page size."""
        return self.layers + sum(part.layers for part in self.uniform)

    @property
    def kind(self) -> str:
        tag = self.__struct_config__.tag
        assert isinstance(tag, str)
        return tag


class Full(Group, frozen=True, kw_only=True, tag="full"):
    """Full attention."""


class MLA(Group, frozen=True, kw_only=True, tag="mla"):
    """Multi-head latent attention: allocated like full attention, one latent vector a token."""


class SlidingWindow(Group, frozen=True, kw_only=True, tag="sliding_window"):
    """Sliding window attention over the last `window` tokens."""

    window: Count


class RSWA(Group, frozen=True, kw_only=True, tag="rswa"):
    """Reference sliding window: the prompt is kept, the window slides over the output."""

    window: Count


class SlidingWindowMLA(Group, frozen=True, kw_only=True, tag="sliding_window_mla"):
    """Sliding window attention with MLA's cache format. With `bounded_replay` it is not cached: the last `window` tokens
    before the end of a hit are computed anew."""

    window: Count
    bounded_replay: bool = False


class ChunkedLocal(Group, frozen=True, kw_only=True, tag="chunked_local"):
    """Attention within chunks of `chunk` tokens."""

    chunk: Count


class Mamba(Group, frozen=True, kw_only=True, tag="mamba"):
    """A state-space group: a block holds a state, not tokens. `checkpoint_blocks` reserves blocks for a state inside a
    prefill step, at positions `checkpoint_alignment` tokens apart from the step's start. states: each layer is registered
    as a list of these tensors instead of pages; blocks are allocated all the same."""

    mode: Literal["none", "align", "all"] = "none"
    speculative_blocks: Natural = 0
    checkpoint_blocks: Natural = 0
    checkpoint_alignment: Count | None = None
    states: tuple[StateTensor, ...] = ()


class Circular(Group, frozen=True, kw_only=True, tag="circular"):
    """A circular buffer: one block per request for its whole life; `block` is the ring's capacity in tokens."""


class Cross(Group, frozen=True, kw_only=True, tag="cross"):
    """Cross attention over encoder tokens."""


AnyGroup = Full | MLA | SlidingWindow | SlidingWindowMLA | RSWA | ChunkedLocal | Mamba | Circular | Cross


class Span(NamedTuple):
    """`count` tokens of a stream, from index `start`. Token i of stream S is the same everywhere in a scenario."""

    stream: str
    start: int
    count: int  # type: ignore[assignment]  # a field hides the method of tuple


class Add(_Value, frozen=True, kw_only=True):
    """A request arrives. `external` and `load` speak to the scripted connector only; with `skip_cache` it does not read
    the prefix cache, as requests for prompt log probabilities do not. `output` is what it generates before it goes on with
    its own stream `ID.out`: a replay of a recorded run may generate what another request did.
    With `embeds` the prompt comes as embeddings, one a token, which no prompt of tokens equals. `encoder`: tokens of the
    input that the request's cross attention sees."""

    id: Name
    prompt: tuple[Span, ...]
    max_tokens: Count = 16
    priority: int = 0
    salt: str | None = None
    lora: str | None = None
    skip_cache: bool = False
    embeds: bool = False
    encoder: Natural = 0
    external: Natural | None = None
    load: Literal["sync", "async"] | None = None
    output: tuple[Span, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.count for span in self.prompt)


class Direct(_Value, frozen=True, kw_only=True):
    """Direct driver: a request of `num_tokens` tokens with hand-made block tables and `local` cached tokens."""

    id: Name
    num_tokens: Count
    local: Natural
    tables: tuple[tuple[Natural, ...], ...]


class Step(_Value, frozen=True, kw_only=True):
    """`count` engine steps: schedule, act, update."""

    count: Count


class Schedule(_Value, frozen=True, kw_only=True):
    """The first half of a step, `count` times."""

    count: Count


class Update(_Value, frozen=True, kw_only=True):
    """The second half of a step, `count` times."""

    count: Count


class Run(_Value, frozen=True, kw_only=True):
    """Engine steps until no request is left, at most `limit`; given up after STALL_STEPS steps that schedule nothing."""

    limit: Count


class Abort(_Value, frozen=True, kw_only=True):
    """The client of request `id` goes away."""

    id: Name


class ResetPrefixCache(_Value, frozen=True, kw_only=True):
    """Forget all cached keys; `running` also preempts the running requests first."""

    running: bool = False


class Pause(_Value, frozen=True, kw_only=True):
    """The engine stops admitting new requests (`new`), stops altogether (`all`), or goes on (`none`)."""

    what: Literal["none", "new", "all"]


class LoadDone(_Value, frozen=True, kw_only=True):
    """The asynchronous load of request `id` has arrived (scripted connector)."""

    id: Name


class LoadFailed(_Value, frozen=True, kw_only=True):
    """The load of request `id` failed from its block `from_block` on (scripted connector). A synchronous one has its output
    still to be processed: the step stands between `schedule` and `update`. With several groups the whole load failed."""

    id: Name
    from_block: Natural = 0


AnyStep = Add | Direct | Step | Schedule | Update | Run | Abort | ResetPrefixCache | Pause | LoadDone | LoadFailed

STALL_STEPS = 3


class Scenario(_Value, frozen=True, kw_only=True):
    """A whole case. `driver` says who is in charge: vLLM's scheduler, or hand-made tables shown to the connector."""

    about: str = ""
    driver: Literal["scheduler", "direct"] = "scheduler"
    engine: Engine
    connector: Connector | None = None
    groups: tuple[AnyGroup, ...]
    steps: tuple[AnyStep, ...]


# --------------------------------------------------------------------------------------------------------------- parsing

# Key of a step -> (type, field that a bare value stands for). `- step: 3` and `- abort: B` are such bare values.
_STEP_TYPES: dict[str, tuple[type[Any], str | None]] = {
    "add": (Add, None),
    "direct": (Direct, None),
    "step": (Step, "count"),
    "schedule": (Schedule, "count"),
    "update": (Update, "count"),
    "run": (Run, "limit"),
    "abort": (Abort, "id"),
    "reset_prefix_cache": (ResetPrefixCache, None),
    "pause": (Pause, "what"),
    "load_done": (LoadDone, "id"),
    "load_failed": (LoadFailed, None),
}
_STEP_KEYS = {step_type: (key, bare) for key, (step_type, bare) in _STEP_TYPES.items()}
_UNKNOWN_KEY = re.compile(r"Object contains unknown field `(.*)`")
_MISSING_KEY = re.compile(r"Object missing required field `(.*)`")
_TOP_KEYS = ("kvoracle", "about", "driver", "engine", "connector", "groups", "steps")


def load(path: str | Path) -> Scenario:
    """Reads a scenario from a YAML or JSON file. Raises ScenarioError on bad content, OSError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScenarioError("$", f"not a text file: {error.reason} at byte {error.start}") from None
    return loads(text)


def loads(text: str) -> Scenario:
    """Reads a scenario from YAML or JSON text. Raises ScenarioError."""
    try:
        raw = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        place = f" in line {where.line + 1}" if where else ""
        reason = getattr(error, "problem", None) or "cannot be parsed"
        raise ScenarioError("$", f"not valid YAML{place}: {reason}") from None
    return parse(raw)


def parse(raw: object) -> Scenario:
    """Builds a scenario from plain data (dicts, lists, strings, numbers). Raises ScenarioError."""
    top = _mapping(raw, "$", _TOP_KEYS)
    if top.get("kvoracle") != VERSION:
        raise ScenarioError("$.kvoracle", f"must be {VERSION}, the version of the scenario format")
    for key in ("engine", "groups", "steps"):
        if key not in top:
            raise ScenarioError(f"$.{key}", "missing")
    about = _convert(top.get("about", ""), str, "$.about")
    driver = _convert(top.get("driver", "scheduler"), Literal["scheduler", "direct"], "$.driver")
    engine = _convert(top["engine"], Engine, "$.engine")
    connector = _convert(top.get("connector"), Connector | None, "$.connector")
    groups = tuple(
        _convert(_known_kind(item, f"$.groups[{i}]"), AnyGroup, f"$.groups[{i}]")
        for i, item in enumerate(_sequence(top["groups"], "$.groups"))
    )
    steps = tuple(_parse_step(item, f"$.steps[{i}]") for i, item in enumerate(_sequence(top["steps"], "$.steps")))
    scenario = Scenario(about=about, driver=driver, engine=engine, connector=connector, groups=groups, steps=steps)
    check(scenario)
    return scenario


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe subset; a repeated key is an error instead of a silent overwrite."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int)) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"repeated key {key!r}", key_node.start_mark)
            if isinstance(key, (str, int)):
                seen.add(key)
        return super().construct_mapping(node, deep)


def _convert(value: object, to: Any, path: str) -> Any:
    try:
        return msgspec.convert(value, to)
    except msgspec.ValidationError as error:
        reason, _, tail = str(error).partition(" - at `")
        place = path + tail.removesuffix("`").removeprefix("$")
        if key := _UNKNOWN_KEY.fullmatch(reason):
            raise ScenarioError(f"{place}.{key[1]}", "unknown key") from None
        if key := _MISSING_KEY.fullmatch(reason):
            raise ScenarioError(f"{place}.{key[1]}", "missing") from None
        raise ScenarioError(place, reason.replace("`", "'")) from None


def _mapping(raw: object, path: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ScenarioError(path, f"expected a mapping, found {_describe(raw)}")
    for key in raw:
        if key not in keys:
            raise ScenarioError(f"{path}.{key}", f"unknown key; known here: {', '.join(keys)}")
    return raw


def _sequence(raw: object, path: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ScenarioError(path, f"expected a list, found {_describe(raw)}")
    return raw


def _describe(raw: object) -> str:
    return "nothing" if raw is None else f"{type(raw).__name__} {str(raw)[:40]!r}"


def _known_kind(raw: object, path: str) -> object:
    kinds = [str(kind.__struct_config__.tag) for kind in get_args(AnyGroup)]
    if isinstance(raw, dict) and raw.get("kind") not in kinds:
        raise ScenarioError(f"{path}.kind", f"must be one of {', '.join(kinds)}; found {raw.get('kind')!r}")
    return raw


def _parse_step(raw: object, path: str) -> AnyStep:
    body = _mapping(raw, path, tuple(_STEP_TYPES))
    if len(body) != 1:
        raise ScenarioError(path, f"a step has exactly one key, found {len(body)}: {', '.join(body) or 'none'}")
    ((key, value),) = body.items()
    step_type, bare = _STEP_TYPES[key]
    path = f"{path}.{key}"
    if bare is not None:
        try:
            return _convert({bare: value}, step_type, path)  # type: ignore[no-any-return]
        except ScenarioError as error:
            raise ScenarioError(error.path.removesuffix("." + bare), error.reason) from None
    if step_type is Add and isinstance(value, dict):
        spans = {name: _parse_spans(value[name], f"{path}.{name}") for name in ("prompt", "output") if name in value}
        value = {**value, **spans}
    return _convert(value if value is not None else {}, step_type, path)  # type: ignore[no-any-return]


def _parse_spans(raw: object, path: str) -> list[Span]:
    return [_parse_span(item, f"{path}[{i}]") for i, item in enumerate(_sequence(raw, path))]


def _parse_span(raw: object, path: str) -> Span:
    items = _sequence(raw, path)
    if len(items) not in (2, 3):
        raise ScenarioError(path, "must be [stream, count] or [stream, start, count]")
    stream = _convert(items[0], Name, f"{path}[0]")
    start = _convert(items[1], Natural, f"{path}[1]") if len(items) == 3 else 0
    count = _convert(items[-1], Count, f"{path}[{len(items) - 1}]")
    return Span(stream, start, count)


# -------------------------------------------------------------------------------------------------------------- checking


def check(scenario: Scenario) -> None:
    """Checks what types cannot say: values that contradict each other. Raises ScenarioError."""
    if not scenario.groups:
        raise ScenarioError("$.groups", "at least one KV cache group is needed")
    for i, group in enumerate(scenario.groups):
        _check_group(group, f"$.groups[{i}]")
    _check_in_flight(scenario)
    _check_cross_attention(scenario)
    live: dict[str, Add] = {}
    scripted = {step.id for step in scenario.steps if isinstance(step, Add) and step.output}
    for i, step in enumerate(scenario.steps):
        path = f"$.steps[{i}]"
        if isinstance(step, Direct) != (scenario.driver == "direct") and isinstance(step, (Add, Direct)):
            raise ScenarioError(
                path,
                f"the {scenario.driver} driver takes "
                + ("'direct' steps" if scenario.driver == "direct" else "'add' steps"),
            )
        if isinstance(step, Add):
            _check_add(step, scenario.engine, f"{path}.add")
            if step.id in scripted and step.id in live:
                raise ScenarioError(f"{path}.add.id", f"{step.id!r} came before; with 'output' an ID is used once")
            live[step.id] = step
        elif isinstance(step, Direct):
            _check_direct(step, scenario, f"{path}.direct")
            live[step.id] = Add(id=step.id, prompt=())
        elif isinstance(step, (Abort, LoadDone, LoadFailed)) and step.id not in live:
            raise ScenarioError(path, f"no request {step.id!r} was added before this step")
        elif isinstance(step, LoadFailed) and len(scenario.groups) > 1 and live[step.id].load != "async":
            raise ScenarioError(
                f"{path}.load_failed", "with several groups a connector can only report asynchronous loads as failed"
            )
        elif scenario.driver == "direct" and not isinstance(step, (Step, Abort)):
            raise ScenarioError(path, "the direct driver takes 'direct', 'step' and 'abort' steps only")


def _check_in_flight(scenario: Scenario) -> None:
    """An output is processed before the next step is scheduled; in an asynchronous engine, before the one after that."""
    most = 2 if scenario.engine.async_scheduling else 1
    num_in_flight = 0
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Update):
            num_in_flight = max(0, num_in_flight - step.count)
        elif isinstance(step, (Schedule, Step, Run)):
            num_in_flight += step.count if isinstance(step, Schedule) else 1
            if num_in_flight > most:
                path = f"$.steps[{i}].{_STEP_KEYS[type(step)][0]}"
                raise ScenarioError(path, f"more than {most} outputs would wait to be processed; 'update' them first")
            if not isinstance(step, Schedule):
                num_in_flight = most - 1 if isinstance(step, Step) else 0


def _check_cross_attention(scenario: Scenario) -> None:
    """Where there is an encoder, vLLM turns prefix caching and chunks off, and takes no connector."""
    engine = scenario.engine
    if not any(isinstance(group, Cross) for group in scenario.groups):
        for i, step in enumerate(scenario.steps):
            if isinstance(step, Add) and step.encoder:
                raise ScenarioError(f"$.steps[{i}].add.encoder", "no group of kind cross would take it")
        return
    if all(isinstance(group, Cross) for group in scenario.groups):
        raise ScenarioError("$.groups", "a decoder with cross attention has a group of another kind, too")
    if engine.dcp > 1:
        raise ScenarioError("$.engine.dcp", "above 1 is not modelled beside cross attention")
    if engine.prefix_caching:
        raise ScenarioError("$.engine.prefix_caching", "must be false beside cross attention")
    if engine.chunked_prefill:
        raise ScenarioError("$.engine.chunked_prefill", "must be false beside cross attention")
    if engine.long_prefill_token_threshold:
        raise ScenarioError("$.engine.long_prefill_token_threshold", "must be 0 beside cross attention")
    if scenario.connector is not None:
        raise ScenarioError("$.connector", "must be null beside cross attention")
    for i, step in enumerate(scenario.steps):
        if isinstance(step, Add) and step.encoder > engine.max_num_batched_tokens:
            raise ScenarioError(f"$.steps[{i}].add.encoder", "must be at most max_num_batched_tokens; it is never split")


def _check_group(group: AnyGroup, path: str) -> None:
    if group.kernel_block is not None and group.block % group.kernel_block:
        raise ScenarioError(f"{path}.kernel_block", f"must divide the block of {group.block} tokens")
    if group.uniform and isinstance(group, (Mamba, Cross)):
        raise ScenarioError(f"{path}.uniform", f"layers of kind {group.kind} have pages of one size")
    if len(group.unknown) > group.num_layers:
        raise ScenarioError(f"{path}.unknown", f"more than the group's {group.num_layers} layers")


def _check_add(add: Add, engine: Engine, path: str) -> None:
    num_prompt_tokens = add.num_prompt_tokens
    if num_prompt_tokens == 0:
        raise ScenarioError(f"{path}.prompt", "an empty prompt; at least one token is needed")
    if num_prompt_tokens >= engine.max_model_len:
        raise ScenarioError(
            f"{path}.prompt",
            f"{num_prompt_tokens} tokens leave no room under max_model_len {engine.max_model_len}",
        )


def _check_direct(direct: Direct, scenario: Scenario, path: str) -> None:
    if direct.local >= direct.num_tokens:
        raise ScenarioError(f"{path}.local", f"must be below num_tokens {direct.num_tokens}")
    if len(direct.tables) != len(scenario.groups):
        raise ScenarioError(f"{path}.tables", f"one block table per group: {len(scenario.groups)} expected")
    for group_index, table in enumerate(direct.tables):
        for block_index, block_id in enumerate(table):
            if block_id >= scenario.engine.blocks:
                raise ScenarioError(
                    f"{path}.tables[{group_index}][{block_index}]",
                    f"block {block_id} is outside the pool of {scenario.engine.blocks} blocks",
                )


# --------------------------------------------------------------------------------------------------------------- writing


def plain(scenario: Scenario) -> dict[str, Any]:
    """The scenario as plain data that `parse` reads back."""
    raw: dict[str, Any] = {"kvoracle": VERSION}
    if scenario.about:
        raw["about"] = scenario.about
    if scenario.driver != "scheduler":
        raw["driver"] = scenario.driver
    raw["engine"] = _changed(scenario.engine)
    raw["connector"] = _changed(scenario.connector) if scenario.connector is not None else None
    raw["groups"] = [_changed(group) for group in scenario.groups]
    raw["steps"] = [_plain_step(step) for step in scenario.steps]
    return raw


def _changed(value: Struct) -> dict[str, Any]:
    """A value as plain data without what equals its default. msgspec leaves out the very same object only."""
    defaults = _defaults(type(value))
    raw: dict[str, Any] = msgspec.to_builtins(value)
    return {key: item for key, item in raw.items() if key not in defaults or item != defaults[key]}


@cache
def _defaults(kind: type[Struct]) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def _plain_step(step: AnyStep) -> dict[str, Any]:
    key, bare = _STEP_KEYS[type(step)]
    if bare is not None:
        return {key: getattr(step, bare)}
    body = msgspec.to_builtins(step)
    if isinstance(step, Add):
        for name, spans in (("prompt", step.prompt), ("output", step.output)):
            if name in body:
                body[name] = [[s.stream, s.start, s.count] if s.start else [s.stream, s.count] for s in spans]
    return {key: body}


class _Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(_Flow, lambda d, v: d.represent_mapping("tag:yaml.org,2002:map", v, flow_style=True))


def dump(scenario: Scenario) -> str:
    """Readable YAML: one line per group and step; `loads(dump(s)) == s`."""
    raw = plain(scenario)
    raw["groups"] = [_Flow(group) for group in raw["groups"]]
    raw["steps"] = [_Flow(step) for step in raw["steps"]]
    if raw["connector"] is not None:
        raw["connector"] = _Flow(raw["connector"])
    return yaml.dump(raw, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True)


def encode(scenario: Scenario) -> bytes:
    """JSON bytes, for digests."""
    return msgspec.json.encode(plain(scenario))


# ---------------------------------------------------------------------------------------------------------------- tokens

_STREAM_BITS = 24
FIRST_TOKEN = 16


class Tokens:
    """Turns spans into token numbers: distinct for distinct (stream, index), the same on both sides of a comparison.

    Streams are numbered in the order in which the scenario's prompts name them; a request's output stream `ID.out` is
    numbered when first asked for. Numbers start at FIRST_TOKEN, so that none is a stop token.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._bases: dict[str, int] = {}
        self._outputs: dict[str, list[int]] = {}
        for step in scenario.steps:
            if isinstance(step, Add):
                for span in step.prompt:
                    self.base(span.stream)
                self.base(step.id + ".out")
                if step.output:
                    self._outputs[step.id] = self._numbers(step.output)

    def base(self, stream: str) -> int:
        """The number of the stream's token 0; token i is base + i."""
        if stream not in self._bases:
            self._bases[stream] = FIRST_TOKEN + (len(self._bases) << _STREAM_BITS)
        return self._bases[stream]

    def prompt(self, add: Add) -> list[int]:
        """The token numbers of a request's prompt; below 0 where it comes as embeddings."""
        numbers = self._numbers(add.prompt)
        return [-number for number in numbers] if add.embeds else numbers

    def _numbers(self, spans: tuple[Span, ...]) -> list[int]:
        numbers: list[int] = []
        for span in spans:
            first = self.base(span.stream) + span.start
            numbers.extend(range(first, first + span.count))
        return numbers

    def output(self, request_id: str, index: int) -> int:
        """The number of the index-th token generated for a request."""
        given = self._outputs.get(request_id)
        if given is not None and index < len(given):
            return given[index]
        return self.base(request_id + ".out") + index

    def name(self, number: int) -> str:
        """`stream[index]` for a token number, for messages."""
        ordinal, index = divmod(number - FIRST_TOKEN, 1 << _STREAM_BITS)
        return f"{list(self._bases)[ordinal]}[{index}]"

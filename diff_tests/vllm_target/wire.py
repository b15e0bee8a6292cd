"""Frames between us, the host and its children: a length (4 bytes, big endian), then one tagged struct in MessagePack."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from diff_tests.shard import CaseReport, Cases, Sample
from diff_tests.workload.sides import StepFacts
from sim.history import Record
from sim.scenario import Scenario

_LENGTH = struct.Struct(">I")


class RunCase(Struct, tag="run"):
    """Execute a scenario. judged_by: the release whose rules say what a fill leaves in memory. flush: send each record
    as soon as it exists, for a child that may die. defect: to plant."""

    case: int
    scenario: bytes
    judged_by: str
    flush: bool = False
    defect: str | None = None


class AskStartupPool(Struct, tag="startup_pool"):
    """Ask vLLM's start-up check for the smallest pool that it accepts."""

    case: int
    scenario: bytes


class AskStepTimes(Struct, tag="step_times"):
    """Run all the scenario's requests and time steps, without recording anything."""

    case: int
    scenario: bytes
    num_warmup_steps: int
    num_steps: int


class RunCases(Struct, tag="run_cases"):
    """Generate, run and judge the cases [start, stop) of a campaign. cases: which campaign."""

    case: int
    cases: bytes
    start: int
    stop: int
    judged_by: str
    defect: str | None = None


class AskRealTime(Struct, tag="real_time"):
    """Run the cases [start, stop) of a campaign without judging them, and tell the processor time that it took."""

    case: int
    cases: bytes
    start: int
    stop: int
    judged_by: str


class PlayTrace(Struct, tag="play_trace"):
    """Play the first `limit` rows of a request trace to the real scheduler of a scenario's engine. labels: the names of
    the trace's fields; hash_block_size: tokens that one of its hashes stands for."""

    case: int
    scenario: bytes
    path: str
    labels: tuple[str, ...]
    hash_block_size: int
    arrivals: str
    limit: int | None


class AskConnectorFile(Struct, tag="connector_file"):
    """Ask for the file in which a connector is defined."""

    case: int
    connector: str


class RunEngine(Struct, tag="engine"):
    """Start an engine with these arguments and take the scenario's steps; once in the life of a child. plugins: a folder
    for the module path of every process of the engine."""

    case: int
    scenario: bytes
    settings: dict[str, Any]
    plugins: str


class AskCpuTime(Struct, tag="cpu_time"):
    """Ask for the processor time that the child has used so far."""

    case: int


class Ready(Struct, tag="ready"):
    """vLLM is imported and the connector is in place. replaces: the registered connector whose place a file takes."""

    version: str
    replaces: str | None = None


class NotReady(Struct, tag="not_ready"):
    """The child gives up. bad_input: the user's connector is at fault, not vLLM."""

    bad_input: bool
    message: str


class Records(Struct, tag="records"):
    """More records of a case; `last` ends it."""

    case: int
    records: list[Record]
    last: bool


class StartupPool(Struct, tag="pool"):
    """The smallest pool in blocks, null block included; or why vLLM refuses the configuration at any size."""

    case: int
    num_blocks: int
    refusal: str | None = None


class StepTimes(Struct, tag="times"):
    """Seconds that vLLM spent in each step."""

    case: int
    seconds: list[float]


class TraceSteps(Struct, tag="trace_steps"):
    """More steps of a trace; `last` ends it, with vLLM's own prefix cache statistics: queries, hits, and those of
    preempted requests, in tokens. error: what vLLM raised."""

    case: int
    steps: list[StepFacts]
    last: bool
    statistics: list[int] = []
    error: str | None = None


class CasesNews(Struct, tag="cases_news"):
    """A case of a campaign is worth more than a count."""

    case: int
    news: CaseReport | Sample


class CasesDone(Struct, tag="cases_done"):
    """The cases asked for are through. coverage: what they exercised, as plain data; known: findings by known issue;
    resident_bytes: of the child's memory; seen: in a guided campaign, what each case showed (`guidance.bits`)."""

    case: int
    num_cases: int
    coverage: dict[str, Any]
    known: dict[str, int]
    resident_bytes: int
    seen: list[tuple[int, bytes]] = []


class ConnectorFile(Struct, tag="connector_path"):
    """The path of a connector's file, or why there is none."""

    case: int
    path: str | None
    error: str | None = None


class EngineEnd(Struct, tag="engine_end"):
    """How an engine ended: it took all steps, or raised an error while it started (phase `start`) or ran (`run`).
    run_cpu_seconds: processor time of the steps."""

    case: int
    start_seconds: float
    run_cpu_seconds: float = 0.0
    phase: str = ""
    error: str = ""


class CpuTime(Struct, tag="cpu"):
    """Processor seconds of the child."""

    case: int
    seconds: float


class Fork(Struct, tag="fork"):
    """To the host: fork a child with this connector, these contracts from outside, and KV memory on this device. The two
    ends of its pipes and the page of its bookmark come along."""

    connector: str | None
    contracts: tuple[str, ...] = ()
    device: str = "cpu"


class Forked(Struct, tag="forked"):
    """The child's process ID."""

    pid: int


class AskEnd(Struct, tag="ask_end"):
    """To the host: how did this child end?"""

    pid: int


class Ended(Struct, tag="ended"):
    """Exit code, or minus the signal; None if it has not ended."""

    code: int | None


ToChild = (
    RunCase | AskStartupPool | AskStepTimes | RunCases | AskRealTime | PlayTrace | AskConnectorFile | RunEngine | AskCpuTime
)
ToParent = (
    Ready
    | NotReady
    | Records
    | StartupPool
    | StepTimes
    | TraceSteps
    | CasesNews
    | CasesDone
    | ConnectorFile
    | EngineEnd
    | CpuTime
)

ToHost = Fork | AskEnd
FromHost = Ready | NotReady | Forked | Ended

encode: Callable[[ToChild | ToParent | ToHost | FromHost], bytes] = msgspec.msgpack.Encoder().encode
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)
_to_host = msgspec.msgpack.Decoder(ToHost)
_from_host = msgspec.msgpack.Decoder(FromHost)
decode_to_child: Callable[[bytes], ToChild] = _to_child.decode
decode_to_parent: Callable[[bytes], ToParent] = _to_parent.decode
decode_to_host: Callable[[bytes], ToHost] = _to_host.decode
decode_from_host: Callable[[bytes], FromHost] = _from_host.decode


def frame(message: ToChild | ToParent | ToHost | FromHost) -> bytes:
    """A message as bytes on the wire."""
    body = encode(message)
    return _LENGTH.pack(len(body)) + body


HEADER_BYTES = _LENGTH.size


def body_length(header: bytes) -> int:
    """Number of bytes that follow a frame's header."""
    length: int = _LENGTH.unpack(header)[0]
    return length


def pack_scenario(scenario: Scenario) -> bytes:
    """A checked scenario for the child, which trusts it: parsing it again would cost more than running it."""
    return pickle.dumps(scenario, protocol=pickle.HIGHEST_PROTOCOL)


def pack_cases(cases: Cases) -> bytes:
    """Which campaign, for the child."""
    return pickle.dumps(cases, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_cases(data: bytes) -> Cases:
    """Reads what `pack_cases` wrote. Only ever our parent's bytes."""
    cases = pickle.loads(data)
    assert isinstance(cases, Cases)
    return cases


def unpack_scenario(data: bytes) -> Scenario:
    """Reads what `pack_scenario` wrote. Only ever our parent's bytes."""
    scenario = pickle.loads(data)
    assert isinstance(scenario, Scenario)
    return scenario

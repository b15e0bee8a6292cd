"""Frames between parent and child: a length (4 bytes, big endian), then one MessagePack value of a tagged struct."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct

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


class AskCpuTime(Struct, tag="cpu_time"):
    """Ask for the processor time that the child has used so far."""

    case: int


class Ready(Struct, tag="ready"):
    """vLLM is imported and the connector is in place."""

    version: str


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


class CpuTime(Struct, tag="cpu"):
    """Processor seconds of the child."""

    case: int
    seconds: float


ToChild = RunCase | AskStartupPool | AskStepTimes | AskCpuTime
ToParent = Ready | NotReady | Records | StartupPool | StepTimes | CpuTime

encode: Callable[[ToChild | ToParent], bytes] = msgspec.msgpack.Encoder().encode
_to_child = msgspec.msgpack.Decoder(ToChild)
_to_parent = msgspec.msgpack.Decoder(ToParent)
decode_to_child: Callable[[bytes], ToChild] = _to_child.decode
decode_to_parent: Callable[[bytes], ToParent] = _to_parent.decode


def frame(message: ToChild | ToParent) -> bytes:
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


def unpack_scenario(data: bytes) -> Scenario:
    """Reads what `pack_scenario` wrote. Only ever our parent's bytes."""
    scenario = pickle.loads(data)
    assert isinstance(scenario, Scenario)
    return scenario

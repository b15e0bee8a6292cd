"""What the workers of a painted engine did: `painted/worker-RANK-PID.jsonl` in the trace's folder, a JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sim.history import Act, Written

PAINTED_FOLDER = "painted"


class PaintedLoad(msgspec.Struct, tag="load"):
    """One load of one worker. k: the step whose metadata it was given. written: judged byte by byte."""

    k: int
    rank: int
    written: list[Written]


class PaintedStep(msgspec.Struct, tag="step"):
    """What one worker did to KV memory in step k, in order. Steps with nothing but a forward pass are left out."""

    k: int
    rank: int
    acts: list[Act]


_decoder = msgspec.json.Decoder(PaintedLoad | PaintedStep)


@dataclass
class Painted:
    """What one worker did, by step."""

    written: dict[int, list[Written]] = field(default_factory=dict)
    acts: dict[int, list[Act]] = field(default_factory=dict)


def read_painted(folder: Path) -> dict[int, Painted]:
    """By rank, what the workers of an engine did whose trace lies in `folder`."""
    by_rank: dict[int, Painted] = {}
    for entry in _entries(folder):
        painted = by_rank.setdefault(entry.rank, Painted())
        if isinstance(entry, PaintedLoad):
            painted.written[entry.k] = entry.written
        else:
            painted.acts[entry.k] = entry.acts
    return by_rank


def _entries(folder: Path) -> Iterator[PaintedLoad | PaintedStep]:
    for path in sorted((folder / PAINTED_FOLDER).glob("*.jsonl")):
        yield from map(_decoder.decode, path.read_bytes().splitlines())

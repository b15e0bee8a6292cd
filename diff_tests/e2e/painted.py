"""What the loads of a painted engine wrote: `painted/worker-RANK-PID.jsonl` in the trace's folder, a JSON object a load."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sim.history import Written

PAINTED_FOLDER = "painted"


class PaintedLoad(msgspec.Struct):
    """One load of one worker. k: the step whose metadata it was given. written: judged byte by byte."""

    k: int
    rank: int
    written: list[Written]


def read_painted(folder: Path) -> list[PaintedLoad]:
    """All loads of an engine whose trace lies in `folder`, worker by worker."""
    decode = msgspec.json.Decoder(PaintedLoad).decode
    lines = [line for path in sorted((folder / PAINTED_FOLDER).glob("*.jsonl")) for line in path.read_bytes().splitlines()]
    return [decode(line) for line in lines]

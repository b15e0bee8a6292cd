"""How far a campaign has come, on disk, so that it can go on after whatever ended it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from diff_tests.guidance import Guidance


class StateError(ValueError):
    """A run folder from which nothing can be resumed; one sentence with the remedy."""


class State(Struct, kw_only=True, forbid_unknown_fields=True):
    """A campaign's plan and what is through: cases [start, stop), and their sums. guidance: of a guided one. Its findings
    lie beside it, one file a failure."""

    kvoracle_state: int
    seed: int
    vllm: str
    connector: str | None
    as_release: str | None
    cases: int | None
    features: tuple[str, ...]
    kinds: tuple[str, ...] | None
    done: list[tuple[int, int]]
    num_cases: int
    seconds: float
    known: dict[str, int]
    coverage: dict[str, Any]
    guidance: Guidance | None = None


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file in one go: a reader, or the end of the world, finds the old one or the new one. Raises OSError."""
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def save_state(folder: Path, state: State) -> None:
    """Writes the state in one go. Raises OSError."""
    replace_file(_path(folder, state.seed), msgspec.json.encode(state))


def load_state(folder: Path, seed: int | None = None) -> State:
    """The state of a run folder, or of the campaign with this seed in it. Raises StateError."""
    paths = sorted(folder.glob("state-*.json")) if seed is None else [_path(folder, seed)]
    if not paths or not paths[0].is_file():
        raise StateError(f"{folder}: no campaign to resume; give the folder that `fuzz` named at its end")
    if len(paths) > 1:
        seeds = ", ".join(path.stem.removeprefix("state-") for path in paths)
        raise StateError(f"{folder}: several campaigns share it; choose one with --seed, of {seeds}")
    try:
        return msgspec.json.decode(paths[0].read_bytes(), type=State)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise StateError(f"{paths[0]}: not the state of a campaign: {error}") from None


def _path(folder: Path, seed: int) -> Path:
    return folder / f"state-{seed}.json"

"""A finding: one thing that is not as it should be, with the sentence that tells a person what and why."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from msgspec import Struct

Kind = Literal["schedule", "hit", "allocation", "pool", "content", "selection", "routing", "fill", "event", "crash", "hang"]


class Fault(NamedTuple):
    """What makes two findings one and the same fault."""

    kind: str
    law: int | None
    cause: str
    group_kind: str | None


class Finding(Struct, frozen=True, kw_only=True):
    """One difference between the model and vLLM (law None), or one break of a law.

    cause: a fixed slug. step: the engine step, from 1; 0 before the first. group: index in the KV cache config.
    positions: entries of the block table that are concerned. expected, observed: plain values, JSON-able; block IDs for
    selections. message: a sentence that names request, group, position and block.
    """

    kind: Kind
    cause: str
    message: str
    law: int | None = None
    step: int | None = None
    request: str | None = None
    group: int | None = None
    group_kind: str | None = None
    positions: list[int] = []
    expected: Any = None
    observed: Any = None

    @property
    def fault(self) -> Fault:
        """Findings of equal fault count as one."""
        return Fault(self.kind, self.law, self.cause, self.group_kind)


def place(request: str | None = None, group: int | None = None, group_kind: str | None = None) -> str:
    """The beginning of a message: `request B, group 0 (full): `, as far as known."""
    parts = []
    if request is not None:
        parts.append(f"request {request}")
    if group is not None:
        parts.append(f"group {group} ({group_kind})" if group_kind else f"group {group}")
    return ", ".join(parts) + ": " if parts else ""


def token_range(start: int, end: int) -> str:
    """`token 16` or `tokens [16, 32)`."""
    return f"token {start}" if end - start == 1 else f"tokens [{start}, {end})"

"""What a connector's metadata says, as plain values. Metadata of a form we do not know gives None."""

from __future__ import annotations

from typing import Any

from sim.history import Selection, Selections


def selections(metadata: Any) -> Selections | None:
    """Blocks to load per request and group, in order, and how many tokens they are for."""
    fills = getattr(metadata, "reqs_to_fill", None)
    if not isinstance(fills, dict):
        return None
    return {request: _selection(*fill) for request, fill in fills.items()}


def _selection(ids_by_group: Any, num_tokens: int) -> Selection:
    return Selection(groups=[list(ids) for ids in ids_by_group], tokens=num_tokens)

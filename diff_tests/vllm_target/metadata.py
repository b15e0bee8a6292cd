"""What a connector's metadata says, as plain values. Metadata of a form that nobody knows gives None."""

from __future__ import annotations

from typing import Any

import msgspec

from oracle.contracts import Contract, ReadsMetadata
from sim.history import Selection, Selections


def selections(metadata: Any, contract: Contract | None) -> Selections | None:
    """Blocks to load per request and group, in order, and how many tokens they are for."""
    if isinstance(contract, ReadsMetadata):
        return contract.read(metadata)
    children = getattr(metadata, "metadata", None)
    if isinstance(children, tuple):  # MultiConnector: one child loads for a request
        told = [selections(child, None) for child in children]
        return {request: selection for part in told if part is not None for request, selection in part.items()}
    fills = getattr(metadata, "reqs_to_fill", None)
    if not isinstance(fills, dict):
        return None
    return {request: _selection(*fill) for request, fill in fills.items()}


def _selection(ids_by_group: Any, num_tokens: Any) -> Selection:
    """Raises ValidationError where something else than numbers stands in their place."""
    groups = [list(ids) for ids in ids_by_group]
    return msgspec.convert({"groups": groups, "tokens": num_tokens}, Selection)

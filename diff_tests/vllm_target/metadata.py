"""What a connector's metadata says, as plain values. Metadata of a form that nobody knows gives None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from oracle.contracts import Contract, keeps_content, loaded, reads_metadata
from sim.history import Moves, Selection, Selections


class Told(NamedTuple):
    """What the metadata of one step tells the worker."""

    selected: Selections | None
    moves: Moves | None = None


def told(metadata: Any, contract: Contract | None, tokens: Mapping[str, Sequence[int]], num_groups: int) -> Told:
    """Blocks to load, and of a connector that keeps content also what it stores. tokens: token IDs of the requests admitted
    in the step."""
    if not keeps_content(contract):
        return Told(selections(metadata, contract))
    moves = contract.moves(metadata, tokens)
    return Told(loaded(moves, num_groups), moves)


def selections(metadata: Any, contract: Contract | None) -> Selections | None:
    """Blocks to load per request and group, in order, and how many tokens they are for."""
    if reads_metadata(contract):
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

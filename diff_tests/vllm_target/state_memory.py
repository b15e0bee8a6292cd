"""States that a worker keeps as tensors of their own, outside of paged memory, and a judge of what a fill does to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace

from oracle.fill import NO_GROUP, FillCheck, LayerView
from oracle.values import FillValue
from sim.history import Written
from sim.scenario import Mamba, Scenario

_ALIGNMENT_BYTES = 64
_GAP_BYTES = 64
"""Behind each tensor: whoever writes beyond it is seen."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class _Place(NamedTuple):
    """One tensor of a layer: its group and number in the layer's list, its bytes [start, stop) of the buffer."""

    group: int
    layer: str
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class StateMemory:
    """All such tensors in one buffer. `tensors`: by layer name, as the connector registers them.

    values: what a fill leaves, by group and number of the tensor; None where nobody knows. A request's load writes all
    tensors of its group or none: there are no blocks.
    """

    def __init__(
        self,
        scenario: Scenario,
        layer_names: Sequence[Sequence[str]],
        values: Sequence[Sequence[FillValue]] | None,
        device: str,
    ) -> None:
        places = _places(scenario, layer_names)
        self.buffer = torch.zeros(places[-1].stop + _GAP_BYTES if places else 0, dtype=torch.uint8, device=device)
        self.tensors: dict[str, list[torch.Tensor]] = {}
        for place in places:
            flat = self.buffer[place.start : place.stop].view(place.dtype)
            self.tensors.setdefault(place.layer, []).append(flat.view(place.shape))
        self._kinds = list(dict.fromkeys((place.group, place.number) for place in places))
        self._check = None
        if places and values is not None:
            views = [
                LayerView(
                    self._kinds.index((p.group, p.number)), _view_name(p), self.tensors[p.layer][p.number].view(1, -1)
                )
                for p in places
            ]
            self._check = FillCheck(self.buffer, views, [values[group][number] for group, number in self._kinds])

    def paint(self) -> None:
        """Overwrites all of it with a pattern in which every write shows."""
        if self._check is not None:
            self._check.paint()

    def verify(self, requests: Iterable[Sequence[Sequence[int]]]) -> list[Written]:
        """What was written since `paint`, where these block IDs per group, request by request, were to be written."""
        if self._check is None:
            return []
        wanted = [[[0] if ids[group : group + 1] and ids[group] else [] for group, _ in self._kinds] for ids in requests]
        return [self._named(entry) for entry in self._check.verify(*wanted)]

    def _named(self, entry: Written) -> Written:
        """An entry of a kind of tensor as one of a group's tensor, which has no blocks."""
        if entry.group == NO_GROUP:
            return replace(entry, blocks=[])
        group, number = self._kinds[entry.group]
        return replace(entry, group=group, layer=entry.layer.rpartition(".")[0], blocks=[], tensor=number)


def _view_name(place: _Place) -> str:
    """Each tensor by a name of its own."""
    return f"{place.layer}.{place.number}"


def _places(scenario: Scenario, layer_names: Sequence[Sequence[str]]) -> list[_Place]:
    places: list[_Place] = []
    start = 0
    for group_index, (group, names) in enumerate(zip(scenario.groups, layer_names, strict=True)):
        if not isinstance(group, Mamba):
            continue
        for name in names[len(group.unknown) :]:
            for number, state in enumerate(group.states):
                dtype = _DTYPES[state.dtype]
                stop = start + math.prod(state.shape) * dtype.itemsize
                places.append(_Place(group_index, name, number, dtype, state.shape, start, stop))
                start = -(-(stop + _GAP_BYTES) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES  # rounds up
    return places

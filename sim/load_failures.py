"""Loads that fail: which requests fall back, and to where."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sim.groups.base import ceil_div
from sim.pool import PredictedError
from sim.request import Request


class FailedGroupsError(PredictedError):
    """Blocks of several groups were reported, which only one group's requests can be looked up by."""

    vllm_type = "ValueError"


def fall_back(
    requests: Iterable[Request], invalid: Collection[int], block_size: int, scheduled: Mapping[Request, int]
) -> tuple[list[Request], list[int]]:
    """Takes requests of one group back to their first invalid block.

    invalid: IDs of blocks that hold no content. scheduled: tokens of the step whose output is being processed; their
    computation is void in any case. Who only shares invalid blocks with a request before it falls back no further: that
    one computes them again. Returns the requests concerned, and their blocks from the first invalid one on.
    """
    concerned: list[Request] = []
    downstream: list[int] = []
    seen: set[int] = set()
    for request in requests:
        table = request.tables[0]
        num_computed = request.num_computed - scheduled.get(request, 0)
        entries = list(enumerate(table[: max(0, ceil_div(num_computed, block_size))]))
        bad = [(block_index, block_id) for block_index, block_id in entries if block_id in invalid]
        if not bad:
            continue
        first = next((block_index for block_index, block_id in bad if block_id not in seen), None)
        if first is None:
            request.num_computed = num_computed
        else:
            request.num_computed = first * block_size
            downstream += table[first:]
        seen.update(block_id for _, block_id in bad)
        request.quiet_until = 0
        concerned.append(request)
    return concerned, downstream

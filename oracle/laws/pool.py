"""Law 1: blocks, reference counts and the free queue."""

from __future__ import annotations

from collections.abc import Sequence

from oracle.laws.trial import STATES, Trial, law
from oracle.selection import NULL
from sim.history import StateRecord, is_pool_read


@law(
    1,
    "Every block is null, free, or held; counts add up to the pool; a reference count equals entries in live tables, "
    "pending copies and deferred frees.",
    STATES,
)
def check_pool(trial: Trial, record: StateRecord) -> None:
    """Law 1, wherever something changed."""
    replay = trial.replay
    refs, free = replay.refs, replay.free
    unchanged = record.refs is None and record.free is None and record.tables is None and record.deferred is None
    if refs is None or free is None or unchanged or not is_pool_read(replay.num_blocks, record):
        return
    expected = replay.num_holders
    if replay.deferred:
        expected = expected.copy()
        for block in (block for blocks in replay.deferred for block in blocks if block != NULL):
            expected[block] += 1
    if expected != refs:
        _report_reference(trial, expected, refs)
    in_queue = set(free)
    adds_up = len(free) == len(in_queue) == refs.count(0) - 1  # the null block counts as 0 and is not free
    if not adds_up or NULL in in_queue or any(map(refs.__getitem__, free)):
        _report_queue(trial, free, refs)


def _report_reference(trial: Trial, expected: Sequence[int], refs: Sequence[int]) -> None:
    if len(expected) != len(refs):
        message = f"the pool has {len(refs)} blocks instead of {len(expected)}"
        return trial.report("pool", 1, "pool_size", message, expected=len(expected), observed=len(refs))
    block = next(i for i in range(len(refs)) if expected[i] != refs[i])
    holders = trial.replay.holders(block)
    where = "; ".join(f"request {request}, group {group}, position {position}" for request, group, position in holders)
    message = (
        f"block {block} has reference count {refs[block]}, but it is held {expected[block]} times"
        f" ({where or 'in no table'}); it {trial.replay.describe(block)}"
    )
    cause = "reference_leaked" if refs[block] > expected[block] else "reference_lost"
    return trial.report("pool", 1, cause, message, expected=expected[block], observed=refs[block])


def _report_queue(trial: Trial, free: Sequence[int], refs: Sequence[int]) -> None:
    seen: set[int] = set()
    for block in free:
        if block == NULL:
            return trial.report("pool", 1, "null_free", "the null block is in the free queue")
        if block in seen:
            return trial.report("pool", 1, "duplicate_free", f"block {block} is in the free queue twice")
        if refs[block]:
            message = f"block {block} is in the free queue with {refs[block]} references; it {trial.replay.describe(block)}"
            return trial.report("pool", 1, "free_and_held", message, observed=refs[block])
        seen.add(block)
    lost = [block for block in range(1, len(refs)) if not refs[block] and block not in seen]
    message = f"blocks {lost} are neither held nor in the free queue"
    return trial.report("pool", 1, "lost_block", message, expected=lost, observed=[])

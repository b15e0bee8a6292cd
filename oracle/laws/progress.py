"""Laws 7, 8 and 10: no exception, no standstill, no chance."""

from __future__ import annotations

import re

from oracle.findings import Finding
from oracle.laws.trial import End, Trial, law
from sim.history import Acted, Failure, History, Scheduled, Updated
from sim.scenario import Run

_NUM_REPEATS = 3
"""How often a state must come back without a token gained before it counts as going round in circles."""


@law(
    7,
    "Shortage of blocks is answered by waiting or preemption, never by an exception; nothing else that a valid scenario "
    "asks for raises one either.",
    (Failure,),
    judges_direct=True,
)
def check_failure(trial: Trial, record: Failure) -> None:
    """Law 7; and law 8, where a step did not end and the process had to be killed."""
    if record.type == "Hang" and record.phase == "child":
        trial.report("hang", 8, "no_answer", f"the step that follows did not come to an end: {record.message}")
        return
    where = f" in {record.trail[-1]} (`{record.line}`)" if record.trail else ""
    message = f"{record.type} in phase {record.phase}{where}: {record.message or 'no message'}"
    group = _group_in(record.message, len(trial.scenario.groups))
    if group is not None:
        message += f" (group {group} is {trial.scenario.groups[group].kind})"
    raised = {"type": record.type, "message": record.message, "trail": record.trail, "line": record.line}
    trial.report("crash", 7, _failure_cause(record), message, observed=raised)


def _failure_cause(record: Failure) -> str:
    """One slug for one place in vLLM, so that two exceptions of a phase do not count as one fault."""
    if "free blocks" in record.message:
        return "out_of_blocks"
    if record.type == "ChildDied":
        return "child_died"
    if not record.trail:
        return f"{record.phase}_exception"
    return f"{record.type}_in_{record.trail[-1].rpartition('.')[2].lstrip('_')}"


def _group_in(message: str, num_groups: int) -> int | None:
    """The KV cache group that the words of an exception name, if they name one."""
    named = re.search(r"\bgroup[ =](\d+)\b", message)
    return int(named[1]) if named and int(named[1]) < num_groups else None


@law(
    8,
    "Whatever vLLM's start-up check admits runs to its end, alone and among others, and afterwards every block is free.",
    (Scheduled, Updated, Acted, End),
)
def check_progress(trial: Trial, record: Scheduled | Updated | Acted | End) -> None:
    """Law 8: no hang, no going round in circles, and at the end everybody is through and every block is free."""
    if isinstance(record, Scheduled):
        if record.preempted:
            _check_circles(trial, record)
        if record.external or trial.loads:
            _check_loads(trial, record)
    elif isinstance(record, Updated):
        if record.new_tokens and trial.states:
            trial.states.clear()
    elif isinstance(record, End):
        _check_end(trial, record.last)
    elif record.action != "run":
        trial.states.clear()  # somebody from outside sent the engine back: no circle of its own
        trial.loads.clear()
    elif record.result == "stalled" and not trial.replay.waits_for_outside and trial.promises_progress():
        waiting = trial.replay.unfinished()
        message = f"nothing was scheduled any more; unfinished: {', '.join(waiting)}"
        trial.report("hang", 8, "stalled", message, observed=waiting)


def _check_circles(trial: Trial, record: Scheduled) -> None:
    replay = trial.replay
    if replay.loads_under_way:
        trial.states.clear()  # the blocks that a load holds come back with it: no circle of the engine's own
        return
    computed = tuple((stay.request, stay.num_computed) for stay in replay.stays.values())
    state = (computed, tuple(record.scheduled.items()), tuple(record.preempted), tuple(replay.free or ()))
    trial.states[state] = trial.states.get(state, 0) + 1
    if trial.states[state] == _NUM_REPEATS and trial.promises_progress():
        message = f"the same state for the {_NUM_REPEATS}rd time without a token gained; preempted: {record.preempted}"
        trial.report("hang", 8, "livelock", message, observed=record.preempted)


def _check_loads(trial: Trial, record: Scheduled) -> None:
    """Whose load has arrived computes a token before it loads again, unless the load failed."""
    for request in record.scheduled:
        trial.loads.pop(request, None)
    for request, num_tokens in record.external.items():
        if request in record.scheduled or not num_tokens or request in trial.failing:
            continue
        trial.loads[request] = trial.loads.get(request, 0) + 1
        if trial.loads[request] == _NUM_REPEATS:
            message = f"loads {num_tokens} tokens for the {_NUM_REPEATS}rd time without having computed one in between"
            trial.report("hang", 8, "loaded_again", message, request=request, observed=num_tokens)


def _check_end(trial: Trial, last: object) -> None:
    """Whoever ran until idle has nobody left and holds nothing, unless the engine was paused."""
    if not isinstance(last, Acted) or last.result != "idle" or not isinstance(trial.scenario.steps[-1], Run):
        return
    replay = trial.replay
    if replay.waits_for_outside:
        return
    waiting = replay.unfinished()
    if waiting:
        message = f"the engine is idle, but {', '.join(waiting)} never ended"
        trial.report("hang", 8, "lost_request", message, observed=waiting)
    held = [block for block, count in enumerate(replay.refs or replay.num_holders) if count]
    if held:
        message = f"all requests have ended, but blocks {held} are held; block {held[0]} {replay.describe(held[0])}"
        trial.report("pool", 8, "leaked_block", message, expected=[], observed=held)


def same_history(first: History, second: History) -> Finding | None:
    """Law 10: the first record in which two runs of one scenario differ."""
    for one, other in zip(first, second, strict=False):
        if one != other:
            step = getattr(one, "step", 0)
            fields = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name, None)]
            return Finding(
                kind="schedule",
                law=10,
                cause="not_repeatable",
                step=step,
                expected={name: getattr(one, name) for name in fields},
                observed={name: getattr(other, name, None) for name in fields},
                message=f"step {step}: a second run differs in {', '.join(fields) or 'the kind of record'}",
            )
    if len(first) != len(second):
        return Finding(
            kind="schedule",
            law=10,
            cause="not_repeatable",
            expected=len(first),
            observed=len(second),
            message=f"a second run has {len(second)} records instead of {len(first)}",
        )
    return None

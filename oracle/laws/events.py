"""Law 9: KV events add up to the prefix cache."""

from __future__ import annotations

from oracle.laws.trial import Trial, law
from sim.history import Acted, Updated, is_pool_read


@law(
    9,
    "KV events, replayed as a multiset of (group, key), give the multiset of cached links.",
    (Updated, Acted),
)
def check_events(trial: Trial, record: Updated | Acted) -> None:
    """Law 9, whenever all events so far have been told and the keys are read: after updates, and when a run ends."""
    replay = trial.replay
    if not replay.unbalanced or not replay.is_told or not is_pool_read(replay.num_blocks, record):
        return
    if isinstance(record, Acted) and record.action != "run":
        return
    for (group, request_index, num_tokens), surplus in replay.unbalanced.items():
        name = replay.prefixes.name(request_index) if request_index >= 0 else "no request"
        cause = "link_not_told" if surplus < 0 else "told_link_missing"
        what = f"{abs(surplus)} links of the key of the first {num_tokens} tokens of request {name}"
        message = f"{what} are there untold" if surplus < 0 else f"{what} have been told of, but are not there"
        trial.report("event", 9, cause, message, group=group, expected=0, observed=surplus)

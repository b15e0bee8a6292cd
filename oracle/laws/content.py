"""Laws 2 and 3: who writes a block, and whose tokens it holds."""

from __future__ import annotations

from oracle.content import Content, Entry, GroupView, Replay, Stay
from oracle.findings import Kind, token_range
from oracle.laws.trial import Trial, law
from oracle.selection import NULL
from sim.history import Scheduled, Updated


@law(
    2,
    "In a step each token slot, or state, has exactly one writer. Who else holds the block has those very tokens as its "
    "own prefix and only reads.",
    (Scheduled,),
)
def check_writers(trial: Trial, record: Scheduled) -> None:
    """Law 2. A block that comes in to be written has no other holder, except those that come in for its content in the
    same step: what they find there is judged by law 3."""
    replay = trial.replay
    for entry in replay.fresh:
        num_others = replay.num_holders[entry.block] - 1
        if num_others and num_others != _num_readers(replay, entry):
            others = [h for h in replay.holders(entry.block) if h != (entry.stay.request, entry.group, entry.position)]
            where = "; ".join(f"request {r}, group {g}, position {p}" for r, g, p in others)
            message = f"position {entry.position}: block {entry.block} is to be written, but is also held by {where}"
            _report_entry(trial, "allocation", 2, "two_writers", entry, message)
    for entry in replay.advanced:
        _check_state_writer(trial, entry)
    for stay, start, num_tokens in replay.homeless:
        message = f"{token_range(start, start + num_tokens)} scheduled, but the tables have slots for {stay.room}"
        trial.report(
            "allocation", 2, "no_slot", message, request=stay.request, expected=start + num_tokens, observed=stay.room
        )


def _check_state_writer(trial: Trial, entry: Entry) -> None:
    """The block that gets the state after a step is there, and nobody else's."""
    stay = entry.stay
    was_lost = entry.position * trial.replay.groups[entry.group].block_size < stay.num_lost
    if entry.block == NULL:
        message = f"position {entry.position} is to get the state after the step's last token, but is null"
        cause = "failed_load_no_slot" if was_lost else "no_slot"
        _report_entry(trial, "allocation", 2, "replayed_state" if stay.replays else cause, entry, message)
    elif trial.replay.num_holders[entry.block] > 1:
        others = sorted({request for request, _, _ in trial.replay.holders(entry.block)} - {stay.request})
        whom = " and ".join(others) or "twice by itself"
        message = f"position {entry.position}: block {entry.block} gets the next state, but is also held by {whom}"
        cause = "failed_load_shared" if was_lost else "two_writers"
        _report_entry(trial, "allocation", 2, "replayed_state" if stay.replays else cause, entry, message)


def _num_readers(replay: Replay, written: Entry) -> int:
    """Entries of other requests that name the block for its content since this step."""
    return sum(hit.block == written.block and hit.stay is not written.stay for hit, _ in replay.hits)


@law(
    3,
    "A cached key's block holds exactly those tokens; whoever hits, copies or attends to a block finds its own prefix "
    "there, in that step and later.",
    (Scheduled, Updated),
)
def check_content(trial: Trial, record: Scheduled | Updated) -> None:
    """Law 3. What a request finds is judged when it comes to it, what others do to it when they do it."""
    replay = trial.replay
    copied_from = {target: source for source, target in record.copies} if isinstance(record, Scheduled) else {}
    for entry, content in replay.hits:
        _check_hit(trial, entry, content, copied_from.get(entry.block, entry.block))
    for stay, index, position, num_computed in replay.nulls:
        group = replay.groups[index]
        if not group.may_be_null(position, num_computed, stay.num_prompt):
            start = position * group.block_size
            message = (
                f"position {position} is null, but the token at {num_computed} needs "
                f"{token_range(start, start + group.block_size)}"
            )
            trial.report(
                "content", 3, "needed_block_null", message, request=stay.request, group=index, positions=[position]
            )
    for stay in replay.unloaded:
        start, end = stay.num_local, stay.num_found
        message = f"admitted, though its load of {token_range(start, end)} has not arrived"
        trial.report("content", 3, "load_missing", message, request=stay.request, expected=end, observed=start)
    for entry in replay.stateless:
        message = f"the state to go on from was in block {entry.block}, which is no longer in the table"
        _report_entry(trial, "content", 3, "state_lost", entry, message)
    for entry, num_computed in replay.missing:
        _report_missing(trial, entry, num_computed)
    for entry in replay.replaced:
        message = f"position {entry.position} now names block {entry.block}, which {replay.describe(entry.block)}"
        _report_entry(trial, "content", 3, "entry_replaced", entry, message)
    for block in replay.overwritten:
        request, index, position = replay.holders(block)[0]
        message = f"position {position}: block {block} was zeroed or copied over while it is held"
        trial.report("content", 3, "held_block_overwritten", message, request=request, group=index, positions=[position])
    for group_index, request_index, num_tokens, block in replay.new_keys:
        _check_key(trial, group_index, request_index, num_tokens, block)


def _report_missing(trial: Trial, entry: Entry, num_computed: int) -> None:
    """A stay whose load failed goes on from a token without what that one needs."""
    group = trial.replay.groups[entry.group]
    if group.holds_states:
        what = f"no block has the state after {num_computed} tokens"
    else:
        start = entry.position * group.block_size
        what = f"it needs {token_range(start, start + group.block_size)}, but position {entry.position} is null"
    message = f"computed again from token {num_computed} on, as its load failed; {what}"
    _report_entry(trial, "content", 3, "missing_before_failed_load", entry, message)


def _check_hit(trial: Trial, entry: Entry, content: Content | None, found: int) -> None:
    """The block must hold the request's own prefix, as far as its local tokens go. found: the block that the lookup found,
    which may have been copied into the entry's."""
    replay = trial.replay
    stay = entry.stay
    group = replay.groups[entry.group]
    end = stay.num_local if group.holds_states else min((entry.position + 1) * group.block_size, stay.num_local)
    if not holds(trial, content, entry.group, entry.position, stay.request_index, end):
        start = entry.position * replay.groups[entry.group].block_size
        held = replay.describe(entry.block, content) if content is not None else "holds nothing that was written"
        message = f"position {entry.position}: block {entry.block} hit for {token_range(start, end)}, but it {held}"
        _report_entry(trial, "content", 3, _hit_cause(trial, entry, content, end, found), entry, message)
    elif group.holds_states and stay.replays:
        message = (
            f"position {entry.position}: block {entry.block} is hit for the state after {end} tokens, but tokens before "
        )
        message += "those are computed again, from that state on"
        _report_entry(trial, "content", 3, "replayed_state", entry, message)


def _hit_cause(trial: Trial, entry: Entry, content: Content | None, num_tokens: int, found: int) -> str:
    """Why a block is hit that does not hold the first `num_tokens` tokens: the key of the block that was found was wrong
    from the start, or it was copied before it was loaded or computed, which this very step does, or a load failed that was
    to bring them, and who was to compute them instead has not."""
    key_cause, writer = trial.wrong_keys.get((entry.group, found), (None, None))
    if key_cause and writer is _writer(content):
        return f"hit_{key_cause}"
    if found != entry.block:
        if any(found == fresh.block and fresh.stay.num_external for fresh in trial.replay.fresh):
            return "copied_before_load"
        source = trial.replay.contents[found]
        if holds(trial, source, entry.group, entry.position, entry.stay.request_index, num_tokens):
            return "copied_before_computed"
    if content is None:
        return "hit_wrong_tokens"
    is_own = content.group == entry.group and content.position == entry.position
    common = trial.replay.prefixes.common(content.stay.request_index, entry.stay.request_index)
    was_lost = content.stay.num_lost >= num_tokens
    return "hit_failed_load" if was_lost and is_own and common >= num_tokens else "hit_wrong_tokens"


def _check_key(trial: Trial, group_index: int, request_index: int, num_tokens: int, block: int) -> None:
    replay = trial.replay
    position = (num_tokens - 1) // replay.groups[group_index].block_size  # floors: the block of the last token
    content = replay.contents[block]
    if not holds(trial, content, group_index, position, request_index, num_tokens):
        name = replay.prefixes.name(request_index) if request_index >= 0 else "no request"
        message = (
            f"the key of the first {num_tokens} tokens of request {name} is linked to block {block}, which "
            f"{replay.describe(block)}"
        )
        cause = _key_cause(trial, group_index, request_index, num_tokens, block)
        if cause is not None:
            trial.wrong_keys[group_index, block] = cause, _writer(content)
        trial.report(
            "content", 3, cause or "key_wrong_tokens", message, group=group_index, positions=[position], observed=block
        )
    elif content is not None and content.is_untold:
        replay.contents[block] = content.told(num_tokens)


def _writer(content: Content | None) -> Stay | None:
    """Whose values a block holds."""
    return content.stay if content is not None else None


def _key_cause(trial: Trial, group_index: int, request_index: int, num_tokens: int, block: int) -> str | None:
    """Why a key is linked to a block that does not hold its tokens, where that can be told."""
    content, group = trial.replay.contents[block], trial.replay.groups[group_index]
    is_state = content is not None and content.group == group_index and group.holds_states
    was_preempted = _was_preempted_before(trial, request_index, num_tokens)
    if content is None or not is_state:
        return "uncomputed_key" if was_preempted else None
    is_of_prefix = trial.replay.prefixes.common(content.stay.request_index, request_index) >= num_tokens
    is_of_another = is_of_prefix and (content.until > num_tokens or content.stay not in trial.replay.preempted)
    if was_preempted and not is_of_another:
        return "uncomputed_key"
    if content.stay.replays:
        return "replayed_state_key"
    if not is_of_prefix:
        return None
    if content.until and content.until < num_tokens <= content.stay.num_lost:
        return "failed_load_key"
    if num_tokens > max(content.stay.num_computed, content.stay.num_tried):
        return "unwritten_key"
    if _is_of_drafted_checkpoint(group, content, num_tokens):
        return "drafted_checkpoint_key"
    if content.until < 0 and num_tokens < content.stay.num_computed:
        # The prompt's end, too: the drafts of a padded admission pass it.
        return "drafted_state_key" if num_tokens >= content.stay.num_prefill else "passed_over_key"
    if content.since == content.until and content.position == group.last_position(num_tokens):
        return "checkpoint_key_again"
    if _state_went_on(content, num_tokens):
        return "outdated_state_key"
    return _cause_of_state_before(group, content, num_tokens)


def _was_preempted_before(trial: Trial, request_index: int, num_tokens: int) -> bool:
    """Whether the step that stored the key took back, by a preemption, the tokens that it was to compute."""
    common = trial.replay.prefixes.common
    return any(
        stay.num_written < num_tokens and common(stay.request_index, request_index) >= num_tokens
        for stay in trial.replay.preempted
    )


def _is_of_drafted_checkpoint(group: GroupView, content: Content, num_tokens: int) -> bool:
    """Whether a key is of a checkpoint behind the prefill, where steps write none. Keys of whole blocks stand where their
    last token is, and so does the key of the prompt's end, unless it is of a padded admission's checkpoint."""
    is_in_place = content.position == group.last_position(num_tokens)
    is_whole = num_tokens % group.block_size == 0
    num_behind = num_tokens - content.stay.num_prefill
    return group.has_checkpoints and num_behind >= 0 and not (is_in_place and (is_whole or num_behind == 0))


def _state_went_on(content: Content, num_tokens: int) -> bool:
    """Whether the block held the key's state and was written on since: to a later state of the same request, or to one
    that the next output tells."""
    return content.until > num_tokens or (not content.until and content.stay.num_known >= num_tokens)


def _cause_of_state_before(group: GroupView, content: Content, num_tokens: int) -> str | None:
    """Why a block holds an earlier state of the request than its key says: a step that began inside the block went on
    behind its end, or one whose drafts were right; neither left the state at the end of it. Or the block was let go where
    its state was, and taken anew for the states of drafts."""
    stay, position = content.stay, group.last_position(num_tokens)
    if not content.until < num_tokens < stay.num_computed:
        return None
    if num_tokens > stay.num_prefill:
        return "drafted_state_key" if content.position == position else None
    if content.position != position:
        return "passed_over_key"
    begins_inside = content.until % group.block_size > 0 and group.last_position(content.until) == position
    return "skipped_state_key" if group.has_checkpoints and begins_inside else None


def holds(trial: Trial, content: Content | None, group: int, position: int, request_index: int, num_tokens: int) -> bool:
    """Whether a content is the entry at `position` of a request's table, up to its first `num_tokens` tokens; or the
    state after exactly so many, wherever it stands."""
    if content is None or content.group != group:
        return False
    view = trial.replay.groups[group]
    if view.holds_states:
        is_there = _may_be_state(view, content, num_tokens) if content.is_untold else content.until == num_tokens
    else:
        is_there = content.position == position and content.num_tokens >= num_tokens
    return is_there and trial.replay.prefixes.common(content.stay.request_index, request_index) >= num_tokens


def _may_be_state(view: GroupView, checkpoint: Content, num_tokens: int) -> bool:
    """Whether a step may have left its checkpoint after so many tokens. Its key is all that tells where it did."""
    assert checkpoint.since is not None
    steps = num_tokens - checkpoint.since
    return steps > 0 and num_tokens < checkpoint.until and steps % view.checkpoint_step == 0


def _report_entry(trial: Trial, kind: Kind, law: int, cause: str, entry: Entry, message: str) -> None:
    trial.report(
        kind,
        law,
        cause,
        message,
        request=entry.stay.request,
        group=entry.group,
        positions=[entry.position],
        observed=entry.block,
    )

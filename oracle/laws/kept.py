"""Law 4 for connectors that keep content outside the KV cache: what they store, and what they bring back."""

from __future__ import annotations

from collections.abc import Sequence

from oracle.content import Content, GroupView
from oracle.findings import token_range
from oracle.laws.content import holds
from oracle.laws.trial import STATES, Kept, Pending, Trial, law
from oracle.selection import NULL
from sim.history import Move, Moves, Scheduled, StateRecord


@law(
    4,
    "A connector that keeps content stores blocks that hold whole tokens of the request, and until a store is over nobody "
    "writes them anew; what it loads into a block was stored from a block with these very tokens.",
    STATES,
)
def check_kept(trial: Trial, record: StateRecord) -> None:
    """Law 4, content. Loads come before the forward pass, stores after it; one that is under way is over with the next
    step, and reads its blocks before that writes only if it has to hurry."""
    kept = trial.kept
    if kept is None:
        return
    if isinstance(record, Scheduled) and record.moves is not None:
        _check_moves(trial, kept, record, record.moves)
    kept.before = list(trial.replay.contents)


def _check_moves(trial: Trial, kept: Kept, record: Scheduled, moves: Moves) -> None:
    for request, num_local, answered in record.asked or ():
        if answered is not None and answered < 0:
            message = f"{num_local} tokens are local: the connector answers {answered} external tokens"
            trial.report("hit", 4, "negative_external", message, request=request, expected=0, observed=answered)
    _finish_stores(trial, kept, moves.hurried)
    for move in moves.loads:
        _check_load(trial, kept, move)
    for move in moves.stores:
        is_hurried = move.job is not None and move.job in moves.hurried
        _store(trial, kept, move, kept.before if is_hurried else trial.replay.contents, not is_hurried)


def _finish_stores(trial: Trial, kept: Kept, hurried: list[int]) -> None:
    """Stores sent in the step before have read their blocks by now: those that had to hurry before this step wrote."""
    replay = trial.replay
    for store in kept.pending:
        now = replay.contents[store.block]
        is_there = now is not None and now.stay is store.content.stay and now.position == store.content.position
        if not is_there and store.job not in hurried:
            message = (
                f"block {store.block} is written anew while its store into place {store.place} is under way: it held "
                f"{replay.what(store.content)}, and {replay.describe(store.block)}"
            )
            trial.report("content", 4, "store_overtaken", message, request=store.request, group=store.group)
    kept.pending.clear()


def _check_load(trial: Trial, kept: Kept, move: Move) -> None:
    """Each block must come from where the tokens of its position were stored. Whether the blocks are right: see the
    selection."""
    replay = trial.replay
    stay, tables = replay.stays.get(move.request), replay.tables.get(move.request)
    if stay is None or tables is None:
        return  # the selection has been judged
    table, size = tables[move.group], replay.groups[move.group].block_size
    for block, place in zip(move.blocks, move.places, strict=False):
        if block not in table or block == NULL:
            continue
        position = table.index(block)
        end = min((position + 1) * size, stay.num_found)
        tokens = token_range(position * size, max(end, position * size + 1))
        if place not in kept.contents:
            message = f"position {position}: block {block} is loaded from place {place}, where nothing was stored"
            cause = "never_stored"
        elif holds(trial, kept.contents[place], move.group, position, stay.request_index, end):
            continue
        else:
            content = kept.contents[place]
            found = f"holds {replay.what(content)}" if content is not None else "holds nothing that was written"
            message = f"position {position}: block {block} is loaded for {tokens} from place {place}, which {found}"
            cause = "wrong_content"
        trial.report(
            "content",
            4,
            cause,
            message,
            request=move.request,
            group=move.group,
            positions=[position],
            observed=place,
        )


def _store(trial: Trial, kept: Kept, move: Move, contents: Sequence[Content | None], goes_on: bool) -> None:
    """The block must hold tokens of the request, all of them written; what it holds is kept from now on. contents: what
    blocks hold when the store reads them. goes_on: it is under way until the next step."""
    replay, group = trial.replay, trial.replay.groups[move.group]
    for block, place in zip(move.blocks, move.places, strict=False):
        content = contents[block] if 0 < block < replay.num_blocks else None
        if content is None or content.group != move.group or not _is_written(content, group, kept.stores_parts):
            what = "the null block" if block == NULL else f"block {block}, which {replay.describe(block)}"
            message = f"stores {what}, into place {place}: not written as far as it should be"
            trial.report("content", 4, "stored_unwritten", message, request=move.request, group=move.group, observed=block)
        elif not _is_own(trial, content, move.request):
            message = f"stores block {block}, which {replay.describe(block)}, into place {place}"
            trial.report("content", 4, "foreign_block", message, request=move.request, group=move.group, observed=block)
        if content is not None and not group.holds_states:
            content = content._replace(until=content.num_tokens)
        kept.contents[place] = content
        if content is not None and move.job is not None and goes_on:
            kept.pending.append(Pending(move.job, move.request, move.group, block, place, content))


def _is_written(content: Content, group: GroupView, stores_parts: bool) -> bool:
    """Whether a state is there, or all tokens of the block, or at least one."""
    if group.holds_states:
        return content.until > 0
    start = content.position * group.block_size
    return content.num_tokens >= start + (1 if stores_parts else group.block_size)


def _is_own(trial: Trial, content: Content, request: str) -> bool:
    """Whether the tokens are the request's: it wrote them, or has the same ones. Of a request that has ended only who wrote
    them tells, and a block that it shared may be anybody's."""
    replay = trial.replay
    stay, group = replay.stays.get(request), replay.groups[content.group]
    if stay is None or content.stay.request == request:
        return True
    end = content.until if group.holds_states else (content.position + 1) * group.block_size
    return replay.prefixes.common(content.stay.request_index, stay.request_index) >= end

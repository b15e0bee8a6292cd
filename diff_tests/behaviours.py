"""The behaviours of vLLM that a campaign has to show: a table, each row with the detector that sees it.

A detector is called at one moment of a walk through a history, and says whether, or how often, the behaviour shows there.
The moments: once for the scenario; after each call of the scheduler, or only after one that admits (for each request),
preempts, leaves somebody waiting, computes a part of a prompt, copies blocks, changes tables, or changes what is cached;
after each update, or only one that frees blocks; after an action outside a step; at an exception; and at the end.
`possible` keeps a detector away from scenarios that cannot show its behaviour, `exists` from releases without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from diff_tests.walk import Life, Walk, is_alike
from sim.geometry import FULL_LIKE
from sim.history import Acted, Failure, Scheduled, Table, Updated
from sim.releases import Rules
from sim.scenario import (
    Add,
    AnyGroup,
    ChunkedLocal,
    Direct,
    Mamba,
    Pause,
    Scenario,
    SlidingWindow,
    SlidingWindowMLA,
)

Moment = Literal[
    "scenario",
    "schedule",
    "admission",
    "preemption",
    "wait",
    "prefill",
    "copy",
    "allocation",
    "keys",
    "update",
    "free",
    "action",
    "failure",
    "end",
]
F = TypeVar("F", bound=Callable[..., Any])

KINDS = (
    "full",
    "mla",
    "rswa",
    "sliding_window",
    "sliding_window_mla",
    "sliding_window_mla replayed",
    "chunked_local",
    "mamba none",
    "mamba align",
    "mamba all",
    "circular",
)
"""The kinds of groups, by `kind_of`."""

CACHED_KINDS = tuple(kind for kind in KINDS if kind not in ("circular", "mamba none", "sliding_window_mla replayed"))
SKIPPING_KINDS = (
    "sliding_window",
    "sliding_window_mla",
    "sliding_window_mla replayed",
    "rswa",
    "chunked_local",
    "mamba align",
)


@dataclass(frozen=True)
class Behaviour:
    """One row. `detect` takes what its moment offers: the scenario; walk and life; walk and record; the walk.

    kind: only cases with a group of that kind can show it. needs_worker: only the history of a real run shows it, a
    predicted one does not. promised: a long campaign must show it, on the releases where it exists.
    """

    name: str
    section: str
    moment: Moment
    detect: Callable[..., int]
    kind: str | None
    possible: Callable[[Scenario], bool] | None
    exists: Callable[[Rules], bool]
    needs_worker: bool
    promised: bool


TABLE: dict[str, Behaviour] = {}
_section = ""


def _always(rules: Rules) -> bool:
    return True


def shows(
    name: str,
    moment: Moment,
    *,
    kind: str | None = None,
    possible: Callable[[Scenario], bool] | None = None,
    exists: Callable[[Rules], bool] = _always,
    needs_worker: bool = False,
    promised: bool = True,
) -> Callable[[F], F]:
    """Enters a detector into the table, under the section at hand."""

    def enter(detect: F) -> F:
        assert name not in TABLE, name
        TABLE[name] = Behaviour(name, _section, moment, detect, kind, possible, exists, needs_worker, promised)
        return detect

    return enter


# Which scenarios can show something; cheap, since each is asked of every case.


def _has_connector(scenario: Scenario) -> bool:
    return scenario.connector is not None


def _is_scripted(scenario: Scenario) -> bool:
    return scenario.connector is not None and scenario.connector.name == "scripted"


def _has_drafts(scenario: Scenario) -> bool:
    return scenario.engine.speculative is not None


def _has_eagle(scenario: Scenario) -> bool:
    return scenario.engine.speculative is not None and scenario.engine.speculative.method == "eagle"


def _is_async(scenario: Scenario) -> bool:
    return scenario.engine.async_scheduling


def _defers(scenario: Scenario) -> bool:
    return scenario.engine.async_scheduling and scenario.connector is not None


def _has_priorities(scenario: Scenario) -> bool:
    return scenario.engine.policy == "priority"


def _has_dcp(scenario: Scenario) -> bool:
    return scenario.engine.dcp > 1


def _has(*types: type[AnyGroup]) -> Callable[[Scenario], bool]:
    return lambda scenario: any(isinstance(group, types) for group in scenario.groups)


def _has_states(scenario: Scenario) -> bool:
    return any(isinstance(group, Mamba) and group.mode == "align" for group in scenario.groups)


def _has_checkpoints(scenario: Scenario) -> bool:
    return any(isinstance(group, Mamba) and group.checkpoint_blocks for group in scenario.groups)


def _has_replay(scenario: Scenario) -> bool:
    return any(isinstance(group, SlidingWindowMLA) and group.bounded_replay for group in scenario.groups)


def _has_pauses(scenario: Scenario) -> bool:
    return any(isinstance(step, Pause) for step in scenario.steps)


def _has_events(scenario: Scenario) -> bool:
    return scenario.engine.kv_events


def _may_hit_inside(scenario: Scenario) -> bool:
    return len(scenario.groups) > 1 and _has_states(scenario)


def kind_exists(kind: str) -> Callable[[Rules], bool]:
    """Whether a release knows the kind."""
    if kind == "mamba all":
        return lambda rules: rules.mamba_mode_all_exists
    if kind == "sliding_window_mla replayed":
        return lambda rules: rules.bounded_replay_exists
    return _always


# --------------------------------------------------------------------------------------------------------- what is asked

_section = "settings"


def _setting(name: str, holds: Callable[[Scenario], bool], **options: Any) -> None:
    shows(name, "scenario", **options)(holds)


_setting("driver: scheduler", lambda s: s.driver == "scheduler")
_setting("driver: direct", lambda s: s.driver == "direct")
_setting("connector: none", lambda s: s.connector is None)
_setting("connector: DecodeBenchConnector", lambda s: s.connector is not None and s.connector.name != "scripted")
_setting("connector: scripted", _is_scripted)
for _kind in KINDS:
    _setting(f"group: {_kind}", lambda s: True, kind=_kind, exists=kind_exists(_kind))
_setting("several groups", lambda s: len(s.groups) > 1)
_setting("several groups that are alike", lambda s: len(set(s.groups)) < len(s.groups))
_setting("mixed block sizes", lambda s: len({group.block for group in s.groups}) > 1)
_setting("several layers", lambda s: any(group.layers > 1 for group in s.groups))
_setting("fp8", lambda s: any(group.dtype.startswith("fp8") for group in s.groups))
_setting("mixed element types", lambda s: len({group.dtype for group in s.groups}) > 1)
_setting("kernel blocks below blocks", lambda s: any(g.kernel_block not in (None, g.block) for g in s.groups))
_setting("context parallelism", _has_dcp)
_setting(
    "context parallelism: a group not sharded",
    lambda s: s.engine.dcp > 1 and any(group.dcp_sharded is False for group in s.groups),
    exists=lambda rules: rules.dcp_sharded_flag,
)
_setting("prefix caching off", lambda s: not s.engine.prefix_caching)
_setting("retention: dense", lambda s: s.engine.retention_interval is None)
_setting("retention: ends of prompts only", lambda s: s.engine.retention_interval == 0)
_setting("retention: interval", lambda s: bool(s.engine.retention_interval))
_setting("prefix match unit", lambda s: s.engine.prefix_match_unit is not None)
_setting("chunked prefill off", lambda s: not s.engine.chunked_prefill)
_setting("admission gate off", lambda s: not s.engine.reserve_full_isl)
_setting("watermark", lambda s: s.engine.watermark > 0)
_setting("priorities", _has_priorities)
_setting("asynchronous scheduling", _is_async)
for _method in ("ngram", "draft_model", "eagle"):

    @shows(f"drafts: {_method}", "scenario", possible=_has_drafts)
    def _drafts_by(scenario: Scenario, method: str = _method) -> bool:
        return scenario.engine.speculative is not None and scenario.engine.speculative.method == method


_setting("a speculator's own groups", lambda s: any(group.draft for group in s.groups))
_setting("KV events", _has_events)
_setting("salts", lambda s: any(isinstance(step, Add) and step.salt is not None for step in s.steps))
_setting("adapters", lambda s: any(isinstance(step, Add) and step.lora is not None for step in s.steps))
_setting("filled at start-up", lambda s: s.connector is not None and bool(s.connector.extra.get("startup_fill")))


@shows("request IDs used again", "scenario")
def _ids_used_again(scenario: Scenario) -> bool:
    ids = [step.id for step in scenario.steps if isinstance(step, Add)]
    return len(set(ids)) < len(ids)


@shows("direct: local tokens end inside a block", "scenario", possible=lambda s: s.driver == "direct")
def _direct_inside(scenario: Scenario) -> int:
    directs = [step for step in scenario.steps if isinstance(step, Direct)]
    return sum(any(step.local % group.block for group in scenario.groups) for step in directs)


@shows("direct: nulls in a table", "scenario", possible=lambda s: s.driver == "direct")
def _direct_nulls(scenario: Scenario) -> int:
    return sum(any(0 in table for table in step.tables) for step in scenario.steps if isinstance(step, Direct))


# ------------------------------------------------------------------------------------------------------------------ pool

_section = "pool"


@shows("evictions", "keys")
def _evictions(walk: Walk, record: Scheduled) -> int:
    """A key that is gone, and the block it was linked to was free."""
    return sum(any(not walk.refs_before[b] for b in walk.keys_before[key]) for key in walk.lost_keys)


@shows("keys replaced on a block in use", "keys", possible=lambda s: len(s.groups) > 1)
def _replaced(walk: Walk, record: Scheduled) -> int:
    return sum(all(walk.refs_before[b] for b in walk.keys_before[key]) for key in walk.lost_keys)


@shows("one prefix in several blocks", "keys")
def _duplicates(walk: Walk, record: Scheduled) -> bool:
    return any(len(blocks) > 1 for blocks in walk.keys.values())


@shows("one block linked to two prefixes", "keys", possible=lambda s: len(s.groups) > 1)
def _two_prefixes(walk: Walk, record: Scheduled) -> bool:
    linked = [block_id for blocks in walk.keys.values() for block_id in blocks]
    return len(set(linked)) < len(linked)


@shows("blocks freed to the front, without a key", "free")
def _freed_front(walk: Walk, record: Updated) -> bool:
    return bool(walk.free) and walk.free[0] not in walk.free_before


@shows("blocks freed to the back, with a key", "free")
def _freed_back(walk: Walk, record: Updated) -> bool:
    return bool(walk.free) and walk.free[-1] not in walk.free_before


@shows("pool used up", "allocation")
def _used_up(walk: Walk, record: Scheduled) -> bool:
    return not walk.free


@shows("blocks zeroed", "allocation")
def _zeroed(walk: Walk, record: Scheduled) -> int:
    return len(record.zeroed)


@shows("targets of copies zeroed", "copy", possible=_may_hit_inside)
def _copies_zeroed(walk: Walk, record: Scheduled) -> int:
    return sum(target in record.zeroed for _, target in record.copies)


for _kind in ("stored", "removed", "cleared"):

    @shows(f"KV event: {_kind}", "update", possible=_has_events)
    def _event(walk: Walk, record: Updated, kind: str = _kind) -> bool:
        return any(event[0] == kind for event in record.events or ())


# -------------------------------------------------------------------------------------------------------- kinds of groups

_section = "kinds of groups"


@shows("nulls in a table", "allocation")
def _nulls(walk: Walk, record: Scheduled) -> bool:
    return walk.tables is not walk.tables_before and any(0 in table for tables in walk.tables.values() for table in tables)


for _kind in SKIPPING_KINDS:

    @shows(f"blocks released early: {_kind}", "allocation", kind=_kind, exists=kind_exists(_kind))
    def _released_early(walk: Walk, record: Scheduled, kind: str = _kind) -> bool:
        indexes = [index for index, group in enumerate(walk.groups) if group[1] == kind]
        for request_id in record.scheduled:
            before, after = walk.tables_before.get(request_id), walk.tables.get(request_id)
            if before and after and any(_lost_block(before[index], after[index]) for index in indexes):
                return True
        return False


def _lost_block(before: Table, after: Table) -> bool:
    """Whether an entry has become null and its block has left the table."""
    if after.count(0) <= before.count(0):
        return False
    return any(block and not now and block not in after for block, now in zip(before, after, strict=False))


_CAPPED = (SlidingWindow, SlidingWindowMLA, ChunkedLocal)


@shows("admission that only the cap of a window lets pass", "admission", possible=_has(*_CAPPED))
def _capped(walk: Walk, life: Life, record: Scheduled) -> bool:
    if not walk.engine.reserve_full_isl or life.local or life.external:
        return False
    num_wanted = sum(-(-life.num_tokens // size) for size in walk.sizes)  # rounded up
    return num_wanted > len(walk.free_before) and len(record.admitted) + len(record.resumed) == 1


@shows("state copied for a hit", "copy", possible=_has_states)
def _copied_for_hit(walk: Walk, record: Scheduled) -> int:
    taken = {block for life in walk.admissions for table in walk.tables[life.id] for block in table}
    num_copies = sum(target in taken for _, target in record.copies)
    for life in walk.admissions:
        if num_copies and any(target in table for _, target in record.copies for table in walk.tables[life.id]):
            life.facts.add("copied")
    return num_copies


@shows("cached state left behind by the request that wrote it", "copy", possible=_has_states)
def _left_behind(walk: Walk, record: Scheduled) -> int:
    admitted = {life.id for life in walk.admissions}
    kept = {b for name, tables in walk.tables.items() if name not in admitted for table in tables for b in table}
    return sum(source in kept for source, _ in record.copies)


def _has_speculative_blocks(scenario: Scenario) -> bool:
    return any(isinstance(g, Mamba) and g.mode == "align" and g.speculative_blocks for g in scenario.groups)


@shows("speculative blocks move behind the new state", "allocation", possible=_has_speculative_blocks)
def _relocated(walk: Walk, record: Scheduled) -> bool:
    return any(
        block and now != block and block in after
        for _, before, after in _state_tables(walk, record)
        for block, now in zip(before, after, strict=False)
    )


def _state_tables(walk: Walk, record: Scheduled) -> list[tuple[Life, Table, Table]]:
    """(request, table before, table after) of scheduled requests in groups of mode `align`."""
    indexes = [index for index, group in enumerate(walk.groups) if group[1] == "mamba align"]
    return [
        (walk.live[request_id], walk.tables_before[request_id][index], walk.tables[request_id][index])
        for request_id in record.scheduled
        if request_id in walk.tables_before and request_id in walk.tables
        for index in indexes
    ]


@shows("checkpoint inside a prefill step", "prefill", possible=_has_checkpoints)
def _checkpoint(walk: Walk, record: Scheduled) -> int:
    found = 0
    for index, (group, _, size, _) in enumerate(walk.groups):
        if not isinstance(group, Mamba) or not group.checkpoint_blocks:
            continue
        for request_id in record.scheduled:
            life = walk.live[request_id]
            position = -(-life.num_computed // size) - 2  # the entry before the one the step ends in
            before = walk.tables_before.get(request_id, [[]] * len(walk.groups))[index]
            after = walk.tables.get(request_id, [[]] * len(walk.groups))[index]
            is_new = 0 <= position < len(after) and after[position] and after[position] not in before
            if is_new and life.num_computed - record.scheduled[request_id] <= position * size:
                life.facts.add("checkpoint")
                found += 1
    return found


@shows(
    "checkpoint beside speculative blocks",
    "prefill",
    possible=lambda s: _has_checkpoints(s) and _has_speculative_blocks(s),
)
def _checkpoint_with_speculative(walk: Walk, record: Scheduled) -> bool:
    if not _checkpoint(walk, record):
        return False
    return any(isinstance(g, Mamba) and g.checkpoint_blocks and g.speculative_blocks for g in walk.scenario.groups)


@shows("admission that waits a step for a state just written", "admission", possible=_has_states)
def _waits_for_state(walk: Walk, life: Life, record: Scheduled) -> bool:
    if "waited" not in life.facts or not life.local:
        return False
    states = [index for index, group in enumerate(walk.groups) if group[1] == "mamba align"]
    return any(walk.key(index, life, life.local) in walk.new_keys for index in states)


@shows("prefill step cut at the end of a state's block", "prefill", possible=_has_states)
def _cut_at_block(walk: Walk, record: Scheduled) -> bool:
    return any(life.num_computed % size == 0 for life, size in _cut_prefills(walk, record))


@shows("prefill step cut inside a state's block", "prefill", possible=_may_hit_inside)
def _cut_inside(walk: Walk, record: Scheduled) -> bool:
    return any(life.num_computed % size for life, size in _cut_prefills(walk, record))


def _cut_prefills(walk: Walk, record: Scheduled) -> list[tuple[Life, int]]:
    """(request, block size of its states) where a step ends early though budget and thresholds leave room."""
    engine = walk.engine
    if engine.long_prefill_token_threshold or sum(record.scheduled.values()) + 1 >= engine.max_num_batched_tokens:
        return []
    size = next(size for _, kind, size, _ in walk.groups if kind == "mamba align")
    lives = [walk.live[request_id] for request_id in record.scheduled]
    return [(life, size) for life in lives if life.num_computed < life.num_tokens]


# ------------------------------------------------------------------------------------------------------------------ hits

_section = "hits"


def _caches(scenario: Scenario) -> bool:
    return scenario.engine.prefix_caching


for _kind in CACHED_KINDS:

    @shows(f"local hit: {_kind}", "admission", kind=_kind, exists=kind_exists(_kind))
    def _local_hit(walk: Walk, life: Life, record: Scheduled, kind: str = _kind) -> bool:
        if not life.local:
            return False
        tables = walk.tables.get(life.id)
        return tables is not None and any(
            group[1] == kind and any(table[: -(-life.local // group[2])])  # rounded up: the hit may end inside
            for group, table in zip(walk.groups, tables, strict=True)
        )


def _hit_blocks(walk: Walk, life: Life) -> list[int]:
    """Blocks of the admission's tables that held a key before, at the positions of its hit."""
    tables = walk.tables.get(life.id) or []
    return [
        block
        for (_, _, size, caches), table in zip(walk.groups, tables, strict=False)
        if caches
        for block in table[: -(-life.local // size)]  # rounded up
        if block
    ]


@shows("hit takes a block out of the free queue", "admission", possible=_caches)
def _revived(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and any(not walk.refs_before[block] for block in _hit_blocks(walk, life))


@shows("hit shares a block in use", "admission", possible=_caches)
def _shared(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and any(walk.refs_before[block] for block in _hit_blocks(walk, life))


@shows("hit chooses among several blocks", "admission", possible=_caches)
def _chosen(walk: Walk, life: Life, record: Scheduled) -> bool:
    if not life.local:
        return False
    hit = set(_hit_blocks(walk, life))
    return any(len(blocks) > 1 and not hit.isdisjoint(blocks) for blocks in walk.keys_before.values())


@shows("hit of a part of the prompt", "admission", possible=_caches)
def _part(walk: Walk, life: Life, record: Scheduled) -> bool:
    return 0 < life.local < life.num_prompt - max(walk.sizes)


@shows("hit of generated tokens", "admission", possible=_caches)
def _generated(walk: Walk, life: Life, record: Scheduled) -> bool:
    if not life.local:
        return False
    owners = [other for other in walk.lives[: life.index] if walk.num_common(other, life) >= life.local]
    return bool(owners) and all(other.num_prompt < life.local for other in owners)


@shows("window hit with nulls before it", "admission", possible=_has(SlidingWindow, SlidingWindowMLA))
def _window_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    return any(
        kind.startswith("sliding") and caches and not table[0] and any(table[: life.local // size])
        for (_, kind, size, caches), table in zip(walk.groups, walk.tables.get(life.id, ()), strict=False)
        if life.local and table
    )


@shows("chunks hit without a cached block", "admission", possible=_has(ChunkedLocal))
def _chunk_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and any(
        kind == "chunked_local" and not any(table[: life.local // size])
        for (_, kind, size, _), table in zip(walk.groups, walk.tables.get(life.id, ()), strict=False)
    )


@shows("hit shortened by another group", "admission", possible=lambda s: s.engine.prefix_caching and len(s.groups) > 1)
def _shortened(walk: Walk, life: Life, record: Scheduled) -> bool:
    """A full-like group has the next block too, and nothing was loaded in its place."""
    return (
        not life.external
        and any(
            isinstance(group, FULL_LIKE) and _has_key(walk, index, life, life.local // size * size + size)
            for index, (group, _, size, _) in enumerate(walk.groups)
        )
        and not _has_eagle(walk.scenario)
    )


def _has_key(walk: Walk, group_index: int, life: Life, num_tokens: int) -> bool:
    """Whether the request's leading tokens were cached in a group, and short enough to be hit."""
    return num_tokens < life.num_tokens and walk.key(group_index, life, num_tokens) in walk.keys_before


@shows("hit inside a block", "admission", possible=_may_hit_inside)
def _inside(walk: Walk, life: Life, record: Scheduled) -> bool:
    is_inside = any(caches and life.local % size for _, _, size, caches in walk.groups)
    if is_inside:
        life.facts.add("inside")
    return is_inside


@shows("hit of a checkpoint", "admission", possible=_has_checkpoints)
def _checkpoint_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and any(
        "checkpoint" in other.facts and walk.num_common(other, life) - life.local > 0 and is_alike(other.add, life.add)
        for other in walk.lives[: life.index]
    )


@shows("hit at a retention interval inside a prompt", "admission", possible=lambda s: bool(s.engine.retention_interval))
def _interval_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    interval = walk.engine.retention_interval or 1
    if not life.local or life.local % interval:
        return False
    owners = [other for other in walk.lives[: life.index] if walk.num_common(other, life) >= life.local]
    return bool(owners) and all(life.local + math.lcm(*walk.sizes) < other.num_prompt for other in owners)


@shows("no hit under another salt or adapter", "admission", possible=_caches)
def _other_salt(walk: Walk, life: Life, record: Scheduled) -> bool:
    if life.local:
        return False
    return any(
        not is_alike(other.add, life.add)
        and walk.num_common(other, life) >= size
        and (index, other.index, size) in walk.keys_before
        for other in walk.lives[: life.index]
        for index, size in enumerate(walk.sizes)
    )


@shows("cache not read on demand though it has the prompt", "admission", possible=_caches)
def _not_read(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.add.skip_cache and any(_has_key(walk, i, life, size) for i, size in enumerate(walk.sizes))


@shows("last block of a hit dropped for EAGLE", "admission", possible=_has_eagle)
def _dropped(walk: Walk, life: Life, record: Scheduled) -> bool:
    drops = not walk.rules.hashes_look_ahead_for_eagle or walk.scenario.connector is not None
    found = drops and not life.external and _more_is_cached(walk, life)
    if found:
        life.facts.add("dropped")
    return found


def _more_is_cached(walk: Walk, life: Life) -> bool:
    """Whether some group has the block after the hit."""
    return any(
        caches and _has_key(walk, index, life, life.local // size * size + size)
        for index, (_, _, size, caches) in enumerate(walk.groups)
    )


@shows(
    "hit by keys that look ahead",
    "admission",
    possible=lambda s: _has_eagle(s) and s.connector is None,
    exists=lambda rules: rules.hashes_look_ahead_for_eagle,
)
def _looks_ahead(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0


@shows(
    "last block of a hit dropped without EAGLE",
    "admission",
    possible=lambda s: any(group.draft for group in s.groups) and not _has_eagle(s),
    exists=lambda rules: not rules.marked_groups_drop_only_with_eagle,
)
def _dropped_without_eagle(walk: Walk, life: Life, record: Scheduled) -> bool:
    return not life.external and _more_is_cached(walk, life)


@shows(
    "hit computed again: bounded replay",
    "admission",
    possible=_has_replay,
    exists=kind_exists("sliding_window_mla replayed"),
)
def _replayed(walk: Walk, life: Life, record: Scheduled) -> bool:
    held = {block for blocks in walk.keys_before.values() for block in blocks}
    return life.num_computed > life.local and any(
        caches and any(block in held for block in table[-(-life.local // size) : life.num_tokens // size])
        for (_, _, size, caches), table in zip(walk.groups, walk.tables.get(life.id, ()), strict=False)
    )


@shows(
    "hit too short for bounded replay", "admission", possible=_has_replay, exists=kind_exists("sliding_window_mla replayed")
)
def _too_short(walk: Walk, life: Life, record: Scheduled) -> bool:
    return not life.local and not life.external and _more_is_cached(walk, life)


@shows("hit under context parallelism", "admission", possible=_has_dcp)
def _hit_under_dcp(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0


@shows(
    "window hit under context parallelism",
    "admission",
    possible=lambda s: _has_dcp(s) and _has(SlidingWindow, SlidingWindowMLA)(s),
    exists=lambda rules: rules.dcp_sharded_flag,
)
def _window_hit_under_dcp(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0


@shows("resumption with a local hit", "admission", possible=_caches)
def _resumed_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and life.num_preemptions > 0


# ------------------------------------------------------------------------------------------------------------- scheduler

_section = "scheduler"


@shows("steps", "schedule")
def _steps(walk: Walk, record: Scheduled) -> int:
    return 1


@shows("admissions", "admission")
def _admissions(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.id in record.admitted


@shows("preemptions", "preemption")
def _preemptions(walk: Walk, record: Scheduled) -> int:
    return len(record.preempted)


@shows("resumptions", "admission")
def _resumptions(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.id in record.resumed


@shows("several preempted in one step", "preemption")
def _several_preempted(walk: Walk, record: Scheduled) -> bool:
    return len(record.preempted) > 1


@shows("preempted again after resuming", "preemption")
def _preempted_again(walk: Walk, record: Scheduled) -> bool:
    return any(walk.live[request_id].num_preemptions > 1 for request_id in record.preempted)


@shows("preempted in its prefill", "preemption")
def _preempted_in_prefill(walk: Walk, record: Scheduled) -> bool:
    return any("preempted in its prefill" in walk.live[request_id].facts for request_id in record.preempted)


def _took_block(walk: Walk, request_id: str) -> bool:
    before, after = walk.tables_before.get(request_id, ()), walk.tables.get(request_id, ())
    return any(not set(b).issuperset(a) for b, a in zip(before, after, strict=False))


@shows("a request preempts itself", "preemption")
def _preempts_itself(walk: Walk, record: Scheduled) -> bool:
    """Nobody else took a block in its place."""
    return len(record.preempted) == 1 and not any(_took_block(walk, name) for name in record.scheduled)


@shows("priorities: the victim is not the last", "preemption", possible=_has_priorities)
def _not_the_last(walk: Walk, record: Scheduled) -> bool:
    return len(record.preempted) == 1 and bool(walk.running_before) and walk.running_before[-1].id != record.preempted[0]


@shows("priorities: a later arrival goes first", "admission", possible=_has_priorities)
def _overtakes(walk: Walk, life: Life, record: Scheduled) -> bool:
    return any(other.add.priority > life.add.priority for other in walk.waiting() if other.index < life.index)


@shows(
    "priorities: others go on after a request preempted itself",
    "preemption",
    possible=_has_priorities,
    exists=lambda rules: rules.priority_goes_on_after_self_preemption,
)
def _others_go_on(walk: Walk, record: Scheduled) -> bool:
    if not _preempts_itself(walk, record):
        return False
    order = [life.id for life in walk.running_before]
    return record.preempted[0] in order and any(
        name in record.scheduled for name in order[order.index(record.preempted[0]) + 1 :]
    )


@shows("prefill in chunks", "prefill")
def _in_chunks(walk: Walk, record: Scheduled) -> bool:
    return any(walk.live[name].num_computed < walk.live[name].num_tokens for name in record.scheduled)


@shows("prompt waits for a whole budget", "wait", possible=lambda s: not s.engine.chunked_prefill)
def _waits_for_budget(walk: Walk, record: Scheduled) -> bool:
    num_left = walk.engine.max_num_batched_tokens - sum(record.scheduled.values())
    waiting = walk.waiting()
    return bool(record.scheduled) and bool(waiting) and 0 < num_left < waiting[0].num_tokens


@shows("chunk cut by the long-prefill threshold", "prefill", possible=lambda s: s.engine.long_prefill_token_threshold > 0)
def _cut_by_threshold(walk: Walk, record: Scheduled) -> bool:
    threshold = walk.engine.long_prefill_token_threshold
    return any(
        num_tokens == threshold and walk.live[name].num_computed < walk.live[name].num_tokens
        for name, num_tokens in record.scheduled.items()
    )


@shows(
    "long-prefill threshold off for a lone request",
    "prefill",
    possible=lambda s: s.engine.long_prefill_token_threshold > 0,
    exists=lambda rules: rules.lone_request_ignores_long_prefill_threshold,
)
def _threshold_off(walk: Walk, record: Scheduled) -> bool:
    is_lone = len(record.scheduled) == 1 and not walk.waiting() and not walk.engine.long_prefill_adaptive
    return is_lone and max(record.scheduled.values()) > walk.engine.long_prefill_token_threshold


@shows(
    "long-prefill threshold adapted to the requests",
    "prefill",
    possible=lambda s: s.engine.long_prefill_adaptive and s.engine.long_prefill_token_threshold > 0,
    exists=lambda rules: rules.long_prefill_threshold_adapts,
)
def _threshold_adapted(walk: Walk, record: Scheduled) -> bool:
    threshold = walk.engine.long_prefill_token_threshold
    num_others = len(record.scheduled) + len(walk.waiting())
    return num_others > 1 and any(
        num_tokens > threshold and walk.live[name].num_computed < walk.live[name].num_tokens
        for name, num_tokens in record.scheduled.items()
    )


@shows("nobody admitted for the limit of sequences", "wait")
def _sequence_limit(walk: Walk, record: Scheduled) -> bool:
    return len(walk.running) >= walk.engine.max_num_seqs and bool(walk.waiting())


@shows("admissions refused for now", "wait")
def _refused(walk: Walk, record: Scheduled) -> bool:
    if not walk.is_refused:
        return False
    for life in walk.waiting():
        life.facts.add("waited")
    return True


def _would_fit(walk: Walk, record: Scheduled) -> bool:
    """Whether the blocks left would do for the next step of whoever waits first, even without a hit."""
    if not walk.is_refused:
        return False
    life = walk.waiting()[0]
    num_left = walk.engine.max_num_batched_tokens - sum(record.scheduled.values())
    num_tokens = min(life.num_tokens, num_left) + walk.num_spec
    return sum(-(-num_tokens // size) for size in walk.sizes) <= len(walk.free)


def _is_plain(scenario: Scenario) -> bool:
    """Nothing but blocks keeps anybody out."""
    engine = scenario.engine
    return (
        engine.chunked_prefill
        and not engine.async_scheduling
        and engine.prefill_schedule_interval == 1
        and engine.policy == "fcfs"
        and scenario.connector is None
        and not _has(Mamba)(scenario)
    )


@shows("refused by the gate on the whole prompt", "wait", possible=lambda s: _is_plain(s) and s.engine.reserve_full_isl)
def _gate(walk: Walk, record: Scheduled) -> bool:
    return not walk.engine.watermark and _would_fit(walk, record)


@shows("refused by the watermark", "wait", possible=lambda s: _is_plain(s) and s.engine.watermark > 0)
def _watermark(walk: Walk, record: Scheduled) -> bool:
    return not walk.engine.reserve_full_isl and _would_fit(walk, record)


@shows(
    "prefills held back by the cadence",
    "schedule",
    possible=lambda s: s.engine.prefill_schedule_interval > 1,
    exists=lambda rules: rules.prefill_cadence_is_local,
)
def _held_back(walk: Walk, record: Scheduled) -> bool:
    is_open = sum(record.scheduled.values()) < walk.engine.max_num_batched_tokens
    return (
        is_open
        and not record.preempted
        and any(life.id not in record.scheduled and not life.is_decoding for life in walk.running)
    )


@shows("paused for new requests: the others go on", "wait", possible=_has_pauses)
def _paused_new(walk: Walk, record: Scheduled) -> bool:
    return walk.paused == "new" and bool(record.scheduled) and bool(walk.waiting())


@shows("paused for all", "schedule", possible=_has_pauses)
def _paused_all(walk: Walk, record: Scheduled) -> bool:
    return walk.paused == "all" and bool(walk.running)


@shows(
    "paused for new requests: a load that arrived is admitted",
    "admission",
    possible=_has_pauses,
    exists=lambda rules: rules.holders_run_while_new_are_paused,
)
def _holder_admitted(walk: Walk, life: Life, record: Scheduled) -> bool:
    return walk.paused == "new"


# ---------------------------------------------------------------------------------------------------------------- drafts

_section = "drafts"


@shows("drafts scheduled", "schedule", possible=_has_drafts)
def _drafts(walk: Walk, record: Scheduled) -> int:
    return sum(num_drafts > 0 for num_drafts in walk.flights[record.step].drafts.values())


def _outcomes(walk: Walk, record: Updated) -> list[tuple[Life, int, int]]:
    """(request, drafted, accepted) of a step's output."""
    flight = walk.landed
    if flight is None:
        return []
    return [
        (flight.lives[name], num_drafts, record.new_tokens[name] - 1)
        for name, num_drafts in flight.drafts.items()
        if num_drafts and name in record.new_tokens
    ]


@shows("drafts accepted", "update", possible=_has_drafts)
def _accepted(walk: Walk, record: Updated) -> int:
    return sum(accepted == drafted for _, drafted, accepted in _outcomes(walk, record))


@shows("drafts accepted in part", "update", possible=_has_drafts)
def _accepted_in_part(walk: Walk, record: Updated) -> int:
    return sum(0 < accepted < drafted for life, drafted, accepted in _outcomes(walk, record) if life.state != "ended")


@shows("drafts rejected", "update", possible=_has_drafts)
def _rejected(walk: Walk, record: Updated) -> int:
    rejected = [life for life, _, accepted in _outcomes(walk, record) if not accepted and life.state != "ended"]
    for life in rejected:
        life.facts.add("rejected")
    return len(rejected)


@shows("outputs cut off by the end of a request", "update", possible=_has_drafts)
def _cut_off(walk: Walk, record: Updated) -> bool:
    speculative = walk.engine.speculative
    fewest = min(speculative.accept, default=0) if speculative else 0
    return any(
        life.state == "ended" and accepted < min(drafted, fewest) for life, drafted, accepted in _outcomes(walk, record)
    )


@shows("admission padded to a decode step", "schedule", possible=_has_drafts)
def _padded(walk: Walk, record: Scheduled) -> bool:
    return any("padded" in life.facts for life in walk.admissions)


@shows(
    "admission padded beside nobody",
    "schedule",
    possible=_has_drafts,
    exists=lambda rules: rules.lone_admission_is_padded,
)
def _padded_alone(walk: Walk, record: Scheduled) -> bool:
    return len(record.scheduled) == 1 and any("padded" in life.facts for life in walk.admissions)


@shows("a block for lookahead slots alone", "allocation", possible=_has_drafts)
def _lookahead(walk: Walk, record: Scheduled) -> bool:
    return any(
        isinstance(group, FULL_LIKE) and len(walk.tables[name][index]) > -(-walk.live[name].num_computed // size)
        for index, (group, _, size, _) in enumerate(walk.groups)
        for name in record.scheduled
        if name in walk.tables
    )


@shows("preempted with drafts", "preemption", possible=_has_drafts)
def _preempted_with_drafts(walk: Walk, record: Scheduled) -> bool:
    return any("decoding at preemption" in walk.live[name].facts for name in record.preempted)


@shows("drafts rejected beside speculative states", "update", possible=_has_drafts)
def _rejected_states(walk: Walk, record: Updated) -> bool:
    return _has_speculative_blocks(walk.scenario) and _rejected(walk, record) > 0


# ----------------------------------------------------------------------------------------------- asynchronous scheduling

_section = "asynchronous scheduling"


@shows("step scheduled before the last one's output", "schedule", possible=_is_async)
def _overlaps(walk: Walk, record: Scheduled) -> bool:
    return len(walk.flights) > 1 and bool(record.scheduled)


@shows("left out while its last output is in flight", "schedule", possible=_is_async)
def _last_in_flight(walk: Walk, record: Scheduled) -> bool:
    return any(
        life.id not in record.scheduled and life.num_unseen and life.num_tokens + life.num_unseen >= _end_of(walk, life)
        for life in walk.running
    )


def _end_of(walk: Walk, life: Life) -> int:
    """Tokens at which the request ends."""
    return min(life.num_prompt + life.add.max_tokens, walk.engine.max_model_len)


@shows("blocks held until a step is processed", "update", possible=_defers)
def _deferred(walk: Walk, record: Updated) -> bool:
    return len(walk.deferred) > len(walk.deferred_before)


@shows("held blocks released", "update", possible=_defers)
def _drained(walk: Walk, record: Updated) -> bool:
    return len(walk.deferred) < len(walk.deferred_before)


@shows("both ends of a copy held past its step", "copy", possible=lambda s: _defers(s) and _has_states(s))
def _copy_held(walk: Walk, record: Scheduled) -> bool:
    return bool(walk.deferred)


@shows(
    "nobody preempted whose blocks may still be written",
    "schedule",
    possible=_defers,
    exists=lambda rules: rules.victim_must_be_free_at_once,
)
def _spared(walk: Walk, record: Scheduled) -> bool:
    if record.preempted or sum(record.scheduled.values()) >= walk.engine.max_num_batched_tokens:
        return False
    return walk.paused != "all" and any(
        life.id not in record.scheduled and life.num_tokens + life.num_unseen < _end_of(walk, life) for life in walk.running
    )


@shows("preempted with output in flight", "preemption", possible=_is_async)
def _preempted_in_flight(walk: Walk, record: Scheduled) -> bool:
    return any("preempted in flight" in walk.live[name].facts for name in record.preempted)


@shows("output of a preempted request delivered", "update", possible=_is_async)
def _delivered(walk: Walk, record: Updated) -> bool:
    return any(walk.live[name].state == "waiting" for name in record.new_tokens)


@shows("output of a preempted request dropped", "update", possible=_is_async)
def _output_dropped(walk: Walk, record: Updated) -> bool:
    flight = walk.landed
    return flight is not None and any(
        life.num_preemptions and life.id not in record.new_tokens and life.state != "ended" for life in flight.samples
    )


@shows("ends while preempted", "update", possible=_is_async)
def _ends_preempted(walk: Walk, record: Updated) -> bool:
    return any("ended while waiting" in walk.live[name].facts for name in record.finished)


# ------------------------------------------------------------------------------------------------------------- connector

_section = "connector"


@shows("external tokens", "admission", possible=_has_connector)
def _external(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.external > 0


@shows("external tokens after a local hit", "admission", possible=_has_connector)
def _external_after_hit(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.external > 0 and life.local > 0


@shows("a connector with nothing to give", "admission", possible=_has_connector)
def _nothing_external(walk: Walk, life: Life, record: Scheduled) -> bool:
    return any(name == life.id and answer == 0 for name, _, answer in record.asked or ())


def _answers(record: Scheduled, life: Life) -> list[tuple[int, int | None]]:
    return [(num_local, answer) for name, num_local, answer in record.asked or () if name == life.id]


@shows(
    "hit inside a block cut back for external tokens",
    "admission",
    possible=lambda s: _has_connector(s) and _may_hit_inside(s),
)
def _cut_back(walk: Walk, life: Life, record: Scheduled) -> bool:
    if not life.external:
        return False
    return any(
        isinstance(group, Mamba)
        and any(_has_key(walk, index, life, n) for n in range(life.local + 1, min(life.local + size, life.num_tokens)))
        for index, (group, _, size, caches) in enumerate(walk.groups)
        if caches
    )


@shows(
    "external tokens given up for a hit inside a block",
    "admission",
    possible=lambda s: _has_connector(s) and _may_hit_inside(s),
)
def _given_up(walk: Walk, life: Life, record: Scheduled) -> bool:
    return not life.external and any(answer and num_local < life.local for num_local, answer in _answers(record, life))


@shows(
    "no external tokens for who does not read the cache",
    "admission",
    possible=_has_connector,
    exists=lambda rules: rules.skipping_the_cache_skips_the_connector,
)
def _skips_connector(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.add.skip_cache and any(answer for _, answer in _answers(record, life))


@shows("load that arrives later", "schedule", possible=_is_scripted)
def _loads_later(walk: Walk, record: Scheduled) -> int:
    return sum(name not in record.scheduled for name in record.external)


@shows("blocks of a late load not zeroed", "schedule", possible=_is_scripted)
def _not_zeroed(walk: Walk, record: Scheduled) -> bool:
    if not any(isinstance(group, Mamba) for group in walk.scenario.groups):
        return False
    return any(
        kind in ("full", "mla", "sliding_window") and any(b and b not in record.zeroed for b in walk.tables[name][index])
        for name in record.external
        if name not in record.scheduled and name in walk.tables
        for index, (_, kind, _, _) in enumerate(walk.groups)
    )


@shows("admitted while another's load is under way", "admission", possible=_is_scripted)
def _beside_load(walk: Walk, life: Life, record: Scheduled) -> bool:
    return any(other.state == "loading" for other in walk.lives)


@shows("admitted once its load arrived", "admission", possible=_is_scripted)
def _load_arrived(walk: Walk, life: Life, record: Scheduled) -> bool:
    return "loaded" in life.facts


@shows("last token of a whole load computed again", "admission", possible=_is_scripted)
def _whole_load(walk: Walk, life: Life, record: Scheduled) -> bool:
    return "loaded" in life.facts and record.hits.get(life.id) == life.num_tokens - 1


@shows("late load refused for blocks that prefills need", "wait", possible=_is_scripted)
def _load_refused(walk: Walk, record: Scheduled) -> bool:
    return any(
        answer
        and walk.live[name].state == "waiting"
        and walk.live[name].add.load == "async"
        and sum(-(-(num_local + answer) // size) for size in walk.sizes) <= len(walk.free)
        for name, num_local, answer in record.asked or ()
    )


def _recomputes(scenario: Scenario) -> bool:
    return scenario.connector is not None and scenario.connector.load_failure == "recompute"


@shows("load fails and is computed again", "update", possible=lambda s: _is_scripted(s) and _recomputes(s))
def _fails_and_recomputes(walk: Walk, record: Updated) -> bool:
    return bool(record.lost)


@shows("load fails and its request ends", "update", possible=lambda s: _is_scripted(s) and not _recomputes(s))
def _fails_and_ends(walk: Walk, record: Updated) -> bool:
    return bool(record.lost) and bool(record.finished)


@shows("late load fails", "update", possible=_is_scripted)
def _late_load_fails(walk: Walk, record: Updated) -> bool:
    return bool(record.lost) and any("loading" in life.facts for life in walk.lives)


@shows("fills judged", "schedule", possible=_has_connector, needs_worker=True)
def _fills(walk: Walk, record: Scheduled) -> int:
    return len(record.written or ())


# ------------------------------------------------------------------------------------------ aborts, resets, ends of runs

_section = "aborts, resets and ends"


def _aborts(record: Acted) -> bool:
    return record.action == "abort"


for _state in ("running", "waiting", "loading", "ended"):

    @shows(f"abort: {_state}", "action", possible=_is_scripted if _state == "loading" else None)
    def _abort(walk: Walk, record: Acted, state: str = _state) -> bool:
        return record.action == "abort" and walk.live[record.request or ""].state == state


@shows("abort: preempted", "action")
def _abort_preempted(walk: Walk, record: Acted) -> bool:
    if record.action != "abort":
        return False
    life = walk.live[record.request or ""]
    return life.state == "waiting" and life.num_preemptions > 0


@shows("abort: with output in flight", "action", possible=_is_async)
def _abort_in_flight(walk: Walk, record: Acted) -> bool:
    if record.action != "abort":
        return False
    life = walk.live[record.request or ""]
    return life.state == "running" and life.num_unseen > 0


@shows("blocks of an aborted load freed when it arrives", "update", possible=_is_scripted)
def _late_free(walk: Walk, record: Updated) -> bool:
    return any(
        walk.live[name].state == "ended" and name not in walk.tables and name not in record.finished
        for name in walk.tables_before
    )


for _result in ("done", "refused"):

    @shows(f"reset: {_result}", "action")
    def _reset(walk: Walk, record: Acted, result: str = _result) -> bool:
        return record.action == "reset_prefix_cache" and record.result == result


@shows("reset with running requests", "preemption")
def _reset_running(walk: Walk, record: Scheduled) -> bool:
    """Preempted and resumed in one call: they had to go before it."""
    return bool(record.resumed) and not set(record.resumed).isdisjoint(record.preempted)


@shows("reset impossible though everybody was preempted", "failure", possible=_defers)
def _reset_impossible(walk: Walk, record: Failure) -> bool:
    return record.phase == "action"


@shows("run that stalled", "action")
def _stalled(walk: Walk, record: Acted) -> bool:
    return record.action == "run" and record.result == "stalled"


@shows("exceptions", "failure", promised=False)
def _exceptions(walk: Walk, record: Failure) -> int:
    return 1


# ---------------------------------------------------------------------------------------------------------- conjunctions

_section = "conjunctions"


@shows("hit inside a block, preemption of that request, and an eviction", "end", possible=_may_hit_inside)
def _inside_preempted_evicted(walk: Walk) -> bool:
    return "evictions" in walk.seen and any("inside" in life.facts and life.num_preemptions for life in walk.lives)


@shows("resumption with a hit inside a block", "admission", possible=_may_hit_inside)
def _resumed_inside(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.num_preemptions > 0 and any(caches and life.local % size for _, _, size, caches in walk.groups)


@shows("eviction in a step that preempts", "preemption")
def _eviction_and_preemption(walk: Walk, record: Scheduled) -> bool:
    return _evictions(walk, record) > 0


@shows("eviction in a step that copies", "copy", possible=_has_states)
def _eviction_and_copy(walk: Walk, record: Scheduled) -> bool:
    return _evictions(walk, record) > 0


@shows("preempted after a checkpoint", "preemption", possible=_has_checkpoints)
def _preempted_after_checkpoint(walk: Walk, record: Scheduled) -> bool:
    return any("checkpoint" in walk.live[name].facts for name in record.preempted)


@shows("preempted after a copy", "preemption", possible=_has_states)
def _preempted_after_copy(walk: Walk, record: Scheduled) -> bool:
    return any("copied" in walk.live[name].facts for name in record.preempted)


@shows("drafts rejected after a hit inside a block", "update", possible=lambda s: _has_drafts(s) and _may_hit_inside(s))
def _rejected_after_inside(walk: Walk, record: Updated) -> bool:
    return any("inside" in life.facts and not accepted for life, _, accepted in _outcomes(walk, record))


@shows("EAGLE's drop beside a window", "admission", possible=lambda s: _has_eagle(s) and _has(SlidingWindow)(s))
def _drop_beside_window(walk: Walk, life: Life, record: Scheduled) -> bool:
    return _dropped(walk, life, record)


@shows("EAGLE's drop beside states", "admission", possible=lambda s: _has_eagle(s) and _has_states(s))
def _drop_beside_states(walk: Walk, life: Life, record: Scheduled) -> bool:
    return _dropped(walk, life, record)


@shows("resumption with external tokens after a local hit", "admission", possible=_has_connector)
def _resumed_external(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.num_preemptions > 0 and life.external > 0 and life.local > 0


@shows("preempted after a late load", "preemption", possible=_is_scripted)
def _preempted_after_load(walk: Walk, record: Scheduled) -> bool:
    return any("loaded" in walk.live[name].facts for name in record.preempted)


@shows("reset while a load is under way", "action", possible=_is_scripted)
def _reset_while_loading(walk: Walk, record: Acted) -> bool:
    return record.action == "reset_prefix_cache" and any(life.state == "loading" for life in walk.lives)


@shows(
    "priorities: preempted with output in flight",
    "preemption",
    possible=lambda s: _has_priorities(s) and _is_async(s),
)
def _priority_in_flight(walk: Walk, record: Scheduled) -> bool:
    return _preempted_in_flight(walk, record)


@shows(
    "late load beside bounded replay",
    "schedule",
    possible=lambda s: _is_scripted(s) and _has_replay(s),
    exists=kind_exists("sliding_window_mla replayed"),
)
def _load_and_replay(walk: Walk, record: Scheduled) -> bool:
    return _loads_later(walk, record) > 0


@shows("retention interval: resumption with a local hit", "admission", possible=lambda s: bool(s.engine.retention_interval))
def _interval_resumed(walk: Walk, life: Life, record: Scheduled) -> bool:
    return life.local > 0 and life.num_preemptions > 0


@shows(
    "copies under context parallelism",
    "copy",
    possible=lambda s: _has_dcp(s) and _has_states(s),
    exists=lambda rules: rules.dcp_sharded_flag,
)
def _copies_under_dcp(walk: Walk, record: Scheduled) -> int:
    return len(record.copies)


BEHAVIOURS: tuple[str, ...] = tuple(TABLE)

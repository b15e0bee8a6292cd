"""The rules that decide block IDs, in words: a short specification, numbered as the rest of the project numbers it.

Each names the function that carries it out, so that a reader can look at the very line. `deciding` picks those that
settle a finding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from oracle.compare import compare
from oracle.content import Replay
from oracle.contracts.decode_bench import DecodeBench
from oracle.findings import Finding
from oracle.laws.connector import check_fill, check_routing
from sim.coordinator import Coordinator
from sim.groups.base import GroupManager
from sim.groups.chunked_local import ChunkedLocalManager
from sim.groups.circular import CircularManager
from sim.groups.full import FullManager, RSWAManager
from sim.groups.mamba import MambaAlignManager, MambaManager
from sim.groups.sliding_window import SlidingWindowManager
from sim.manager import KVCacheManager
from sim.pool import BlockPool
from sim.prefix import PrefixIndex
from sim.refusals import refusal
from sim.scheduler import Scheduler

_ROOT = Path(__file__).parents[2]


class Rule(NamedTuple):
    """A rule: its section, what it says, and who carries it out."""

    section: str
    sentence: str
    function: Callable[..., Any]

    @property
    def place(self) -> str:
        """`sim/pool.py:57`, the line where its function begins."""
        function = inspect.unwrap(self.function)
        path = Path(inspect.getsourcefile(function) or "").resolve()
        name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
        return f"{name}:{inspect.getsourcelines(function)[1]}"


_ALL = (
    Rule(
        "1.3",
        "New blocks come from the head of the free queue, in its order; a block that is taken loses its keys.",
        BlockPool.take,
    ),
    Rule(
        "1.4",
        "Released blocks without a key go to the head of the free queue, those with a key to its tail, each run in "
        "the order of the release; a request's table is released from its last block back.",
        BlockPool.release,
    ),
    Rule(
        "1.5",
        "A hit takes one more reference; a free block that is hit leaves the queue from wherever it is.",
        BlockPool.touch,
    ),
    Rule("1.6", "A lookup finds the block that was linked to the key first and still is.", BlockPool.lookup_all),
    Rule("1.10", "A reset forgets all keys, if nobody holds a block, and leaves the queue's order alone.", BlockPool.reset),
    Rule("1.13", "Each link of a key to a block that comes or goes is one KV event.", BlockPool.link),
    Rule(
        "2",
        "A key stands for a whole prefix: the tokens of the block and all before it, the cache salt and the adapter.",
        PrefixIndex.extend,
    ),
    Rule(
        "3.1",
        "Full blocks are registered when their tokens are scheduled; a request's blocks are counted before any is taken.",
        GroupManager.cache,
    ),
    Rule("3.2", "Full attention hits the longest run of cached blocks from the first one on.", FullManager.lookup),
    Rule(
        "3.3",
        "A reference sliding window keeps the prompt; output that the window has left is given back.",
        RSWAManager.release_skipped,
    ),
    Rule(
        "3.4",
        "A sliding window hits where all blocks of the window before the next token are cached; blocks that it has "
        "left become null, and only blocks where a prompt may be resumed are registered.",
        SlidingWindowManager.lookup,
    ),
    Rule(
        "3.5",
        "Chunked local attention needs the blocks of its own chunk; those of earlier chunks become null.",
        ChunkedLocalManager.lookup,
    ),
    Rule(
        "3.6",
        "A state-space group needs the last state only; blocks of earlier states become null.",
        MambaManager.lookup,
    ),
    Rule(
        "3.7",
        "In mode align a state is cached at the end of a block, and at the prompt's end inside one; who goes on from "
        "there works on a copy.",
        MambaAlignManager.allocate,
    ),
    Rule(
        "3.8",
        "A circular buffer is one block for the whole life of a request; it is never cached, shared or null.",
        CircularManager.allocate,
    ),
    Rule(
        "4.5",
        "Groups act in the order of the KV cache config: first come the hits of all groups, then external tokens, "
        "then new ones.",
        KVCacheManager.allocate_slots,
    ),
    Rule(
        "4.7",
        "The joint hit is the longest prefix that every group has: each looks under the length that the one before "
        "left, until nobody shortens it.",
        Coordinator.find_hits,
    ),
    Rule(
        "5.1",
        "The last token is always computed anew, so a hit covers at most all tokens but one.",
        KVCacheManager.computed_blocks,
    ),
    Rule(
        "5.2",
        "A request is given slots only if all groups together find enough free blocks; else it waits, or somebody is "
        "preempted.",
        KVCacheManager.allocate_slots,
    ),
    Rule(
        "6.2",
        "Running requests are scheduled first, in order, each as many tokens as budget and limits leave.",
        Scheduler._schedule_running,
    ),
    Rule(
        "6.3",
        "Then waiting requests are admitted from the head of the queue, until one does not fit; not in a step that "
        "preempted.",
        Scheduler._schedule_waiting,
    ),
    Rule("6.7", "Who is preempted gives back all blocks and goes to the front of the waiting queue.", Scheduler._preempt),
    Rule(
        "6.8",
        "A load that has arrived is registered, all but the last token if it brought every one, and the request goes on.",
        Scheduler._finish_load,
    ),
    Rule(
        "6.10",
        "Blocks that a step in flight may still write to are freed only once its output is processed.",
        Scheduler._drain_deferred,
    ),
    Rule("6.12", "Outputs are appended in the order of the schedule; who has finished is freed at once.", Scheduler.update),
    Rule(
        "6.13",
        "Where a load failed, a request keeps the tokens before the first block without content and computes the rest.",
        Scheduler._fail_blocks,
    ),
    Rule(
        "7.2",
        "Of each group the blocks that hold external tokens, and no others: local hits stay as they are, a ring counts "
        "whole, and of a state-space group only the last state.",
        DecodeBench.loads,
    ),
    Rule(
        "7.3",
        "The worker writes, in the layers of each group, that group's blocks, and no other byte of KV memory.",
        check_fill,
    ),
    Rule("7.4", "What the scheduler side has selected reaches the worker in the same step, unchanged.", check_routing),
    Rule("7.5", "The worker zeroes new blocks, copies, fills and computes, in this order.", Replay.advance),
    Rule("8", "What a release refuses, it refuses before anything runs.", refusal),
    Rule("9", "The model foresees every block ID; where vLLM differs, one of them is wrong.", compare),
)

RULES = {rule.section: rule for rule in _ALL}

_BY_LAW = {
    1: ("1.4",),
    2: ("1.3", "2"),
    3: ("2", "1.6"),
    4: ("7.2",),
    5: ("7.4",),
    6: ("7.3",),
    7: ("5.2",),
    8: ("5.2", "6.3"),
    9: ("1.13",),
}

_BY_CAUSE = {
    "step": ("6.3",),
    "preempted": ("6.7",),
    "local_hit": ("4.7", "5.1"),
    "connector_answers": ("6.3",),
    "external_tokens": ("6.3",),
    "admitted": ("6.3", "5.2"),
    "arrived": ("6.8",),
    "lost_blocks": ("6.13",),
    "resumed": ("6.3", "5.2"),
    "scheduled_tokens": ("6.2",),
    "schedule_order": ("6.2", "6.3"),
    "zeroed_blocks": ("7.5",),
    "copies": ("3.7",),
    "new_tokens": ("6.12",),
    "finished": ("6.12",),
    "kv_events": ("1.13",),
    "block_table": ("1.3", "4.5"),
    "reference_counts": ("1.5", "1.4"),
    "free_queue": ("1.4",),
    "cached_keys": ("3.1",),
    "deferred_frees": ("6.10",),
    "refusal": ("8",),
}

_BY_KIND = {
    "full": "3.2",
    "mla": "3.2",
    "rswa": "3.3",
    "sliding_window": "3.4",
    "sliding_window_mla": "3.4",
    "chunked_local": "3.5",
    "mamba": "3.6",
    "circular": "3.8",
}


def rule_of_kind(kind: str) -> Rule | None:
    """What is special about a kind of group."""
    section = _BY_KIND.get(kind)
    return RULES[section] if section else None


def deciding(finding: Finding) -> list[Rule]:
    """The rules that settle a finding, the most important one first."""
    sections = _BY_CAUSE.get(finding.cause, ("9",)) if finding.law is None else _BY_LAW.get(finding.law, ())
    rules = [RULES[section] for section in sections]
    own = rule_of_kind(finding.group_kind or "")
    if own is not None and finding.group_kind not in ("full", "mla") and own not in rules:
        rules.append(own)
    return rules

"""A request as the scheduler and the groups see it."""

from __future__ import annotations

from enum import IntEnum

from sim.scenario import Add


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Request:
    """One life of a request.

    num_computed counts the tokens that are computed once the steps scheduled so far have run. `tables[g]` is the block
    table of group g; `tracked[g]` the number of its leading entries that need no more hashing, or None before the first.
    Up to `quiet_until` tokens, allocating slots changes nothing in any group.
    """

    __slots__ = (
        "arrival",
        "id",
        "index",
        "lora",
        "max_tokens",
        "num_computed",
        "num_preemptions",
        "num_prompt",
        "prefixes",
        "priority",
        "quiet_until",
        "salt",
        "shared_prefix_boundary",
        "status",
        "tables",
        "tokens",
        "tracked",
    )

    def __init__(self, add: Add, index: int, prompt: list[int], num_groups: int) -> None:
        self.id = add.id
        self.index = index
        self.arrival = index
        self.priority = add.priority
        self.salt = add.salt
        self.lora = add.lora
        self.max_tokens = add.max_tokens
        self.tokens = prompt
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.num_preemptions = 0
        self.status = Status.WAITING
        self.prefixes: list[int] = []
        self.shared_prefix_boundary = 0
        self.quiet_until = 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.tracked: list[int | None] = [None] * num_groups

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

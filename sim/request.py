"""A request as the scheduler and the groups see it."""

from __future__ import annotations

from enum import IntEnum

from sim.scenario import Add


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED = 4


class MambaState:
    """What a Mamba group of mode `align` keeps of a request.

    allocated: it has been through an allocation. last: table index of the last state before the current step's.
    num_retired: leading entries that are done with. checkpoint: (token position, table index) within the current step.
    """

    __slots__ = ("allocated", "checkpoint", "last", "num_retired")

    def __init__(self) -> None:
        self.allocated = False
        self.checkpoint: tuple[int, int] | None = None
        self.last: int | None = None
        self.num_retired = 0


class Request:
    """One life of a request. Counts are in tokens.

    num_computed: computed once the steps scheduled so far have run, drafts taken as accepted. num_in_flight: scheduled in
    steps whose output is not processed yet; num_stale of them were scheduled before a preemption, and their output is
    dropped if drops_stale. num_placeholders: sampled in such steps, with an asynchronous scheduler. num_drafts: drafted
    for the next step. num_encoder: tokens of the encoder's input; num_encoder_now: those scheduled with the admission under
    way. num_replayed: of a load that has arrived, tokens to be computed again. tables[g]: the block table of
    group g; tracked[g]: the number of its leading entries that need no more hashing, or None before the first;
    shared_tail[g]: (index, block) of a shared block to be copied before it is written. external: (table index, block) of
    the blocks that its load writes, all groups. Up to quiet_until tokens, allocating slots changes nothing in any group.
    """

    __slots__ = (
        "arrival",
        "drops_stale",
        "external",
        "id",
        "index",
        "is_prefill_chunk",
        "last_sequence",
        "lora",
        "mamba",
        "max_tokens",
        "num_computed",
        "num_drafts",
        "num_encoder",
        "num_encoder_now",
        "num_in_flight",
        "num_placeholders",
        "num_preemptions",
        "num_prompt",
        "num_replayed",
        "num_stale",
        "num_verified",
        "prefixes",
        "priority",
        "quiet_until",
        "salt",
        "shared_prefix_boundary",
        "shared_tail",
        "skips_cache",
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
        self.skips_cache = add.skip_cache
        self.max_tokens = add.max_tokens
        self.tokens = prompt
        self.num_prompt = len(prompt)
        self.num_computed = 0
        self.num_in_flight = 0
        self.num_stale = 0
        self.drops_stale = False
        self.num_placeholders = 0
        self.num_drafts = 0
        self.num_encoder = add.encoder
        self.num_encoder_now = 0
        self.num_verified = 0
        self.num_replayed = 0
        self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.last_sequence = 0
        self.status = Status.WAITING
        self.prefixes: list[int] = []
        self.shared_prefix_boundary = 0
        self.quiet_until = 0
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.tracked: list[int | None] = [None] * num_groups
        self.shared_tail: dict[int, tuple[int, int]] = {}
        self.external: list[tuple[int, int]] = []
        self.mamba: dict[int, MambaState] = {}

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefill_end(self) -> int:
        """Tokens at which the prefill ends; a resumed request computes its outputs again."""
        return max(self.num_prompt, len(self.tokens) - 1)

    @property
    def holds_blocks(self) -> bool:
        """Whether the request has blocks though it waits: those of its load."""
        return self.num_computed > 0 or self.status == Status.LOADING

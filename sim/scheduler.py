"""The scheduler: who gets how many tokens in a step, who is admitted, who has to go."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple

from sim.connector import ConnectorRule
from sim.coordinator import Hits
from sim.geometry import replay_window
from sim.groups.base import ceil_div, floor_to
from sim.load_failures import FailedGroupsError, fall_back
from sim.mamba_split import MambaSplit
from sim.manager import KVCacheManager
from sim.pool import PredictedError
from sim.queues import FifoQueue, PriorityQueue, WaitingQueue, rank
from sim.releases import Rules
from sim.request import Request, Status
from sim.scenario import Add, Cross, Scenario, Tokens
from sim.speculation import num_draft_slots, num_lookahead


class Plan:
    """What one call of `schedule` decided. Token counts by request, in vLLM's order.

    drafts: drafted tokens among the scheduled ones; accepted: how many of them the model accepts. samples: requests that
    get a token from this step. lost: blocks whose synchronous load failed in this step.
    """

    __slots__ = (
        "accepted",
        "admits_prefill",
        "admitted",
        "asked",
        "copies",
        "drafts",
        "external",
        "hits",
        "lost",
        "preempted",
        "resumed",
        "samples",
        "scheduled",
        "zeroed",
    )

    def __init__(self) -> None:
        self.scheduled: dict[Request, int] = {}
        self.drafts: dict[Request, int] = {}
        self.accepted: dict[Request, int] = {}
        self.samples: list[Request] = []
        self.admits_prefill = False
        self.admitted: list[str] = []
        self.resumed: list[str] = []
        self.preempted: list[str] = []
        self.hits: dict[str, int] = {}
        self.external: dict[str, int] = {}
        self.lost: set[int] = set()
        self.asked: list[tuple[str, int, int | None]] = []
        self.zeroed: list[int] = []
        self.copies: list[tuple[int, int]] = []


_NOBODY: tuple[Request, ...] = ()


class PaddingError(PredictedError):
    """An admission padded to the shape of a decode step did not keep that shape."""


class ResetError(PredictedError):
    """The cache could not be reset although everybody was preempted."""

    vllm_type = "RuntimeError"


class Scheduler:
    """The queues and the steps of one engine.

    sequence counts steps that scheduled tokens, num_processed those whose output was processed. Where a connector may
    still write to blocks of a step in flight, they are released only once that step is processed (`deferred`).
    """

    def __init__(self, scenario: Scenario, rules: Rules, connector: ConnectorRule | None = None) -> None:
        self.engine = engine = scenario.engine
        self.rules = rules
        self.connector = connector
        self.kv = KVCacheManager(scenario, rules)
        self.tokens = Tokens(scenario)
        self.by_priority = engine.policy == "priority"
        self.running: list[Request] = []
        self.waiting: WaitingQueue = self._new_queue()
        # Requests that hold blocks while they load; up to 0.30, all that were passed over.
        self.aside: WaitingQueue = self._new_queue()
        self.arrived_loads: set[str] = set()
        self.ended_loads: dict[str, Request] = {}
        self.reported_loads: dict[str, None] = {}  # in order: the next output brings the news
        self._lost: dict[Request, list[int]] = {}  # with it: loads that failed, and their blocks without content
        self.failed_loads: set[str] = set()
        self.recomputes_failed_loads = scenario.connector is not None and scenario.connector.load_failure == "recompute"
        self.paused: Literal["none", "new", "all"] = "none"
        self._prefilling: dict[Request, None] = {}  # in order of admission: their prefill goes on after this step
        self._passed_over: set[Request] = set()
        self._drained_version = 0  # of the pool, when copies and blocks to zero were last handed out
        self._cadence = Cadence(engine.prefill_schedule_interval if rules.prefill_cadence_is_local else 1)
        self._has_encoder = any(isinstance(group, Cross) for group in scenario.groups)
        self._encoder_slots = engine.max_num_batched_tokens  # vLLM gives some back more often than it takes them
        self._replay_window = replay_window(scenario.groups)
        self.num_added = 0
        self.is_async = engine.async_scheduling
        self.defers_frees = self.is_async and scenario.connector is not None
        self.sequence = 0
        self.num_processed = 0
        self.deferred: deque[tuple[int, list[int]]] = deque()
        speculative = engine.speculative
        self.num_spec = speculative.tokens if speculative else 0
        self.accepts = speculative.accept if speculative else ()
        self.num_lookahead = num_lookahead(engine)
        self.draft_slots = num_draft_slots(engine)
        split = MambaSplit(self.kv, engine)
        self.mamba_split = split if split.groups else None
        self._preempted_since_last_step: list[str] = []
        # One new token a step, its output known before the next: most steps of most requests.
        self._plain = not self.is_async and not self.num_spec

    def _new_queue(self) -> WaitingQueue:
        return PriorityQueue() if self.by_priority else FifoQueue()

    # -- from outside --------------------------------------------------------------------------------------------------

    def add(self, add: Add) -> Request:
        """A request arrives and waits."""
        request = Request(add, self.num_added, self.tokens.prompt(add), len(self.kv.groups))
        self.num_added += 1
        self.kv.extend_prefixes(request)
        self.waiting.push(request)
        return request

    def abort(self, request_id: str) -> bool:
        """The client goes away. Returns False if the request has ended already."""
        queues: tuple[list[Request] | WaitingQueue, ...] = (self.running, self.waiting, self.aside)
        for queue in queues:
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self._finish(request)
                    return True
        return False

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forgets all keys, if need be after preempting everybody. Returns whether it did. Raises ResetError."""
        if preempt_running:
            while self.running:
                request = self.running.pop()
                self._preempted_since_last_step.append(request.id)
                self._preempt(request, drops_output=True)
        done = self.kv.pool.reset()
        if preempt_running and not done:
            raise ResetError("blocks are still held after everybody was preempted")
        return done

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs, of those that a pause lets go on."""
        if self.paused == "all":
            return False
        if self.paused == "new":
            return bool(self.running) or (self.rules.holders_run_while_new_are_paused and len(self.aside) > 0)
        return bool(self.running) or len(self.waiting) + len(self.aside) > 0

    def holders(self) -> list[Request]:
        """Requests that hold blocks: running, loading, or ended while their load still writes."""
        waiting = [request for request in self.aside if any(request.tables)] if len(self.aside) else []
        return [*self.running, *waiting, *self.ended_loads.values()]

    def load_arrived(self, request_id: str) -> None:
        """The worker reports, with the next output, that an asynchronous load is complete. Nothing happens if there is
        none under way."""
        loading = any(r.id == request_id and r.status == Status.LOADING for r in self.aside)
        if (loading and request_id not in self.arrived_loads) or request_id in self.ended_loads:
            self.reported_loads[request_id] = None

    def load_failed(self, request_id: str, from_block: int, in_flight: Iterable[Plan]) -> None:
        """The worker reports that a load failed: an asynchronous one with the next output, which is also its end; a
        synchronous one with the output of its step, one of those `in_flight`. Nothing happens if there is none."""
        for request in self.aside:
            if request.id == request_id and request.status == Status.LOADING:
                if request_id not in self.arrived_loads and request_id not in self.reported_loads:
                    self.reported_loads[request_id] = None
                    self._lost[request] = self._external_blocks(request, from_block)
                return
        for plan in in_flight:
            for request in plan.scheduled:
                if request.id == request_id and plan.external.get(request_id):
                    plan.lost.update(self._external_blocks(request, from_block))

    def _external_blocks(self, request: Request, from_block: int) -> list[int]:
        first = from_block if len(self.kv.groups) == 1 else 0
        return [block_id for block_index, block_id in request.external if block_index >= first]

    def blocks_lost_with(self, plan: Plan) -> set[int]:
        """Blocks that the output of this step reports as loaded in vain."""
        return plan.lost.union(*self._lost.values())

    # -- first half of a step ------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Running requests first, then waiting ones if nobody had to go. Raises PredictedError where vLLM raises."""
        plan = Plan()
        self.kv.new_step()
        threshold = self._long_prefill_threshold()
        num_tokens = 0 if self.paused == "all" else self.engine.max_num_batched_tokens
        budget = Budget(num_tokens, self.draft_slots, self.engine.max_num_batched_tokens)
        defers_prefills = self._cadence.defers(self.running)
        self._schedule_running(plan, budget, threshold, defers_prefills)
        if not plan.preempted and (len(self.waiting) or len(self.aside)) and self._admits():
            self._schedule_waiting(plan, budget, threshold, defers_prefills)
        if self._cadence.interval > 1:
            self._cadence.count(plan, defers_prefills, len(self.waiting) + len(self.aside) > len(self._passed_over))
        if self._preempted_since_last_step:
            plan.preempted += self._preempted_since_last_step
            self._preempted_since_last_step = []
        self._finish_plan(plan)
        return plan

    def _admits(self) -> bool:
        return self.paused == "none" or (self.paused == "new" and self.rules.holders_run_while_new_are_paused)

    def _long_prefill_threshold(self) -> int:
        threshold = self.engine.long_prefill_token_threshold
        if threshold == 0:
            return 0
        num_requests = len(self.running) + len(self.waiting) + len(self.aside)
        if num_requests <= 1 and self.rules.lone_request_ignores_long_prefill_threshold:
            return 0
        if self.engine.long_prefill_adaptive and num_requests:
            return max(threshold, self.engine.max_num_batched_tokens // num_requests)  # rounded down
        return threshold

    def _schedule_running(self, plan: Plan, budget: Budget, threshold: int, defers_prefills: bool) -> None:
        plain, running, scheduled = self._plain, self.running, plan.scheduled
        index = 0
        while index < len(running) and budget.tokens > 0 and budget.inputs > budget.draft_slots:
            request = running[index]
            index += 1
            if defers_prefills and request.is_prefill_chunk:
                continue
            num_total = len(request.tokens)
            if plain and num_total - request.num_computed == 1 and num_total <= request.quiet_until:
                scheduled[request] = 1
                budget.tokens -= 1
                budget.inputs -= 1
                continue
            num_new = self._num_new_tokens(request, budget, threshold)
            if num_new == 0:
                continue
            room, num_gone_before = self._make_room(request, num_new, plan, budget, index)
            index -= num_gone_before
            if not room:
                if self.rules.priority_goes_on_after_self_preemption and self.by_priority and room is None:
                    index -= 1
                    continue
                break
            plan.scheduled[request] = num_new
            budget.spend(num_new)
            num_drafts = num_new + request.num_computed - num_total - request.num_placeholders
            if request.num_drafts:
                if num_drafts > 0:
                    plan.drafts[request] = min(num_drafts, request.num_drafts)
                request.num_drafts = 0

    def _num_new_tokens(self, request: Request, budget: Budget, threshold: int) -> int:
        computed = request.num_computed
        if self.is_async and request.num_placeholders > 0:
            most = request.num_prompt + request.max_tokens
            if computed + 2 - request.num_placeholders >= most:
                return 0  # the steps in flight bring its last token
        num_new = len(request.tokens) + request.num_drafts + request.num_placeholders - computed
        if 0 < threshold < num_new:
            num_new = threshold
        num_new = min(num_new, budget.per_request, self.engine.max_model_len - computed - 1)
        if self.mamba_split is not None:
            num_new = self.mamba_split.cut(request, computed, num_new)
        return num_new

    def _make_room(self, request: Request, num_new: int, plan: Plan, budget: Budget, index: int) -> tuple[bool | None, int]:
        """Preempts until the tokens fit. (True, or None if the request itself had to go, or False if nobody may go;
        how many requests before `index` have gone)."""
        num_gone_before = 0
        while not self.kv.allocate_slots(request, num_new, num_lookahead=self.num_lookahead):
            victim_index = self._victim_index()
            victim = self.running[victim_index]
            if self.rules.victim_must_be_free_at_once and self._is_deferred(victim):
                return False, num_gone_before
            del self.running[victim_index]
            if victim_index < index - 1 - num_gone_before:
                num_gone_before += 1
            num_scheduled = plan.scheduled.pop(victim, 0)
            if num_scheduled:
                budget.give_back(num_scheduled)
                plan.drafts.pop(victim, None)
            plan.preempted.append(victim.id)
            self._preempt(victim, drops_output=self._needs_delivery)
            if victim is request:
                return None, num_gone_before
        return True, num_gone_before

    def _victim_index(self) -> int:
        if not self.by_priority:
            return len(self.running) - 1
        return max(range(len(self.running)), key=lambda i: rank(self.running[i])[:2])

    @property
    def _needs_delivery(self) -> bool:
        return self.connector is not None and self.connector.requires_kv_delivery

    def _schedule_waiting(self, plan: Plan, budget: Budget, threshold: int, defers_prefills: bool) -> None:
        """Admits from the head of the queues until somebody does not fit."""
        running_prefill = any(request.is_prefill_chunk for request in plan.scheduled)
        beside = None if running_prefill else bool(plan.scheduled)
        passed_over: list[Request] = []
        while budget.is_open and len(self.running) < self.engine.max_num_seqs:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.head()
            found = None if self._is_blocked(request) else self._find_computed(request, plan)
            if found is None:
                passed_over.append(queue.pop())
                continue
            if defers_prefills and not found.loads_later and found.num_computed < len(request.tokens) - 1:
                break
            size = NOTHING_NEW if found.loads_later else self._size_admission(request, found, budget, threshold, beside)
            if size is None:
                break
            if request.num_encoder and not self._schedule_encoder(request, found, budget):
                if not self.rules.head_without_encoder_room_is_passed_over:
                    break
                passed_over.append(queue.pop())
                continue
            if not self._fits(request, found, size):
                self._encoder_slots += request.num_encoder
                break
            queue.pop()
            budget.encoder -= request.num_encoder_now
            self._encoder_slots -= request.num_encoder_now
            self._grant(request, found, size, plan)
            if found.loads_later:
                request.status = Status.LOADING
                self._prefilling[request] = None
                passed_over.append(request)
            else:
                self._admit(request, size, plan)
                budget.spend(size.num_new)
        self._put_back(passed_over)

    def _schedule_encoder(self, request: Request, found: Found, budget: Budget) -> bool:
        """The encoder's input is scheduled whole with a request's first tokens. Returns whether it fits the step."""
        request.num_encoder_now = request.num_encoder if found.num_computed == 0 else 0
        return request.num_encoder_now <= min(budget.encoder, self._encoder_slots)

    def _fits(self, request: Request, found: Found, size: Size) -> bool:
        return self.kv.allocate_slots(
            request,
            max(size.num_new - size.num_replayed, 0),
            found.hits,
            found.num_external,
            num_lookahead=0 if found.loads_later else self.num_lookahead,
            num_reserved=self._num_reserved_blocks() if found.loads_later else 0,
            gate=self.engine.reserve_full_isl,
            others_running=bool(self.running),
            loads_later=found.loads_later,
        )

    def _grant(self, request: Request, found: Found, size: Size, plan: Plan) -> None:
        """What was found counts as computed, less what is computed again. Of a load that failed within the last window,
        which would be computed again whole, nothing counts."""
        if self.connector is not None:
            self.connector.allocated(request.id, found.num_external)
        num_replayed = request.num_replayed if request.num_computed > 0 else 0
        request.num_computed = found.num_computed - size.num_replayed
        if found.num_external > 0:
            request.external = self.kv.blocks_of(request, found.num_computed - found.num_external, found.num_computed)
        if found.loads_later and self.rules.loads_skip_zeroing_by_range:
            self.kv.skip_zeroing(request, request.num_computed - found.num_external, request.num_computed)
        plan.external[request.id] = found.num_external
        plan.hits[request.id] = found.num_computed + num_replayed - found.num_external
        request.num_replayed = 0

    def _admit(self, request: Request, size: Size, plan: Plan) -> None:
        (plan.resumed if request.status == Status.PREEMPTED else plan.admitted).append(request.id)
        request.status = Status.RUNNING
        self._passed_over.discard(request)
        self.running.append(request)
        plan.scheduled[request] = size.num_new
        plan.admits_prefill |= request.num_computed < len(request.tokens) - 1
        if request.num_computed + size.num_new < len(request.tokens):
            self._prefilling[request] = None
        if size.padded:
            if size.num_new != 1 + self.num_spec:
                raise PaddingError("a padded admission was cut by the long-prefill threshold")
            plan.drafts[request] = self.num_spec

    def _next_queue(self) -> WaitingQueue | None:
        """The queue whose head is looked at next; None if nobody may be admitted."""
        aside, waiting = self.aside, self.waiting
        if self.rules.holders_have_own_queue:
            if len(aside):
                return aside
            return waiting if len(waiting) and self.paused == "none" else None
        if len(aside) and len(waiting) and self.by_priority:
            return aside if rank(aside.head()) < rank(waiting.head()) else waiting
        if len(aside):
            return aside
        return waiting if len(waiting) else None

    def _put_back(self, passed_over: list[Request]) -> None:
        self._passed_over.update(passed_over)
        if not self.rules.holders_have_own_queue:
            self.aside.put_back(passed_over)
            return
        self.aside.put_back([request for request in passed_over if request.holds_blocks])
        self.waiting.put_back([request for request in passed_over if not request.holds_blocks])

    def _is_blocked(self, request: Request) -> bool:
        """Whether the request has to be passed over: its load has not arrived, or output in flight must come first."""
        if request.status == Status.LOADING:
            if request.id not in self.arrived_loads:
                return True
            self._finish_load(request)
        return request.num_stale > 0 and not request.drops_stale

    def _finish_load(self, request: Request) -> None:
        """What was loaded may be cached now; the last token of a prompt that came whole is computed again. A load of which
        nothing came leaves nothing behind."""
        self.arrived_loads.remove(request.id)
        if request.id in self.failed_loads and request.num_computed == 0:
            self.kv.free(request)
        else:
            self.kv.cache(request, request.num_computed)
        self.failed_loads.discard(request.id)
        if self._replay_window:
            request.num_replayed = min(self._replay_window, request.num_computed)
            request.num_computed -= request.num_replayed
        elif request.num_computed == len(request.tokens):
            request.num_computed -= 1
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING

    def _size_admission(
        self, request: Request, found: Found, budget: Budget, threshold: int, beside: bool | None
    ) -> Size | None:
        """How much of the request this step computes; None: it cannot be admitted, nor can those behind it.

        beside: whether running requests were scheduled before; None: prefills among them.
        """
        num_replayed = self._num_replayed(request, found)
        num_computed = found.num_computed - num_replayed
        num_new = len(request.tokens) - num_computed
        padded = num_new == 1 and self._pads_to_drafts(num_computed, beside)
        if padded:
            num_new = 1 + self.num_spec
            if num_new > budget.per_request:
                return None
        if 0 < threshold < num_new:
            num_new = threshold
        if not self.engine.chunked_prefill and num_new > budget.per_request:
            return None
        num_new = min(num_new, budget.per_request)
        if self.mamba_split is not None:
            num_new = self.mamba_split.cut(request, found.num_computed, num_new)
            if num_new == 0:
                return None
            if padded and num_new != 1 + self.num_spec:
                num_new, padded = 1, False
        return Size(num_new, num_replayed, padded)

    def _num_replayed(self, request: Request, found: Found) -> int:
        """Tokens of a hit to be computed again because a sliding window's cache does not keep them. A load that arrived
        has seen to it already."""
        if not self._replay_window or found.restores_window or request.num_computed > 0:
            return 0
        return min(self._replay_window, found.num_computed)

    def _pads_to_drafts(self, num_computed: int, beside: bool | None) -> bool:
        """Whether an admission with one token to compute gets the shape of a decode step with drafts."""
        if not self.num_spec or beside is None:
            return False
        if not beside and not (num_computed > 0 and self.rules.lone_admission_is_padded):
            return False
        return num_computed + 1 + self.num_spec + 1 <= self.engine.max_model_len

    def _num_reserved_blocks(self) -> int:
        """Blocks that requests in their prefill still need, and a load's own next step with drafts: a load that holds
        its blocks for long must not starve them."""
        spec_tokens = 1 + self.num_spec + self.num_lookahead if self.num_spec else 0
        counts_drafts = self.rules.blocks_reserved_for_drafts
        in_each = spec_tokens if counts_drafts and self.rules.reservation_is_per_group else 0
        num_blocks = sum(self.kv.blocks_to_finish_prefill(request, in_each) for request in self._prefilling)
        if not counts_drafts or not spec_tokens:
            return num_blocks
        if self.rules.reservation_is_per_group:
            return num_blocks + self.kv.blocks_for_tokens(spec_tokens)
        return num_blocks + (len(self._prefilling) + 1) * ceil_div(spec_tokens, self.kv.scheduler_block_size)

    def _find_computed(self, request: Request, plan: Plan) -> Found | None:
        """Local hits and external tokens; None if the connector does not know yet. A hit that ends inside a block is cut
        back to whole blocks if the connector has more, and else taken without it."""
        if request.num_computed > 0:
            return Found(self.kv.no_hits, num_before=request.num_computed)
        hits = self.kv.computed_blocks(request)
        if self.connector is None:
            return self._without_short_hit(Found(hits))
        inside = hits.num_tokens % self.kv.scheduler_block_size
        aligned = hits.num_tokens - inside
        num_external, loads_later = self.connector.matched(request.id, len(request.tokens), aligned)
        plan.asked.append((request.id, aligned, num_external))
        if request.skips_cache and self.rules.skipping_the_cache_skips_the_connector:
            num_external, loads_later = 0, False
        if num_external is None:
            return None
        restores = self.rules.loads_may_restore_windows and self.connector.restores_windows and num_external > 0
        if self._replay_window and not restores:
            num_external = floor_to(num_external, self.kv.scheduler_block_size)
            loads_later = loads_later and num_external > 0
        if inside and num_external > inside:
            cut = [blocks[: aligned // group.block_size] for blocks, group in zip(hits.blocks, self.kv.groups, strict=True)]
            return self._without_short_hit(Found(Hits(cut, aligned), num_external, loads_later, restores))
        if inside:
            num_external, loads_later, restores = 0, False, False
        return self._without_short_hit(Found(hits, num_external, loads_later, restores))

    def _without_short_hit(self, found: Found) -> Found:
        """A hit that would be computed again whole is not taken at all."""
        if self._replay_window and not found.restores_window and 0 < found.num_computed <= self._replay_window:
            return Found(self.kv.no_hits)
        return found

    def _finish_plan(self, plan: Plan) -> None:
        """Copies and zeroing are handed to the worker; the tokens count as computed from here on."""
        if self.kv.pool.version != self._drained_version:
            plan.copies = self.kv.drain_copies()
            if plan.copies:
                self._release_copied([block_id for pair in plan.copies for block_id in pair])
            plan.zeroed = self.kv.drain_zeroed()
            self._drained_version = self.kv.pool.version
        if plan.scheduled and self.defers_frees:
            self.sequence += 1
        if self._plain:
            self._advance_plain(plan)
            return
        for request, num_tokens in plan.scheduled.items():
            request.num_computed += num_tokens
            request.num_in_flight += num_tokens
            request.last_sequence = self.sequence
            request.is_prefill_chunk = request.num_computed < len(request.tokens) + request.num_placeholders
            if request.is_prefill_chunk:
                continue
            self._prefilling.pop(request, None)
            plan.samples.append(request)
            is_admission = request.id in plan.hits  # its drafts stand for none, and are never right
            plan.accepted[request] = 0 if is_admission else self._num_accepted(request, plan.drafts.get(request, 0))
            if self.is_async:
                request.num_placeholders += 1 + plan.drafts.get(request, 0)
                request.num_drafts = self.num_spec

    def _advance_plain(self, plan: Plan) -> None:
        prefilling = self._prefilling
        for request, num_tokens in plan.scheduled.items():
            request.num_in_flight = num_tokens
            computed = request.num_computed = request.num_computed + num_tokens
            is_chunk = request.is_prefill_chunk = computed < len(request.tokens)
            if prefilling and not is_chunk:
                prefilling.pop(request, None)

    # -- second half of a step -----------------------------------------------------------------------------------------

    def update(self, plan: Plan) -> tuple[list[str], dict[str, int]]:
        """The output of a step: (finished request IDs in order, new tokens by request ID)."""
        if self.defers_frees and plan.scheduled:
            self.num_processed += 1
            self._drain_deferred()
        finished: list[str] = []
        new_tokens: dict[str, int] = {}
        fallen_back = self._take_failures(plan) if plan.lost or self._lost else _NOBODY
        if self._plain:
            self._update_plain(plan, fallen_back, finished, new_tokens)
        else:
            self._update_with_drafts(plan, fallen_back, finished, new_tokens)
        if fallen_back and not self.recomputes_failed_loads:
            finished = self._end_failed(fallen_back, plan, finished)
        if finished:
            self.running = [request for request in self.running if request.status == Status.RUNNING]
        for request_id in self.reported_loads:
            if request_id in self.ended_loads:
                self._free(self.ended_loads.pop(request_id))
            else:
                self.arrived_loads.add(request_id)
        self.reported_loads.clear()
        return finished, new_tokens

    def _take_failures(self, plan: Plan) -> Collection[Request]:
        """Loads failed, and who needs what they should have brought computes it again, or fails. Returns the requests whose
        output in this step is void, or all that fail. Raises FailedGroupsError."""
        invalid = self.blocks_lost_with(plan)
        lost, self._lost = self._lost, {}
        running: list[Request] = []
        if len(self.kv.groups) > 1:
            loading = self._fail_requests(lost, invalid)
        else:
            loading, running = self._fail_blocks(invalid, plan)
        if not self.recomputes_failed_loads:
            return [*loading, *running]
        self.failed_loads.update(request.id for request in loading)
        return running

    def _fail_requests(self, lost: Iterable[Request], invalid: set[int]) -> list[Request]:
        """Of a load in several groups nothing counts."""
        if not self.rules.loads_fail_by_request:
            if invalid and (self.running or any(request.status == Status.LOADING for request in self.aside)):
                raise FailedGroupsError("blocks of several groups were reported as invalid")
            return []  # it had no blocks, or whose load it was is gone, and nobody else may hold the blocks
        loading = [request for request in lost if request.status == Status.LOADING]
        if self.recomputes_failed_loads:
            for request in loading:
                request.num_computed = 0
        return loading

    def _fail_blocks(self, invalid: set[int], plan: Plan) -> tuple[list[Request], list[Request]]:
        """Requests that load, and running ones, that hold these blocks. Keys of blocks to be computed again stay."""
        block_size = self.kv.scheduler_block_size
        waiting = [request for request in self.aside if request.status == Status.LOADING]
        loading, _ = fall_back(waiting, invalid, block_size, plan.scheduled)
        running, downstream = fall_back(self.running, invalid, block_size, plan.scheduled)
        if not self.recomputes_failed_loads:
            for block_id in downstream:
                self.kv.pool.drop_keys(block_id)
        return loading, running

    def _end_failed(self, failed: Collection[Request], plan: Plan, finished: list[str]) -> list[str]:
        """Requests end with an error. Returns all that end in this update, those without output last."""
        for request in sorted(failed, key=lambda request: request.id):
            self.abort(request.id)
        ended = {*finished, *(request.id for request in failed)}
        return [
            *(request.id for request in plan.scheduled if request.id in ended),
            *sorted(request.id for request in failed if request not in plan.scheduled),
        ]

    def _update_plain(self, plan: Plan, void: Collection[Request], finished: list[str], new_tokens: dict[str, int]) -> None:
        hash_block_size = self.kv.prefixes.hash_block_size
        max_model_len = self.engine.max_model_len
        if self._has_encoder:
            self._encoder_slots += sum(r.num_encoder for r in plan.scheduled if r.status == Status.RUNNING)
        for request in plan.scheduled:
            request.num_in_flight = 0
            if request.status != Status.RUNNING or request.is_prefill_chunk or request in void:
                continue  # gone in between, or its prompt is not through yet
            tokens = request.tokens
            num_outputs = len(tokens) - request.num_prompt
            tokens.append(self.tokens.output(request.id, num_outputs))
            new_tokens[request.id] = 1
            if len(tokens) % hash_block_size == 0:
                self.kv.extend_prefixes(request)
            if len(tokens) >= max_model_len or num_outputs + 1 >= request.max_tokens:
                finished.append(request.id)
                self._finish(request)

    def _update_with_drafts(
        self, plan: Plan, void: Collection[Request], finished: list[str], new_tokens: dict[str, int]
    ) -> None:
        samples = set(plan.samples)
        for request, num_tokens in plan.scheduled.items():
            request.num_in_flight -= num_tokens
            is_stale = request.num_stale > 0
            if is_stale:
                request.num_stale -= num_tokens
            if request in void or request.status == Status.FINISHED or (is_stale and request.drops_stale):
                continue
            if request.num_computed > 0:
                self._encoder_slots += request.num_encoder
            if request in samples:
                self._process_output(request, plan, is_stale, finished, new_tokens)
        if not self.is_async and self.num_spec:
            for request in plan.samples:
                if request.status == Status.RUNNING:
                    request.num_drafts = self.num_spec

    def _process_output(
        self, request: Request, plan: Plan, is_stale: bool, finished: list[str], new_tokens: dict[str, int]
    ) -> None:
        num_drafts, num_accepted = plan.drafts.get(request, 0), plan.accepted[request]
        if num_drafts and not is_stale:
            num_rejected = num_drafts - num_accepted
            if request.num_computed > 0:
                request.num_computed -= num_rejected
            if request.num_placeholders > 0:
                request.num_placeholders -= num_rejected
        was_running = request.status == Status.RUNNING
        had_placeholders = request.num_placeholders > 0
        num_kept, stopped = self._append_outputs(request, 1 + num_accepted)
        new_tokens[request.id] = num_kept
        if not is_stale:
            if self.rules.trimmed_outputs_count_as_not_computed:
                request.num_computed -= 1 + num_accepted - num_kept
                if had_placeholders:
                    request.num_placeholders -= 1 + num_accepted
                if was_running and (had_placeholders or self.num_spec):
                    self.kv.cache(request, request.num_computed - request.num_in_flight)
            elif self.is_async:
                request.num_placeholders -= num_kept
                if was_running:
                    self.kv.cache(request, request.num_computed - request.num_placeholders)
        if stopped:
            finished.append(request.id)
            if not was_running:
                self.waiting.remove(request)
            self._finish(request)

    def _num_accepted(self, request: Request, num_drafts: int) -> int:
        if not num_drafts or not self.accepts:
            return 0
        num_accepted = min(self.accepts[request.num_verified % len(self.accepts)], num_drafts)
        request.num_verified += 1
        return num_accepted

    def _append_outputs(self, request: Request, count: int) -> tuple[int, bool]:
        """(tokens kept, whether the request has ended with the last of them)."""
        for num_kept in range(1, count + 1):
            request.tokens.append(self.tokens.output(request.id, request.num_outputs))
            self.kv.extend_prefixes(request)
            if len(request.tokens) >= self.engine.max_model_len or request.num_outputs >= request.max_tokens:
                return num_kept, True
        return count, False

    # -- ends and setbacks ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        """A connector gets to see the tables without what the window has left; then everything is freed."""
        if self.connector is not None:
            self.kv.release_skipped(request)
            self.connector.finished(request.id)
        self._prefilling.pop(request, None)
        self._passed_over.discard(request)
        self._encoder_slots += request.num_encoder
        if request.status == Status.LOADING and request.id not in self.arrived_loads:
            self.ended_loads[request.id] = request  # the load still writes to its blocks
        else:
            self.arrived_loads.discard(request.id)
            self._free(request)
        request.status = Status.FINISHED

    def _preempt(self, request: Request, drops_output: bool) -> None:
        """All blocks are lost, the tokens are kept; output still in flight is stale. The request is the next in line."""
        self._free(request)
        self._encoder_slots += request.num_encoder
        self._prefilling.pop(request, None)
        request.num_computed = 0
        request.num_drafts = 0
        request.num_placeholders = 0
        request.num_preemptions += 1
        request.drops_stale = drops_output or (request.drops_stale and request.num_stale > 0)
        request.num_stale = request.num_in_flight
        request.status = Status.PREEMPTED
        self.waiting.put_back([request])

    def _is_deferred(self, request: Request) -> bool:
        """Whether a step in flight may still write to the request's blocks."""
        return self.defers_frees and request.last_sequence > self.num_processed

    def _free(self, request: Request) -> None:
        if not self._is_deferred(request):
            self.kv.free(request)
            return
        blocks = self.kv.pop(request)
        if blocks:
            self.deferred.append((self.sequence, blocks))

    def _release_copied(self, blocks: list[int]) -> None:
        """Both ends of copies are held until the worker has copied, in the step being scheduled."""
        if self.defers_frees:
            self.deferred.append((self.sequence + 1, blocks[::-1]))
        else:
            self.kv.pool.release(blocks)

    def _drain_deferred(self) -> None:
        while self.deferred and self.deferred[0][0] <= self.num_processed:
            self.kv.pool.release(reversed(self.deferred.popleft()[1]))


class Cadence:
    """Prefills only every `interval` executed steps while others decode, unless more requests wait than can run."""

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.bound = False
        self._num_executed = 0
        self._last_prefill = -interval

    def defers(self, running: list[Request]) -> bool:
        """Whether the step to be scheduled leaves prefills out."""
        return (
            self.interval > 1
            and not self.bound
            and self._num_executed + 1 - self._last_prefill < self.interval
            and any(not request.is_prefill_chunk for request in running)
        )

    def count(self, plan: Plan, defers_prefills: bool, more_wait: bool) -> None:
        """A step was scheduled; `more_wait`: requests wait that nothing but the running ones keeps out."""
        if not plan.preempted and not defers_prefills:
            self.bound = more_wait
        if plan.scheduled:
            self._num_executed += 1
            if plan.admits_prefill or any(request.is_prefill_chunk for request in plan.scheduled):
                self._last_prefill = self._num_executed


class Found:
    """What an admission starts from. num_computed: local and external tokens, or those of a load that has arrived
    (`num_before`). loads_later: the external tokens arrive after this step; restores_window: with them comes the last
    window of groups that are not cached."""

    __slots__ = ("hits", "loads_later", "num_computed", "num_external", "restores_window")

    def __init__(
        self,
        hits: Hits,
        num_external: int = 0,
        loads_later: bool = False,
        restores_window: bool = False,
        num_before: int = 0,
    ) -> None:
        self.hits = hits
        self.num_external = num_external
        self.loads_later = loads_later
        self.restores_window = restores_window
        self.num_computed = num_before + hits.num_tokens + num_external


class Size(NamedTuple):
    """How much an admission computes: tokens of this step, hit tokens among them that are computed again, and whether
    drafts that nobody proposed pad it to the shape of a decode step."""

    num_new: int
    num_replayed: int
    padded: bool


NOTHING_NEW = Size(0, 0, False)


class Budget:
    """Tokens left in a step. Drafting beside the main model takes `draft_slots` more rows of each request's input. encoder:
    tokens of encoder inputs."""

    __slots__ = ("draft_slots", "encoder", "inputs", "tokens")

    def __init__(self, tokens: int, draft_slots: int, encoder: int = 0) -> None:
        self.encoder = encoder
        self.tokens = tokens
        self.inputs = tokens
        self.draft_slots = draft_slots

    @property
    def is_open(self) -> bool:
        """Whether one more token fits."""
        return self.tokens > 0 and self.inputs > self.draft_slots

    @property
    def per_request(self) -> int:
        """Tokens that one request can still get."""
        return min(self.tokens, self.inputs - self.draft_slots)

    def spend(self, num_tokens: int) -> None:
        self.tokens -= num_tokens
        self.inputs -= num_tokens + self.draft_slots

    def give_back(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        self.inputs += num_tokens + self.draft_slots

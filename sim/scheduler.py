"""The scheduler: who gets how many tokens in a step, who is admitted, who has to go. First come, first served."""

from __future__ import annotations

from collections import deque

from sim.connector import ConnectorRule
from sim.coordinator import Hits
from sim.manager import KVCacheManager
from sim.releases import Rules
from sim.request import Request, Status
from sim.scenario import Add, Scenario, Tokens


class Plan:
    """What one call of `schedule` decided. Token counts by request ID, in vLLM's order."""

    __slots__ = ("admitted", "asked", "external", "hits", "preempted", "resumed", "scheduled")

    def __init__(self) -> None:
        self.scheduled: dict[Request, int] = {}
        self.admitted: list[str] = []
        self.resumed: list[str] = []
        self.preempted: list[str] = []
        self.hits: dict[str, int] = {}
        self.external: dict[str, int] = {}
        self.asked: list[tuple[str, int, int | None]] = []


class Scheduler:
    """The queues and the steps of one synchronous engine."""

    def __init__(self, scenario: Scenario, rules: Rules, connector: ConnectorRule | None = None) -> None:
        self.engine = scenario.engine
        self.rules = rules
        self.connector = connector
        self.kv = KVCacheManager(scenario, rules)
        self.tokens = Tokens(scenario)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.num_added = 0
        self._preempted_since_last_step: list[str] = []

    # -- from outside --------------------------------------------------------------------------------------------------

    def add(self, add: Add) -> Request:
        """A request arrives and waits."""
        request = Request(add, self.num_added, self.tokens.prompt(add), len(self.kv.groups))
        self.num_added += 1
        self.kv.extend_prefixes(request)
        self.waiting.append(request)
        return request

    def abort(self, request_id: str) -> bool:
        """The client goes away. Returns False if the request has ended already."""
        for queue in (self.running, self.waiting):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self._finish(request)
                    return True
        return False

    def reset_prefix_cache(self, preempt_running: bool) -> bool:
        """Forgets all keys, if need be after preempting everybody. Returns whether it did."""
        if preempt_running:
            while self.running:
                self._preempt(self.running.pop())
        return self.kv.pool.reset()

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.running or self.waiting)

    # -- a step --------------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """First half of a step: running requests first, then waiting ones if nobody had to go. Raises OutOfBlocksError
        where vLLM's estimate of needed blocks was too low."""
        plan = Plan()
        plan.preempted = self._preempted_since_last_step
        self._preempted_since_last_step = []
        num_preempted_before = len(plan.preempted)
        threshold = self._long_prefill_threshold()
        budget = self._schedule_running(plan, self.engine.max_num_batched_tokens, threshold)
        if len(plan.preempted) == num_preempted_before:
            self._schedule_waiting(plan, budget, threshold)
        for request, num_tokens in plan.scheduled.items():
            request.num_computed += num_tokens
        return plan

    def _long_prefill_threshold(self) -> int:
        lone = len(self.running) + len(self.waiting) <= 1
        if lone and self.rules.lone_request_ignores_long_prefill_threshold:
            return 0
        return self.engine.long_prefill_token_threshold

    def _schedule_running(self, plan: Plan, budget: int, threshold: int) -> int:
        """Returns the token budget that is left."""
        max_model_len = self.engine.max_model_len
        running = self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            index += 1
            num_new = len(request.tokens) - request.num_computed
            if 0 < threshold < num_new:
                num_new = threshold
            num_new = min(num_new, budget, max_model_len - request.num_computed - 1)
            if num_new == 0:
                continue
            if request.num_computed + num_new > request.quiet_until and not self._make_room(request, num_new, plan):
                break
            plan.scheduled[request] = num_new
            budget -= num_new
        return budget

    def _make_room(self, request: Request, num_new: int, plan: Plan) -> bool:
        """Preempts the requests that came last until the tokens fit. False: the request itself had to go."""
        while not self.kv.allocate_slots(request, num_new):
            victim = self.running.pop()
            plan.preempted.append(victim.id)
            self._preempt_to_queue(victim)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, plan: Plan, budget: int, threshold: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.engine.max_num_seqs:
            request = self.waiting[0]
            hits = self.kv.computed_blocks(request)
            num_external = self._external_tokens(request, hits, plan)
            num_total = hits.num_tokens + num_external
            num_new = len(request.tokens) - num_total
            if 0 < threshold < num_new:
                num_new = threshold
            if not self.engine.chunked_prefill and num_new > budget:
                break
            num_new = min(num_new, budget)
            fits = self.kv.allocate_slots(
                request, num_new, hits, num_external, self.engine.reserve_full_isl, bool(self.running)
            )
            if not fits:
                break
            self.waiting.popleft()
            self._admit(request, hits, num_external, plan)
            plan.scheduled[request] = num_new
            budget -= num_new

    def _external_tokens(self, request: Request, hits: Hits, plan: Plan) -> int:
        if self.connector is None:
            return 0
        answer, _ = self.connector.matched(request.id, len(request.tokens), hits.num_tokens)
        plan.asked.append((request.id, hits.num_tokens, answer))
        return answer or 0

    def _admit(self, request: Request, hits: Hits, num_external: int, plan: Plan) -> None:
        if self.connector is not None:
            self.connector.allocated(request.id, num_external)
        (plan.resumed if request.status == Status.PREEMPTED else plan.admitted).append(request.id)
        plan.hits[request.id] = hits.num_tokens
        plan.external[request.id] = num_external
        request.status = Status.RUNNING
        request.num_computed = hits.num_tokens + num_external
        self.running.append(request)

    def update(self, plan: Plan) -> tuple[list[str], dict[str, int]]:
        """Second half of a step: (finished request IDs in order, new tokens by request ID)."""
        finished: list[str] = []
        new_tokens: dict[str, int] = {}
        hash_block_size = self.kv.prefixes.hash_block_size
        for request in plan.scheduled:
            if request.status != Status.RUNNING or request.num_computed < len(request.tokens):
                continue  # gone in between, or its prompt is not through yet
            tokens = request.tokens
            tokens.append(self.tokens.output(request.id, request.num_outputs))
            new_tokens[request.id] = 1
            if len(tokens) % hash_block_size == 0:
                self.kv.extend_prefixes(request)
            if len(tokens) >= self.engine.max_model_len or len(tokens) - request.num_prompt >= request.max_tokens:
                finished.append(request.id)
                self._finish(request)
        if finished:
            self.running = [request for request in self.running if request.status == Status.RUNNING]
        return finished, new_tokens

    # -- ends and setbacks ---------------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        """A connector gets to see the tables without what the window has left; then everything is freed."""
        if self.connector is not None:
            self.kv.release_skipped(request)
            self.connector.finished(request.id)
        self.kv.free(request)
        request.status = Status.FINISHED

    def _preempt(self, request: Request) -> None:
        self._preempted_since_last_step.append(request.id)
        self._preempt_to_queue(request)

    def _preempt_to_queue(self, request: Request) -> None:
        """All blocks are lost, the tokens are kept; the request is the next to be admitted."""
        self.kv.free(request)
        request.num_computed = 0
        request.num_preemptions += 1
        request.status = Status.PREEMPTED
        self.waiting.appendleft(request)

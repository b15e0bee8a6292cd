"""Follows an observed run: who was scheduled, admitted and sent back, what the connector answered, and how many tokens
came of each step, are given; tables, hits, copies and the order of the free queue are predicted.

What is scheduled beyond the tokens that a request has are drafts; as many of them were accepted as tokens came of the step
beyond the first.

Where the model cannot do what was observed (a request does not fit, another one has to go), it does what it can, and the
histories differ there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sim.history import Scheduled, Updated
from sim.releases import Rules
from sim.request import Request, Status
from sim.scenario import Scenario
from sim.scheduler import NOTHING_NEW, Budget, Found, Plan, Scheduler, Size


class Observed(NamedTuple):
    """An observed run. steps: in order, one for each that the scenario schedules. updates: likewise; None where the
    scenario itself says how many drafts are accepted. computed_at_end: tokens that a request counted as computed when it
    ended, which tell how many drafts were accepted beyond its end. Further, what the connector is like, see ConnectorRule.
    """

    steps: Iterable[Scheduled]
    updates: Iterable[Updated] | None = None
    computed_at_end: Mapping[str, int] = {}
    requires_kv_delivery: bool = True
    restores_windows: bool = False


class FollowedConnector:
    """Gives the observed answers, one question after the other."""

    def __init__(self, observed: Observed) -> None:
        self.requires_kv_delivery = observed.requires_kv_delivery
        self.restores_windows = observed.restores_windows
        self.answer: tuple[int | None, bool] = (0, False)

    def matched(self, request_id: str, num_tokens: int, num_local: int) -> tuple[int | None, bool]:
        """See ConnectorRule."""
        return self.answer

    def allocated(self, request_id: str, num_external: int) -> None:
        """Its further answers are known."""

    def finished(self, request_id: str) -> None:
        """Its further answers are known."""


class FollowingScheduler(Scheduler):
    """A scheduler whose decisions are given, step by step."""

    def __init__(self, scenario: Scenario, rules: Rules, observed: Observed) -> None:
        self._answers = FollowedConnector(observed) if scenario.connector is not None else None
        super().__init__(scenario, rules, self._answers)
        self._observed = iter(observed.steps)
        self._updates = iter(observed.updates) if observed.updates is not None else None
        self._computed_at_end = observed.computed_at_end
        self._whole_budget = Budget(0, 0, encoder=self.engine.max_num_batched_tokens)

    def schedule(self) -> Plan:
        """The next observed step. Raises PredictedError where vLLM raises."""
        plan = Plan()
        self.kv.new_step()
        step = next(self._observed, Scheduled(step=0))  # the model goes on where the run has ended
        self._follow_running(plan, step)
        self._follow_admissions(plan, step)
        plan.preempted += self._preempted_since_last_step
        self._preempted_since_last_step = []
        self._finish_plan(plan)
        return plan

    def update(self, plan: Plan) -> tuple[list[str], dict[str, int]]:
        """The output of a step, with as many drafts accepted as were observed."""
        observed = next(self._updates, None) if self._updates is not None else None
        if observed is not None:
            for request, num_drafts in plan.drafts.items():
                plan.accepted[request] = self._observed_accepted(request, num_drafts, observed)
        return super().update(plan)

    def _observed_accepted(self, request: Request, num_drafts: int, observed: Updated) -> int:
        num_accepted = observed.new_tokens.get(request.id, 0) - 1
        if request.id in observed.finished and request.id in self._computed_at_end:
            num_accepted = num_drafts - (request.num_computed - self._computed_at_end[request.id])
        return min(max(num_accepted, 0), num_drafts)

    def _follow_running(self, plan: Plan, step: Scheduled) -> None:
        """As in vLLM's loop over the running requests, each asks for room; who was sent back for want of it asked, too."""
        budget = Budget(self.engine.max_num_batched_tokens, self.draft_slots)
        threshold = self._long_prefill_threshold()
        sent_back = set(step.preempted)
        index = 0
        while index < len(self.running):
            request = self.running[index]
            index += 1
            num_new = step.scheduled.get(request.id, 0)
            if not num_new and request.id in sent_back:
                num_new = self._num_new_tokens(request, budget, threshold)
            if num_new <= 0:
                continue
            room, num_gone_before = self._make_room(request, num_new, plan, budget, index)
            index -= num_gone_before
            if room:
                plan.scheduled[request] = num_new
                budget.spend(num_new)
                self._take_drafts(request, num_new, plan)
            elif room is None:
                index -= 1

    def _take_drafts(self, request: Request, num_new: int, plan: Plan) -> None:
        num_drafts = request.num_computed + num_new - len(request.tokens) - request.num_placeholders
        if num_drafts > 0 and self.num_spec:
            plan.drafts[request] = num_drafts
        request.num_drafts = 0

    def _follow_admissions(self, plan: Plan, step: Scheduled) -> None:
        """Questions and admissions in the order in which they came; a question precedes its admission at once. Who comes
        back from a load is not asked about again, and comes first."""
        questions = deque(step.asked or ())
        names = dict.fromkeys(name for name, _, _ in questions)
        unasked = [name for name in step.scheduled if name in step.external and name not in names]
        for name in [*unasked, *(name for name in names if name in step.external)]:
            request = self._waiting_request(name)
            if request is None:
                continue
            found: Found | None = None
            while found is None and name in names and questions:
                asker, _, answer = questions.popleft()
                answered = self._ask(asker, answer, step, plan)
                found = answered if asker == name else None
            if found is None:
                if request.status == Status.LOADING and request.id in self.arrived_loads:
                    self._finish_load(request)
                found = self._find_computed(request, plan) if self._answers is None or request.num_computed else None
            if found is not None:
                self._follow_admission(request, found, step, plan)
        for asker, _, answer in questions:
            self._ask(asker, answer, step, plan)  # did not fit, or the connector did not know yet

    def _ask(self, name: str, answer: int | None, step: Scheduled, plan: Plan) -> Found | None:
        request = self._waiting_request(name)
        if request is None or self._answers is None:
            return None
        # Who was granted tokens and computes none in this step, loads them.
        self._answers.answer = (answer, name in step.external and name not in step.scheduled)
        return self._find_computed(request, plan)

    def _follow_admission(self, request: Request, found: Found, step: Scheduled, plan: Plan) -> None:
        size = NOTHING_NEW
        if not found.loads_later:
            size = Size(step.scheduled.get(request.id, 0), self._num_replayed(request, found), False)
        self._schedule_encoder(request, found, self._whole_budget)
        if not self._fits(request, found, size):
            return
        queue = self.aside if request in list(self.aside) else self.waiting
        queue.remove(request)
        self._grant(request, found, size, plan)
        if found.loads_later:
            request.status = Status.LOADING
            self._prefilling[request] = None
            self._put_back([request])
        else:
            self._admit(request, size, plan)
            self._take_drafts(request, size.num_new, plan)

    def _waiting_request(self, name: str) -> Request | None:
        return next((request for queue in (self.aside, self.waiting) for request in queue if request.id == name), None)

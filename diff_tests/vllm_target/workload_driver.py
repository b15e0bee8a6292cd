"""Plays a request trace to the real scheduler. See `diff_tests.workload.sides` for what a side is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from diff_tests.vllm_target import wire
from diff_tests.vllm_target.scheduler_driver import Engine, admissions_of
from diff_tests.workload.prompts import output_token, prompt_tokens
from diff_tests.workload.replay import Replay, parse_arrivals
from diff_tests.workload.sides import FULL_EVERY_STEPS, Lookup, StepFacts, digest_of, recent
from diff_tests.workload.trace import Labels, Row, read
from sim.scenario import Scenario

_STEPS_PER_MESSAGE = 64


def play(scenario: Scenario, message: wire.PlayTrace, send: Callable[[wire.ToParent], None]) -> None:
    """Plays the trace that the message names, and sends what the steps showed. An exception ends it."""
    side = VllmSide(scenario, message.hash_block_size)
    engine = scenario.engine
    replay = Replay(side, parse_arrivals(message.arrivals), engine.blocks - 1, engine.max_model_len, block_size=1)
    rows = islice(read(Path(message.path), message.hash_block_size, Labels(*message.labels)), message.limit)
    steps = (event.facts for event in replay.events(rows))
    error = None
    try:
        while batch := list(islice(steps, _STEPS_PER_MESSAGE)):
            send(wire.TraceSteps(message.case, batch, last=False))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    send(wire.TraceSteps(message.case, [], last=True, statistics=side.statistics, error=error))


class VllmSide:
    """The real scheduler. statistics: vLLM's own prefix cache statistics so far, summed: queries, hits, and those of
    requests that had been preempted."""

    def __init__(self, scenario: Scenario, trace_block_size: int) -> None:
        engine = Engine(scenario, None, None, log_stats=True)
        self._scheduler = engine.scheduler
        self._block_hasher = engine.block_hasher
        self._manager = engine.scheduler.kv_cache_manager
        self._managers = self._manager.coordinator.single_type_managers
        self._trace_block_size = trace_block_size
        self._requests: dict[str, Request] = {}
        self._preempted_before: set[str] = set()
        self._num_steps = 0
        self.statistics = [0, 0, 0, 0]

    def add(self, index: int, row: Row, chain: list[int]) -> None:
        self._add(index, row, max(1, row.output_length))

    def _add(self, index: int, row: Row, max_tokens: int) -> None:
        request = Request(
            request_id=str(index),
            prompt_token_ids=prompt_tokens(row.hash_ids, row.input_length, self._trace_block_size),
            sampling_params=SamplingParams(max_tokens=max_tokens),
            pooling_params=None,
            arrival_time=float(index),
            block_hasher=self._block_hasher,
        )
        self._requests[request.request_id] = request
        self._scheduler.add_request(request)

    def step(self) -> StepFacts:
        self._num_steps += 1
        output = self._scheduler.schedule()
        self._sum_statistics()
        lookups = list(self._lookups(output))
        preempted = sorted(int(request_id) for request_id in output.preempted_req_ids or ())
        self._preempted_before.update(output.preempted_req_ids or ())
        scheduled = output.num_scheduled_tokens
        if self._num_steps % FULL_EVERY_STEPS == 0:
            digest = digest_of((self._tables(r.request_id) for r in self._scheduler.running), self._free_order())
        else:
            digest = digest_of(recent(self._tables(i), num_tokens) for i, num_tokens in scheduled.items())
        num_free = self._manager.block_pool.get_num_free_blocks()
        return StepFacts(
            scheduled=[(int(request_id), num_tokens) for request_id, num_tokens in scheduled.items()],
            lookups=lookups,
            preempted=preempted,
            finished=self._update(output),
            num_free=num_free,
            digest=digest,
        )

    def look_up(self, index: int, row: Row, chain: list[int]) -> StepFacts:
        """A request that ends with its first token needs no more than the blocks of its prompt."""
        self._add(index, row, 1)
        lookups: list[Lookup] = []
        finished: list[int] = []
        while not finished:  # where states are kept inside a prompt, its prefill takes several steps
            output = self._scheduler.schedule()
            self._sum_statistics()
            lookups += self._lookups(output)
            tables = self._tables(str(index))
            finished = self._update(output)
        free = self._free_order()
        return StepFacts([], lookups, [], finished, len(free), digest_of([tables], free))

    def _lookups(self, output: Any) -> Iterator[Lookup]:
        starts = admissions_of(output)
        for request_id in output.num_scheduled_tokens:
            if request_id in starts:
                request = self._requests[request_id]
                resumed = request_id in self._preempted_before
                yield Lookup(int(request_id), request.num_tokens, starts[request_id], 0, resumed)

    def _tables(self, request_id: str) -> list[list[int]]:
        return [[block.block_id for block in manager.req_to_blocks.get(request_id, ())] for manager in self._managers]

    def _free_order(self) -> list[int]:
        return [block.block_id for block in self._manager.block_pool.free_block_queue.get_all_free_blocks()]

    def _sum_statistics(self) -> None:
        stats = self._manager.make_prefix_cache_stats()
        values = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
        self.statistics = [total + value for total, value in zip(self.statistics, values, strict=True)]

    def _update(self, output: Any) -> list[int]:
        """Processes the step's output; indexes of the requests that ended."""
        requests = [self._requests[request_id] for request_id in output.num_scheduled_tokens]
        sampled = [
            [] if request.is_prefill_chunk else [output_token(int(request.request_id), request.num_output_tokens)]
            for request in requests
        ]
        answer = ModelRunnerOutput(
            req_ids=[request.request_id for request in requests],
            req_id_to_index={request.request_id: i for i, request in enumerate(requests)},
            sampled_token_ids=sampled,
        )
        self._scheduler.update_from_output(output, answer)
        finished = [request.request_id for request in requests if request.is_finished()]
        for request_id in finished:
            del self._requests[request_id]
            self._preempted_before.discard(request_id)
        return [int(request_id) for request_id in finished]

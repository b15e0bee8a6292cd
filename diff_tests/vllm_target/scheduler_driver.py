"""Runs a scenario through the real Scheduler and the real worker side of the connector, and writes its history."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from diff_tests.vllm_target import configs
from diff_tests.vllm_target.defects import Defect
from diff_tests.vllm_target.encoder import encoder_input, give_encoder
from diff_tests.vllm_target.keepers import JobWorker, file_store, worker_of
from diff_tests.vllm_target.loads import Loads
from diff_tests.vllm_target.metadata import told
from diff_tests.vllm_target.recording import Emit, Recorder, Stop, Watch
from diff_tests.vllm_target.specs import Unsupported, layer_names
from diff_tests.vllm_target.state import SEES, KeyNames, StateReader
from diff_tests.vllm_target.worker import worker_acts
from oracle.contracts import Contract
from sim.history import Acted, GroupInfo, Refusal, Scheduled, Start, Updated
from sim.scenario import (
    STALL_STEPS,
    Abort,
    Add,
    Cross,
    LoadDone,
    LoadFailed,
    Pause,
    ResetPrefixCache,
    Run,
    Scenario,
    Schedule,
    Step,
    Tokens,
    Update,
)


def run(scenario: Scenario, release: str, contract: Contract | None, defect: Defect | None, emit: Emit) -> None:
    """Executes the scenario and emits its records one by one. Exceptions of vLLM become records."""
    with file_store(scenario, emit) as (settled, emit_settled):
        try:
            engine = Engine(settled, contract, defect)
        except Exception as error:
            emit(Refusal(type=type(error).__name__, message=str(error)))
            return
        driver = SchedulerDriver(settled, engine, defect, emit_settled)
        emit(driver.start_record(release))
        with suppress(Stop):
            driver.run()


def step_times(scenario: Scenario, num_warmup_steps: int, num_steps: int) -> list[float]:
    """Seconds that vLLM spends in `schedule` and `update_from_output`, step by step after the warm-up, with all the
    scenario's requests there from the start. Nothing is recorded, no connector's worker acts."""
    driver = SchedulerDriver(scenario, Engine(scenario, None, None), None, lambda record: None)
    return driver.timed_steps(num_warmup_steps + num_steps)[num_warmup_steps:]


class Engine:
    """Scheduler and worker of one engine. Building it raises whatever vLLM raises."""

    def __init__(
        self, scenario: Scenario, contract: Contract | None, defect: Defect | None, log_stats: bool = False
    ) -> None:
        setup = configs.build(scenario)
        vllm_config = setup.vllm_config
        # The worker comes first, as in a real engine: it has its memory before there is a scheduler.
        self.contract = contract
        self.worker = worker_of(scenario, setup, contract) if scenario.connector is not None else None
        self.scheduler: Any = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=setup.scheduler_config,
            structured_output_manager=_structured_outputs(vllm_config),
            block_size=setup.scheduler_block_size,
            hash_block_size=setup.hash_block_size,
            log_stats=log_stats,
        )
        if any(isinstance(group, Cross) for group in scenario.groups):
            give_encoder(self.scheduler, scenario)
        self.scheduler_block_size = setup.scheduler_block_size
        self.hash_block_size = setup.hash_block_size
        self.block_hasher = None
        if scenario.engine.prefix_caching or scenario.connector is not None:
            hash_function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            # Since 0.33 a key may cover tokens that follow its block.
            lookahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
            more = (lookahead,) if lookahead else ()
            self.block_hasher = get_request_block_hasher(setup.hash_block_size, hash_function, *more)
        if defect is not None:
            defect.plant(self.scheduler, self.worker)


class SchedulerDriver:
    """One scenario on one engine. Steps count calls of `schedule` from 1; outputs wait in `_in_flight` until processed."""

    def __init__(self, scenario: Scenario, engine: Engine, defect: Defect | None, emit: Emit) -> None:
        self._scenario = scenario
        self._engine = engine
        self._scheduler = engine.scheduler
        self._worker = engine.worker
        self._defect = defect
        self._out = Recorder(emit)
        self._tokens = Tokens(scenario)
        self._names = KeyNames(engine.hash_block_size)
        self._state = StateReader(engine.scheduler, self._names)
        self._watch = Watch(engine.scheduler.connector) if engine.scheduler.connector is not None else None
        self._requests: dict[str, Request] = {}
        self._was_admitted: set[Request] = set()
        self._num_added = 0
        if scenario.engine.kv_events:
            self._state.watch_events()
        self._in_flight: deque[tuple[int, Any, dict[str, int]]] = deque()
        self._max_left_in_flight = 1 if scenario.engine.async_scheduling else 0
        self._num_verified: dict[Request, int] = {}
        self._loads = Loads(engine.scheduler)

    def start_record(self, release: str) -> Start:
        scenario = self._scenario
        managers = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        record = Start(
            source="vllm",
            release=release,
            connector=scenario.connector.name if scenario.connector else None,
            scheduler_block_size=self._engine.scheduler_block_size,
            hash_block_size=self._engine.hash_block_size,
            groups=[
                GroupInfo(kind=group.kind, block_size=manager.block_size, layers=names)
                for group, manager, names in zip(scenario.groups, managers, layer_names(scenario), strict=True)
            ],
            sees=SEES,
            written=self._worker.written_at_start if self._worker else None,
        )
        self._state.fill_in(record)
        return record

    def run(self) -> None:
        """All steps of the scenario. Raises Stop after a Failure record."""
        for step in self._scenario.steps:
            if isinstance(step, Add):
                self._add(step)
            elif isinstance(step, Step):
                for _ in range(step.count):
                    self._engine_step()
            elif isinstance(step, Schedule):
                for _ in range(step.count):
                    self._schedule()
            elif isinstance(step, Update):
                for _ in range(min(step.count, len(self._in_flight))):
                    self._update()
            elif isinstance(step, Run):
                self._run_until_idle(step.limit)
            elif isinstance(step, Abort):
                self._abort(step.id)
            elif isinstance(step, ResetPrefixCache):
                self._reset_prefix_cache(step.running)
            elif isinstance(step, Pause):
                self._scheduler.set_pause_state(_PAUSE_STATES[step.what])
            elif isinstance(step, (LoadDone, LoadFailed)) and isinstance(self._worker, JobWorker):
                self._out.fail("action", Unsupported("this connector's loads arrive by themselves"))
            elif isinstance(step, LoadDone):
                self._loads.arrive(step.id)
            elif isinstance(step, LoadFailed):
                self._loads.fail(step.id, step.from_block, [number for number, _, _ in self._in_flight])
            else:
                self._out.fail("action", Unsupported(f"no connector here takes {type(step).__name__} steps"))

    def timed_steps(self, num_steps: int) -> list[float]:
        """Adds all requests, then runs steps; seconds that the scheduler took for each."""
        for step in self._scenario.steps:
            if isinstance(step, Add):
                self._add(step)
        seconds = []
        for _ in range(num_steps):
            started = time.perf_counter()
            output = self._scheduler.schedule()
            scheduled = time.perf_counter()
            answer = self._model_output(self._samples_of(output))
            resumed = time.perf_counter()
            self._scheduler.update_from_output(output, answer)
            seconds.append(time.perf_counter() - resumed + scheduled - started)
        return seconds

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _add(self, add: Add) -> None:
        with self._out.failing("add"):
            request = Request(
                request_id=add.id,
                **self._prompt(add),
                sampling_params=SamplingParams(max_tokens=add.max_tokens),
                pooling_params=None,
                arrival_time=float(self._num_added),
                lora_request=_lora_request(add.lora),
                cache_salt=add.salt,
                priority=add.priority,
                block_hasher=self._engine.block_hasher,
            )
            if add.encoder:
                request.mm_features = [encoder_input(add)]
            # As for requests that ask for log probabilities of their prompt.
            request.skip_reading_prefix_cache = add.skip_cache
            self._num_added += 1
            self._names.add(request)
            self._scheduler.add_request(request)
        self._requests[add.id] = request

    def _prompt(self, add: Add) -> dict[str, Any]:
        """Token IDs, or embeddings that are equal where the tokens are."""
        numbers = self._tokens.prompt(add)
        if not add.embeds:
            return {"prompt_token_ids": numbers}
        embeddings = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)
        return {"prompt_token_ids": None, "prompt_embeds": embeddings}

    def _engine_step(self) -> bool:
        """A step of a synchronous engine ends with its own output, one of an asynchronous engine with the output of the
        step before. Returns whether anything was scheduled."""
        any_scheduled = self._schedule()
        while len(self._in_flight) > self._max_left_in_flight:
            self._update()
        return any_scheduled

    def _run_until_idle(self, limit: int) -> None:
        num_empty = 0
        result = "idle"
        for _ in range(limit):
            if not self._scheduler.get_num_unfinished_requests():
                break
            num_empty = 0 if self._engine_step() else num_empty + 1
            if num_empty == STALL_STEPS:
                result = "stalled"
                break
        else:
            if self._scheduler.get_num_unfinished_requests():
                result = "limit"
        while self._in_flight:
            self._update()
        self._acted(Acted(step=self._out.step, action="run", result=result))

    def _abort(self, request_id: str) -> None:
        request = self._scheduler.requests.get(request_id)
        was_there = request is not None and not request.is_finished()
        with self._out.failing("action"):
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self._acted(Acted(step=self._out.step, action="abort", request=request_id, result="done" if was_there else "gone"))

    def _reset_prefix_cache(self, running: bool) -> None:
        with self._out.failing("action"):
            done = self._scheduler.reset_prefix_cache(reset_running_requests=running)
        self._acted(Acted(step=self._out.step, action="reset_prefix_cache", result="done" if done else "refused"))

    def _acted(self, record: Acted) -> None:
        self._state.fill_in(record)
        self._out.emit(record)

    # -- the two halves of a step --------------------------------------------------------------------------------------

    def _schedule(self) -> bool:
        """Schedules, and lets the worker act. Returns whether anything was scheduled."""
        self._out.step += 1
        if self._watch is not None:
            self._watch.clear()
        with self._out.failing("schedule"):
            output = self._scheduler.schedule()
        record = self._scheduled_record(output)
        if self._watch is not None:
            self._loads.grant(record, self._watch.tables)
        self._state.fill_in(record)
        if self._worker is not None:
            metadata = output.kv_connector_metadata
            if self._defect is not None:
                metadata = self._defect.on_the_way(metadata)
            self._worker.tokens = self._tokens_of_admitted(record)
            self._out.let_worker_act(self._worker, metadata, record)
            record.acts = worker_acts(record, output.has_sync_kv_loads)
        self._out.emit(record)
        self._in_flight.append((self._out.step, output, self._samples_of(output)))
        return bool(output.num_scheduled_tokens)

    def _scheduled_record(self, output: Any) -> Scheduled:
        watch = self._watch
        external = watch.external if watch is not None else {}
        admissions = admissions_of(output)
        fresh = [request_id for request_id in admissions if self._requests[request_id] not in self._was_admitted]
        self._was_admitted.update(self._requests[request_id] for request_id in fresh)
        record = Scheduled(
            step=self._out.step,
            scheduled=dict(output.num_scheduled_tokens),
            admitted=fresh,
            resumed=[request_id for request_id in admissions if request_id not in fresh],
            preempted=sorted(output.preempted_req_ids or ()),
            hits=self._local_hits(admissions, external),
            external={**dict.fromkeys(admissions, 0), **external},
            zeroed=list(output.new_block_ids_to_zero or ()),
            copies=[(copy.src_block_id, copy.dst_block_id) for copy in output.kv_cache_block_copies or ()],
            asked=watch.asked if watch is not None else None,
        )
        if watch is not None:
            tokens, num_groups = self._tokens_of_admitted(record), len(self._scenario.groups)
            record.selected, record.moves = told(output.kv_connector_metadata, self._engine.contract, tokens, num_groups)
        return record

    def _tokens_of_admitted(self, record: Scheduled) -> dict[str, Any]:
        """Token IDs of who is admitted in this step, in order."""
        return {request_id: self._requests[request_id].all_token_ids for request_id in record.external}

    def _local_hits(self, admissions: dict[str, int], external: dict[str, int]) -> dict[str, int]:
        """What an admission starts from is local and external tokens together, less those of them that are computed again.
        A request that loads is not admitted yet, but has been granted both."""
        starts = {i: self._requests[i].num_computed_tokens for i in external if i not in admissions} | admissions
        return {
            request_id: start + self._num_replayed(request_id, start) - external.get(request_id, 0)
            for request_id, start in starts.items()
        }

    def _num_replayed(self, request_id: str, start: int) -> int:
        """Tokens before the end of a hit that are computed again: since 0.31 a request says where that begins."""
        begin = getattr(self._requests[request_id], "replay_start", 0)
        return int(self._scheduler.prefix_replay_tokens) if begin and begin == start else 0

    def _samples_of(self, output: Any) -> dict[str, int]:
        """How many tokens each request gets from this step: one and its accepted drafts once its tokens are all computed,
        none before. The drafts of a padded admission stand for none: the worker rejects them."""
        drafts = output.scheduled_spec_decode_tokens
        admitted = admissions_of(output) if drafts else ()
        samples = {}
        for request_id in output.num_scheduled_tokens:
            request = self._requests[request_id]
            num_drafts = 0 if request_id in admitted else len(drafts.get(request_id, ()))
            samples[request_id] = 0 if request.is_prefill_chunk else 1 + self._num_accepted(request, num_drafts)
        return samples

    def _num_accepted(self, request: Request, num_drafts: int) -> int:
        speculative = self._scenario.engine.speculative
        if not num_drafts or speculative is None or not speculative.accept:
            return 0
        turn = self._num_verified.get(request, 0)
        self._num_verified[request] = turn + 1
        return min(speculative.accept[turn % len(speculative.accept)], num_drafts)

    def _model_output(self, samples: dict[str, int]) -> ModelRunnerOutput:
        """The model's answer, now that outputs before it are known."""
        request_ids = list(samples)
        sampled = []
        for request_id, num_tokens in samples.items():
            start = self._requests[request_id].num_output_tokens
            sampled.append([self._tokens.output(request_id, start + i) for i in range(num_tokens)])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )

    def _update(self) -> None:
        """Processes the oldest output in flight."""
        number, output, samples = self._in_flight.popleft()
        requests = [self._requests[request_id] for request_id in output.num_scheduled_tokens]
        live = [(request, request.num_output_tokens) for request in requests if not request.is_finished()]
        record = Updated(step=number)
        answer = self._model_output(samples)
        answer.kv_connector_output = self._loads.report(record)
        if isinstance(self._worker, JobWorker):
            answer.kv_connector_output = self._worker.report(record)
        others = self._others(requests) if record.arrived or record.lost else []  # a load may fail that has no blocks
        with self._out.failing("update"):
            self._scheduler.update_from_output(output, answer)
            self._hand_over_drafts(samples)
        for request, num_outputs in live:
            if request.num_output_tokens > num_outputs:
                record.new_tokens[request.request_id] = request.num_output_tokens - num_outputs
                self._names.extend(request)
            if request.is_finished():
                record.finished.append(request.request_id)
        record.finished += [request.request_id for request in others if request.is_finished()]
        record.events = self._state.events()
        self._state.fill_in(record)
        self._out.emit(record)

    def _others(self, scheduled: list[Request]) -> list[Request]:
        """Requests beside the scheduled ones that a failed load may end, by ID."""
        requests = self._scheduler.requests
        live = [requests[i] for i in sorted(requests) if not requests[i].is_finished()]
        return [request for request in live if request not in scheduled]

    def _hand_over_drafts(self, samples: dict[str, int]) -> None:
        """A synchronous engine hands the next drafts over after the update; an asynchronous one counts with them."""
        speculative = self._scenario.engine.speculative
        if speculative is None or self._scenario.engine.async_scheduling:
            return
        drafted = [request_id for request_id, num_tokens in samples.items() if num_tokens]
        tokens = [[_DRAFTED_TOKEN] * speculative.tokens for _ in drafted]
        self._scheduler.update_draft_token_ids(DraftTokenIds(drafted, tokens))


_PAUSE_STATES = {"none": PauseState.UNPAUSED, "new": PauseState.PAUSED_NEW, "all": PauseState.PAUSED_ALL}
# Any token does: whether a draft is accepted is the scenario's to say.
_DRAFTED_TOKEN = 1


_no_structure: list[StructuredOutputManager] = []


def _structured_outputs(vllm_config: Any) -> StructuredOutputManager:
    """No request here asks for structured output, so all engines share one manager."""
    if not _no_structure:
        _no_structure.append(StructuredOutputManager(vllm_config))
    return _no_structure[0]


def admissions_of(output: Any) -> dict[str, int]:
    """Tokens from which each request admitted in this step starts, in order of admission.

    Depending on the runner that a release assumes, resumed requests come among the new ones or among the cached ones.
    """
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    for request_id, start in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            starts[request_id] = start
    return starts


def _lora_request(name: str | None) -> LoRARequest | None:
    """Two requests use the same adapter iff its name is the same; the number follows from the name."""
    if name is None:
        return None
    number = int.from_bytes(name.encode()[:4], "big") % (1 << 31) + 1
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"adapters/{name}")

"""Shows the connector hand-made block tables, with any local length, and lets its worker side act.

The real scheduler only presents local hits aligned to its block size, which hides rounding faults. Here there is no
scheduler: a request's tables and its local tokens are whatever the scenario says.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_dcp_kv_block_size
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from diff_tests.vllm_target import configs
from diff_tests.vllm_target.defects import Defect
from diff_tests.vllm_target.metadata import selections
from diff_tests.vllm_target.recording import Emit, Recorder, Stop, Watch
from diff_tests.vllm_target.specs import Unsupported, layer_names
from diff_tests.vllm_target.worker import Worker
from oracle.contracts import Contract, keeps_content
from sim.history import Acted, GroupInfo, Refusal, Scheduled, Start, Tables
from sim.scenario import FIRST_TOKEN, Abort, Direct, Scenario, Step

SEES = ("tables",)


def run(scenario: Scenario, release: str, contract: Contract | None, defect: Defect | None, emit: Emit) -> None:
    """Executes the scenario and emits its records one by one. Exceptions of vLLM become records."""
    try:
        driver = DirectDriver(scenario, contract, defect, emit)
    except Exception as error:
        emit(Refusal(type=type(error).__name__, message=str(error)))
        return
    emit(driver.start_record(release))
    with suppress(Stop):
        driver.run()


class DirectDriver:
    """Both sides of one connector, and the requests it has been shown."""

    def __init__(self, scenario: Scenario, contract: Contract | None, defect: Defect | None, emit: Emit) -> None:
        """Raises whatever vLLM raises on the configuration."""
        if scenario.connector is None:
            raise Unsupported("the direct driver shows tables to a connector, and the scenario has none")
        if keeps_content(contract):
            raise Unsupported("the direct driver has no steps in which a connector could store what it loads")
        setup = configs.build(scenario)
        self._scenario = scenario
        self._setup = setup
        self._contract = contract
        self._worker = Worker(scenario, setup, contract)
        self._connector: Any = KVConnectorFactory.create_connector(
            setup.vllm_config, KVConnectorRole.SCHEDULER, setup.scheduler_config
        )
        self._watch = Watch(self._connector)
        self._defect = defect
        if defect is not None:
            defect.plant(None, self._worker)
        self._out = Recorder(emit)
        self._blocks = [KVCacheBlock(block_id) for block_id in range(scenario.engine.blocks)]
        self._blocks[0].is_null = True
        self._requests: dict[str, Request] = {}
        self._tables: Tables = {}
        self._admitted: dict[str, int] = {}

    def start_record(self, release: str) -> Start:
        dcp = self._scenario.engine.dcp
        scenario = self._scenario
        return Start(
            source="direct",
            release=release,
            connector=scenario.connector.name if scenario.connector else None,
            scheduler_block_size=self._setup.scheduler_block_size,
            hash_block_size=self._setup.hash_block_size,
            groups=[
                GroupInfo(kind=group.kind, block_size=_effective_block_size(cache_group.kv_cache_spec, dcp), layers=names)
                for group, cache_group, names in zip(
                    scenario.groups,
                    self._setup.scheduler_config.kv_cache_groups,
                    layer_names(scenario),
                    strict=True,
                )
            ],
            sees=SEES,
            tables={},
            written=self._worker.written_at_start,
        )

    def run(self) -> None:
        """All steps of the scenario. Raises Stop after a Failure record."""
        for step in self._scenario.steps:
            if isinstance(step, Direct):
                self._show(step)
            elif isinstance(step, Step):
                for _ in range(step.count):
                    self._step()
            else:
                assert isinstance(step, Abort)  # the scenario was checked
                self._abort(step.id)

    def _show(self, direct: Direct) -> None:
        """Asks for a request's external tokens and grants them, as the scheduler does on admission."""
        request = Request(
            request_id=direct.id,
            prompt_token_ids=list(range(FIRST_TOKEN, FIRST_TOKEN + direct.num_tokens)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=float(len(self._requests)),
        )
        blocks = KVCacheBlocks(tuple([self._blocks[i] for i in table] for table in direct.tables))
        with self._out.failing("schedule"):
            num_external, _ = self._connector.get_num_new_matched_tokens(request, direct.local)
            self._connector.update_state_after_alloc(request, blocks, num_external)
        self._requests[direct.id] = request
        self._tables[direct.id] = [list(table) for table in direct.tables]
        self._admitted[direct.id] = direct.local

    def _step(self) -> None:
        self._out.step += 1
        with self._out.failing("schedule"):
            metadata = self._connector.build_connector_meta(SchedulerOutput.make_empty())
        record = Scheduled(
            step=self._out.step,
            admitted=list(self._admitted),
            hits=self._admitted,
            external=self._watch.external,
            tables=dict(self._tables),
            asked=self._watch.asked,
            selected=selections(metadata, self._contract),
        )
        self._admitted = {}
        self._watch.clear()
        if self._defect is not None:
            metadata = self._defect.on_the_way(metadata)
        self._out.let_worker_act(self._worker, metadata, record)
        self._out.emit(record)

    def _abort(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        delays = False
        if request is not None:
            with self._out.failing("action"):
                delays = self._finish(request)
            del self._tables[request_id]
            self._admitted.pop(request_id, None)
            self._watch.forget(request_id)
        result = "gone" if request is None else "delayed" if delays else "done"
        self._out.emit(
            Acted(step=self._out.step, action="abort", request=request_id, result=result, tables=dict(self._tables))
        )

    def _finish(self, request: Request) -> bool:
        """Whether the connector wants to keep the blocks for a while. With one group it is told as the scheduler tells
        connectors that take no groups, and a MultiConnector its children beside such a one."""
        ids = tuple(self._tables[request.request_id])
        if len(ids) == 1 or not supports_hma(self._connector):
            answer = self._connector.request_finished(request, ids[0])
        else:
            answer = self._connector.request_finished_all_groups(request, ids)
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool)):
            raise TypeError(f"the connector answers {answer!r}; it must be True or False, and parameters or None")
        if not (answer[1] is None or isinstance(answer[1], dict)):
            raise TypeError(f"the connector answers {answer!r}; parameters must be a dictionary or None")
        return answer[0]


def _effective_block_size(spec: Any, dcp: int) -> int:
    """Tokens that one block of the group covers, by the release's own reckoning."""
    ranks_of = getattr(kv_cache_utils, "dcp_world_size_for_kv_cache_spec", None)
    return resolve_dcp_kv_block_size(spec, ranks_of(spec, dcp) if ranks_of else dcp)

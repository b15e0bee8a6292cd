"""One model's engine, from start to verdict: start it, send the matrix, read its trace, judge, one row a request."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from diff_tests.e2e.client import Client, our_name
from diff_tests.e2e.matrix import MAX_BATCHED_TOKENS, NUM_BLOCKS, Act, act_of, matrix, steps_of
from diff_tests.e2e.models import MAX_MODEL_LEN, MODELS, VOCABULARY_SIZE, Model
from diff_tests.e2e.painted import Painted, read_painted
from diff_tests.live.check import Checked, check_rebuilt
from diff_tests.live.rebuild import Rebuilt, rebuild
from diff_tests.live.trace import Trace, TraceError, read_trace
from diff_tests.run import explain_known
from diff_tests.vllm_target import connectors
from diff_tests.vllm_target.api_server import ApiServer, plugin_folder
from diff_tests.vllm_target.releases import TargetInputError, TargetStartError
from diff_tests.vllm_target.target import Target
from oracle.findings import Finding
from oracle.laws import judge
from oracle.selection import NULL
from sim.geometry import effective_block_size
from sim.history import Scheduled, Selections, Start, Updated
from sim.scenario import Engine, Full, Scenario

DEFAULT_CONNECTOR = "DecodeBenchConnector"
PAINTING = "diff_tests.vllm_target.engine.painting"
ENGINE_TIMEOUT_S = 600.0
"""For one engine, from its start to the end of the matrix."""

_WORKER_LAWS = (6, 11)
_WITHOUT_KERNELS = [model.name for model in MODELS.values() if not model.computes]


@dataclass(frozen=True)
class Row:
    """One admission of a request, in one group. tokens: the external range [start, end) in tokens.
    positions: entries of the block table that hold it; selected, received, written: block IDs, None where nobody saw."""

    act: str
    request: str
    step: int
    group: int
    kind: str
    tokens: tuple[int, int]
    positions: list[int]
    selected: list[int] | None
    received: list[int] | None
    written: list[int] | None
    verdict: str


@dataclass
class ModelRun:
    """What one model showed. platform: what its engine computes on, as vLLM calls it. ranks_judged: whose memory was
    painted. error: what kept the engine from its end; then there may be nothing to judge."""

    model: Model
    transport: str
    seconds: float = 0.0
    start_seconds: float = 0.0
    error: str = ""
    checked: Checked | None = None
    rows: list[Row] = field(default_factory=list)
    num_preemptions: int = 0
    platform: str = ""
    layout: list[str] = field(default_factory=list)
    ranks_judged: list[int] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """`same`, `known` or `different` as for a scenario; `error` where the engine did not reach its end."""
        if self.error or self.checked is None:
            return "error"
        return self.checked.verdict


def engine_settings(model: Model, folder: Path, connector: str) -> dict[str, Any]:
    """vLLM's engine arguments: painted, probed, plain, and hardly more blocks than a request of maximum length needs."""
    return {
        "model": str(folder / "model"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": MAX_BATCHED_TOKENS,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "block_size": model.block,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "disable_hybrid_kv_cache_manager": False,
        "disable_log_stats": True,
        "kv_transfer_config": {
            "kv_connector": connector,
            "kv_connector_module_path": PAINTING,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"kvprobe": {"dir": str(folder / "trace")}},
        },
        **model.settings,
    }


def scenario_of(acts: Sequence[Act], model: Model) -> Scenario:
    """The matrix as a scenario. Its groups are those of the model only once the engine has said so."""
    return Scenario(
        engine=Engine(blocks=NUM_BLOCKS, max_model_len=MAX_MODEL_LEN),
        groups=(Full(block=model.block),),
        steps=steps_of(list(acts)),
    )


def probed_connector(connector: str | None) -> str:
    """The connector's name as the probe takes it. Raises TargetInputError for a file of another connector."""
    if connector is None:
        return DEFAULT_CONNECTOR
    if connectors.is_file(connector):
        if DEFAULT_CONNECTOR not in connectors.defined_classes(connector):
            raise TargetInputError(f"--connector {connector}: must define {DEFAULT_CONNECTOR}, which e2e runs")
        return DEFAULT_CONNECTOR
    return "Probe_" + connector.replace(":", ".") if ":" in connector else connector


def run_model(target: Target, model: Model, connector: str, http: bool) -> ModelRun:
    """The matrix in one engine of the target's vLLM: in its child, which is used up, or over HTTP. connector: as the probe
    takes it. Raises TargetStartError where the server does not come up."""
    started = time.monotonic()
    acts = matrix(model.tokens_per_entry)
    run = ModelRun(model, "over HTTP" if http else "in process")
    if model.computes and target.source.platform:
        run.error = f"not run: there is no CPU build of this vLLM; on it run {', '.join(_WITHOUT_KERNELS)}"
        return run
    with tempfile.TemporaryDirectory(prefix="kvoracle-e2e-") as name:
        folder = Path(name)
        write_model(model, folder)
        error = (_over_http if http else _in_process)(target, run, folder, connector, scenario_of(acts, model))
        if not run.error:
            judge_run(run, acts, folder / "trace", error)
    run.seconds = time.monotonic() - started
    return run


def _in_process(target: Target, run: ModelRun, folder: Path, connector: str, scenario: Scenario) -> str:
    """Step by step, in a child of its own. Returns what ended the engine early, or nothing."""
    settings = engine_settings(run.model, folder, connector)
    try:
        end = target.run_engine(settings, scenario, plugin_folder(folder))
    except TargetStartError as error:
        return str(error)  # the child died over it
    finally:
        target.close()
    run.start_seconds = end.start_seconds
    if end.phase == "start":
        run.error = f"the engine did not start: {end.error}"
    return end.error


def _over_http(target: Target, run: ModelRun, folder: Path, connector: str, scenario: Scenario) -> str:
    """As a client of the server. Returns which requests failed, or nothing."""
    started = time.monotonic()
    settings = engine_settings(run.model, folder, connector)
    with ApiServer(target.source, settings, folder, target.replacing_file) as server:
        run.start_seconds = time.monotonic() - started
        client = Client(server, VOCABULARY_SIZE)
        client.run(scenario)
    return "; ".join(f"{request}: {error}" for request, error in list(client.errors.items())[:3])


def write_model(model: Model, folder: Path) -> None:
    """The folder of a model that has a config.json and nothing else."""
    (folder / "model").mkdir(parents=True)
    (folder / "trace").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(dict(model.config)))


# --------------------------------------------------------------------------------------------------------------- judging


def judge_run(run: ModelRun, acts: Sequence[Act], folder: Path, error: str) -> None:
    """Reads the trace of an engine that has ended and judges it, as far as it goes. error: what ended the engine early."""
    try:
        trace = read_trace([folder])
        rebuilt = rebuild(trace)
    except TraceError as reason:
        run.error = f"no trace to judge: {reason}" + (f"; {error}" if error else "")
        return
    painted = read_painted(folder)
    run.ranks_judged = [rank for rank, seen in sorted(painted.items()) if seen.written]
    _fill_in(rebuilt, trace, painted.pop(0, Painted()))
    checked = check_rebuilt(trace, rebuilt)
    more = [*_other_ranks(rebuilt, painted), *_left_over(rebuilt, acts, error)]
    checked.findings = sorted(
        [*checked.findings, *explain_known(more, rebuilt.scenario, rebuilt.geometry.rules)],
        key=lambda judged: judged.issue is not None,
    )
    run.checked = checked
    run.platform = trace.start.platform
    run.layout = [_layout(rebuilt, index) for index in range(len(rebuilt.scenario.groups))]
    run.num_preemptions = sum(len(record.preempted) for record in rebuilt.history if isinstance(record, Scheduled))
    run.rows = _rows(checked, act_of(list(acts)))


def _other_ranks(rebuilt: Rebuilt, painted_by_rank: dict[int, Painted]) -> list[Finding]:
    """Laws 6 and 11 for the ranks after the first, whose part the history does not have."""
    findings = []
    for rank, painted in painted_by_rank.items():
        received = rebuilt.others.get(rank, {})
        history = [
            msgspec.structs.replace(
                record,
                received=received.get(record.step),
                written=painted.written.get(record.step),
                acts=painted.acts.get(record.step),
            )
            if isinstance(record, Scheduled)
            else record
            for record in rebuilt.history
        ]
        broken = judge(rebuilt.scenario, history, rebuilt.geometry.rules, rebuilt.contract)
        findings += [
            msgspec.structs.replace(finding, message=f"{finding.message} (worker of rank {rank})")
            for finding in broken
            if finding.law in _WORKER_LAWS
        ]
    return findings


def _left_over(rebuilt: Rebuilt, acts: Sequence[Act], error: str) -> list[Finding]:
    """An engine that died, or whose requests did not all come to their end."""
    if error:
        return [Finding(kind="crash", law=7, cause="engine_died", message=f"the engine died: {error}")]
    finished = {our_name(name) for record in rebuilt.history if isinstance(record, Updated) for name in record.finished}
    lost = [name for name in act_of(list(acts)) if name not in finished]
    if not lost:
        return []
    return [Finding(kind="hang", law=8, cause="unfinished", message=f"requests that never ended: {', '.join(lost)}")]


def _fill_in(rebuilt: Rebuilt, trace: Trace, painted: Painted) -> None:
    """Puts what was seen of the first worker and its memory where a history has it."""
    for record in rebuilt.history:
        if isinstance(record, Scheduled):
            record.written = painted.written.get(record.step)
            record.acts = painted.acts.get(record.step)
        elif isinstance(record, Start):
            record.groups = [
                msgspec.structs.replace(group, layers=list(traced.layers))
                for group, traced in zip(record.groups, trace.start.groups, strict=True)
            ]


def _layout(rebuilt: Rebuilt, index: int) -> str:
    group = rebuilt.scenario.groups[index]
    return f"{group.kind} {effective_block_size(group, rebuilt.scenario.engine.dcp, rebuilt.geometry.rules)}"


# ------------------------------------------------------------------------------------------------------------------ rows


def _rows(checked: Checked, act_by_request: dict[str, str]) -> list[Row]:
    return [
        row
        for record in checked.rebuilt.history
        if isinstance(record, Scheduled)
        for request, num_external in record.external.items()
        for row in _rows_of(checked, record, request, num_external, act_by_request)
    ]


def _rows_of(
    checked: Checked, record: Scheduled, request: str, num_external: int, act_by_request: dict[str, str]
) -> list[Row]:
    rebuilt = checked.rebuilt
    start = record.hits.get(request, 0)
    tables = (record.tables or {}).get(request, [])
    rows = []
    for index, group in enumerate(rebuilt.scenario.groups):
        block_size = effective_block_size(group, rebuilt.scenario.engine.dcp, rebuilt.geometry.rules)
        positions = _positions(tables[index] if tables else [], group.kind, block_size, start, start + num_external)
        rows.append(
            Row(
                act=act_by_request.get(our_name(request), ""),
                request=our_name(request),
                step=record.step,
                group=index,
                kind=group.kind,
                tokens=(start, start + num_external),
                positions=positions,
                selected=_blocks(record.selected, request, index),
                received=_blocks(record.received, request, index),
                written=_written(record, request, index),
                verdict=_verdict(checked, record.step, request, index),
            )
        )
    return rows


def _positions(table: Sequence[int], kind: str, block_size: int, start: int, end: int) -> list[int]:
    """Entries of a block table that hold external tokens: of a state the last one, of a ring the whole."""
    held = [position for position, block_id in enumerate(table) if block_id != NULL]
    if kind == "circular":
        return held
    if kind == "mamba":
        start = end - 1
    return [p for p in held if start < end and p * block_size < end and (p + 1) * block_size > start]


def _blocks(selections: Selections | None, request: str, group: int) -> list[int] | None:
    if selections is None:
        return None
    selection = selections.get(request)
    return list(selection.groups[group]) if selection is not None and group < len(selection.groups) else []


def _written(record: Scheduled, request: str, group: int) -> list[int] | None:
    """The blocks of a request that hold the fill's value in every layer of the group, in the order of the selection."""
    received = _blocks(record.received, request, group)
    if not received or record.written is None:
        return None if received else received
    entries = [entry for entry in record.written if entry.group == group]
    by_layer: dict[str, set[int]] = {entry.layer: set() for entry in entries}
    for entry in entries:
        if entry.state == "filled":
            by_layer[entry.layer].update(entry.blocks)
    filled = set.intersection(*by_layer.values()) if by_layer else set()
    return [block_id for block_id in received if block_id in filled]


def _verdict(checked: Checked, step: int, request: str, group: int) -> str:
    """`ok`, or the causes of the findings about this admission in this group."""
    words = []
    for found in checked.findings:
        finding = found.finding
        if finding.step == step and finding.request in (request, None) and finding.group in (group, None):
            words.append(finding.cause + (" (known)" if found.issue is not None else ""))
    return ", ".join(dict.fromkeys(words)) or "ok"

"""A finding as a pytest module that uses vLLM alone: what `explain --pytest` writes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from diff_tests.explain.explanation import Explanation
from diff_tests.run import Outcome
from oracle.contracts import Contract, keeps_content, reads_metadata
from oracle.contracts.multi import Multi
from oracle.findings import Finding, token_range
from oracle.known_issues import KnownIssue
from oracle.known_issues import load as load_issues
from sim.geometry import block_sizes
from sim.history import Acted, Failure, Scheduled, Updated
from sim.releases import Rules
from sim.scenario import (
    MLA,
    RSWA,
    Abort,
    Add,
    AnyGroup,
    ChunkedLocal,
    Circular,
    Direct,
    Full,
    Mamba,
    Pause,
    ResetPrefixCache,
    Run,
    Schedule,
    SlidingWindow,
    SlidingWindowMLA,
    Span,
    Step,
    Update,
)

ROOT = Path(__file__).parents[2]
_WIDTH = 110
_TOKENS_PER_STREAM = 100_000
_ONE_BY_ONE = 40  # so many blocks are commented one by one; beyond, runs of consecutive ones share a line

# vLLM's class for each kind, and what it takes beside block, heads and data type.
_SPECS: dict[type, tuple[str, dict[str, str]]] = {
    Full: ("FullAttentionSpec", {}),
    MLA: ("MLAAttentionSpec", {}),
    SlidingWindow: ("SlidingWindowSpec", {"sliding_window": "window"}),
    SlidingWindowMLA: ("SlidingWindowMLASpec", {"sliding_window": "window"}),
    RSWA: ("RSWASpec", {"rswa_window": "window"}),
    ChunkedLocal: ("ChunkedLocalAttentionSpec", {"attention_chunk_size": "chunk"}),
    Circular: ("CircularBufferSpec", {}),
    Mamba: ("MambaSpec", {}),
}
_PLAYED = (Abort, Add, Direct, Pause, ResetPrefixCache, Run, Schedule, Step, Update)
_PLAIN_DTYPES = ("bfloat16", "float16", "float32")


def module_of_issue(issue: KnownIssue) -> str:
    """The stand-alone script of a known issue, as a test."""
    name = Path(issue.script).name
    body, _, _ = (ROOT / issue.script).read_text(encoding="utf-8").partition('\n\nif __name__ == "__main__":')
    body = body.replace("def main() -> None:", f"def test_{issue.id.replace('-', '_')}() -> None:")
    return body.replace(f"`python {name}`", f"`pytest test_{name}`").rstrip() + "\n"


def module_of(outcome: Outcome, explanation: Explanation, rules: Rules) -> str:
    """The module that shows the explained finding. Raises ValueError, with the reason, where none can be written."""
    finding = explanation.finding
    if finding is None:
        raise ValueError("nothing to write a test of: no finding")
    if explanation.known_issue is not None:
        return module_of_issue(next(issue for issue in load_issues() if issue.id == explanation.known_issue[0]))
    reason = _why_not(finding, outcome, explanation.story.contract)
    if reason is not None:
        raise ValueError(f"no test is written {reason}; those of selections and of exceptions in the scheduler can be")
    return _Writer(outcome, explanation, finding, rules).text()


def _why_not(finding: Finding, outcome: Outcome, contract: Contract | None) -> str | None:
    """Why no module can show the finding, to follow `no test is written`."""
    scenario, end = outcome.scenario, outcome.observed[-1]
    engine, connector = scenario.engine, scenario.connector
    raised = finding.kind == "crash" and isinstance(end, Failure) and end.phase != "worker"
    if not raised and (finding.kind != "selection" or finding.request is None):
        law = f"law {finding.law}" if finding.law is not None else "a divergence"
        return f"of {law} ({finding.kind}), which shows in no value that vLLM hands out"
    adds = [step for step in scenario.steps if isinstance(step, Add)]
    limits = {
        "speculative decoding": engine.speculative is not None,
        "a scripted connector": connector is not None and connector.name == "scripted",
        "metadata of another form than `reqs_to_fill`": keeps_content(contract)
        or reads_metadata(contract)
        or isinstance(contract, Multi),
        "layers of several sizes in a group": any(group.uniform for group in scenario.groups),
        "draft layers": any(group.draft for group in scenario.groups),
        "a quantised cache": any(group.dtype not in _PLAIN_DTYPES for group in scenario.groups),
        "cross attention": any(type(group) not in _SPECS for group in scenario.groups),
        "groups that say whether they are sharded": any(group.dcp_sharded is not None for group in scenario.groups),
        "embeddings, encoders or adapters": any(add.embeds or add.encoder or add.lora for add in adds),
        "given output tokens": any(add.output for add in adds),
        "requests that do not read the prefix cache": any(add.skip_cache for add in adds),
        "loads that arrive or fail": any(not isinstance(step, _PLAYED) for step in scenario.steps),
        "the end of a hand-made request": scenario.driver == "direct"
        and any(isinstance(step, Abort) for step in scenario.steps),
    }
    return next((f"with {name}" for name, is_so in limits.items() if is_so), None)


class _Event(NamedTuple):
    """What happens next: `add`, `schedule`, `update`, `abort`, `reset` or `pause`, by a step of the scenario if any."""

    name: str
    step: object = None


class _Writer:
    def __init__(self, outcome: Outcome, explanation: Explanation, finding: Finding, rules: Rules) -> None:
        self._outcome = outcome
        self._scenario = outcome.scenario
        self._story = explanation.story
        self._explanation = explanation
        self._finding = finding
        self._scheduler_block, self._hash_block = block_sizes(outcome.scenario, rules)
        self._streams: dict[str, int] = {}

    def text(self) -> str:
        is_direct = self._scenario.driver == "direct"
        body = list(self._shown() if is_direct else self._played())
        body += list(self._asserted() if self._finding.kind == "selection" else ())
        test = [f"def test_{self._finding.cause.lower()}(tmp_path: Path) -> None:", *(f"    {line}" for line in body)]
        parts = [
            self._docstring(),
            "import json\nfrom pathlib import Path",
            "\n".join(["import torch", *self._imports(is_direct)]),
            f"BLOCK_SIZE = {self._hash_block}  # of the prefix cache's keys, in tokens\n"
            f"NUM_BLOCKS = {self._scenario.engine.blocks}\n"
            + _MODEL.format(max_model_len=self._scenario.engine.max_model_len),
        ]
        functions = [self._config(), self._groups(), _REQUEST, "" if is_direct else self._engine(), "\n".join(test)]
        return "\n\n".join(parts) + "\n\n\n" + "\n\n\n".join(part.strip() for part in functions if part) + "\n"

    # -- the head ------------------------------------------------------------------------------------------------------

    def _docstring(self) -> str:
        paragraphs = [
            " ".join(self._explanation.headline.split()),
            self._finding.message,
            f"Seen with: {self._explanation.title}. Run it with the vLLM in question: `pytest FILE`. It fails where the "
            "fault is.",
        ]
        plain = [text.replace("\\", "\\\\").replace('"', "'") for text in paragraphs]
        return '"""' + "\n\n".join(textwrap.fill(text, _WIDTH) for text in plain) + '\n"""'

    def _imports(self, is_direct: bool) -> list[str]:
        specs = {_SPECS[type(group)][0] for group in self._scenario.groups}
        names = {
            "vllm.config": {"CacheConfig", "DeviceConfig", "ModelConfig", "SchedulerConfig", "VllmConfig"},
            "vllm.sampling_params": {"SamplingParams"},
            "vllm.utils.hashing": {"sha256"},
            "vllm.v1.core.kv_cache_utils": {"get_request_block_hasher", "init_none_hash"},
            "vllm.v1.kv_cache_interface": {"KVCacheConfig", "KVCacheGroupSpec", *specs},
            "vllm.v1.request": {"Request"},
        }
        if self._scenario.connector is not None:
            names["vllm.config"].add("KVTransferConfig")
        if self._scenario.engine.dcp > 1:
            names["vllm.config"].add("ParallelConfig")
        if is_direct:
            names["vllm.v1.core.kv_cache_utils"].add("KVCacheBlock")
            names["vllm.v1.core.kv_cache_manager"] = {"KVCacheBlocks"}
            names["vllm.v1.core.sched.output"] = {"SchedulerOutput"}
            names["vllm.distributed.kv_transfer.kv_connector.factory"] = {"KVConnectorFactory"}
            names["vllm.distributed.kv_transfer.kv_connector.v1.base"] = {"KVConnectorRole"}
        else:
            names["vllm.v1.outputs"] = {"ModelRunnerOutput"}
            names["vllm.v1.structured_output"] = {"StructuredOutputManager"}
            if any(isinstance(step, Abort) for step in self._scenario.steps):
                names["vllm.v1.request"].add("RequestStatus")
            if any(isinstance(step, Pause) for step in self._scenario.steps):
                names["vllm.v1.core.sched.interface"] = {"PauseState"}
        return [_import(module, sorted(names[module])) for module in sorted(names)]

    def _config(self) -> str:
        engine, connector = self._scenario.engine, self._scenario.connector
        scheduler = {
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "max_model_len": engine.max_model_len,
            "is_encoder_decoder": False,
            "async_scheduling": engine.async_scheduling,
            **_unless(True, enable_chunked_prefill=engine.chunked_prefill),
            **_unless(0, long_prefill_token_threshold=engine.long_prefill_token_threshold),
            **_unless(False, long_prefill_token_threshold_adaptive=engine.long_prefill_adaptive),
            **_unless(1, prefill_schedule_interval=engine.prefill_schedule_interval),
            **_unless("fcfs", policy=engine.policy),
            **_unless(0.0, watermark=engine.watermark),
            **_unless(True, scheduler_reserve_full_isl=engine.reserve_full_isl),
        }
        modes = [group.mode for group in self._scenario.groups if isinstance(group, Mamba)]
        cache = {
            "block_size": min(group.block for group in self._scenario.groups),
            "enable_prefix_caching": engine.prefix_caching,
            **_unless("none", mamba_cache_mode=modes[0] if modes else "none"),
            **_unless(0, prefix_cache_retention_interval=engine.retention_interval),
            **_unless(None, prefix_match_unit=engine.prefix_match_unit),
        }
        dtype = self._scenario.groups[0].dtype
        lines = [
            "def make_config(folder: Path) -> VllmConfig:",
            '    (folder / "config.json").write_text(json.dumps(MODEL))',
            "    config = VllmConfig(",
            "        model_config=ModelConfig(",
            "            model=str(folder),",
            "            skip_tokenizer_init=True,",
            f'            dtype="{dtype}",',
            f"            max_model_len={engine.max_model_len},",
            "        ),",
            *_call("scheduler_config=SchedulerConfig", scheduler),
            *_call("cache_config=CacheConfig", cache),
            '        device_config=DeviceConfig("cpu"),',
        ]
        if engine.dcp > 1:
            sizes = {"tensor_parallel_size": engine.dcp, "decode_context_parallel_size": engine.dcp}
            lines += _call("parallel_config=ParallelConfig", sizes)
        if connector is not None:
            module, _, name = connector.name.rpartition(":")
            transfer = {
                "kv_connector": name,
                **_unless("", kv_connector_module_path=module),
                "kv_role": "kv_both",
                **_unless({}, kv_connector_extra_config=dict(connector.extra)),
            }
            lines += _call("kv_transfer_config=KVTransferConfig", transfer)
        return "\n".join([*lines, "    )", "    config.cache_config.num_gpu_blocks = NUM_BLOCKS", "    return config"])

    def _groups(self) -> str:
        lines = ["def make_kv_cache_config() -> KVCacheConfig:", "    groups = ["]
        for index, group in enumerate(self._scenario.groups):
            layers = [f"group{index}.layer{i}" for i in range(group.layers)]
            lines += [
                "        KVCacheGroupSpec(",
                f"            {_listed(layers)},",
                *_spec(group),
                "        ),",
            ]
        return "\n".join([*lines, "    ]", "    return KVCacheConfig(NUM_BLOCKS, [], groups)"])

    def _engine(self) -> str:
        in_flight = 1 if self._scenario.engine.async_scheduling else 0
        streams = {add.id: self._base(f"{add.id}.out") for add in self._scenario.steps if isinstance(add, Add)}
        outputs = ", ".join(f'"{request}": {base}' for request, base in streams.items())
        return _ENGINE.format(
            scheduler_block=self._scheduler_block, outputs=outputs, in_flight=in_flight, hash_block="BLOCK_SIZE"
        )

    def _base(self, stream: str) -> int:
        """The stream's first token."""
        return self._streams.setdefault(stream, _TOKENS_PER_STREAM * (len(self._streams) + 1))

    def _prompt(self, spans: tuple[Span, ...]) -> str:
        starts = [(self._base(span.stream) + span.start, span.count) for span in spans]
        return "[" + ", ".join(f"*range({start}, {start + count})" for start, count in starts) + "]"

    # -- what happens --------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[_Event]:
        """Up to the step of the finding, as the history shows it."""
        records = [r for r in self._outcome.observed if isinstance(r, (Scheduled, Updated, Acted, Failure))]
        at = 0
        for step in self._scenario.steps:
            if isinstance(step, Add):
                yield _Event("add", step)
            elif isinstance(step, (Abort, ResetPrefixCache)):
                yield _Event("abort" if isinstance(step, Abort) else "reset", step)
                at += 1
            elif isinstance(step, Pause):
                yield _Event("pause", step)
            else:
                num_left = step.count if isinstance(step, (Step, Schedule)) else None
                while at < len(records):
                    record = records[at]
                    is_next = isinstance(record, Scheduled) and num_left == 0
                    if isinstance(record, Acted) or is_next:
                        at += isinstance(step, Run)  # a run has a record of its own
                        break
                    at += 1
                    if isinstance(record, Updated):
                        yield _Event("update")
                        continue
                    if num_left is not None:
                        num_left -= 1
                    yield _Event("update" if isinstance(record, Failure) and record.phase == "update" else "schedule")
                    if isinstance(record, Failure) or record.step == self._finding.step:
                        return

    def _played(self) -> Iterator[str]:
        yield "engine = Engine(tmp_path)"
        events = _in_steps(self._events(), self._scenario.engine.async_scheduling)
        for name, same in groupby(events, key=lambda event: event.name if event.step is None else event):
            count = len(list(same))
            if isinstance(name, _Event):
                yield self._action(name)
            else:
                yield f"engine.{name}()" if count == 1 else f"for _ in range({count}):"
                if count > 1:
                    yield f"    engine.{name}()"

    def _action(self, event: _Event) -> str:
        step = event.step
        if isinstance(step, Add):
            more = _unless(0, priority=step.priority) | _unless(None, cache_salt=step.salt)
            options = "".join(f", {key}={_literal(value)}" for key, value in more.items())
            return f'engine.add("{step.id}", {self._prompt(step.prompt)}, max_tokens={step.max_tokens}{options})'
        if isinstance(step, Abort):
            return f'engine.scheduler.finish_requests("{step.id}", RequestStatus.FINISHED_ABORTED)'
        if isinstance(step, ResetPrefixCache):
            return f"engine.scheduler.reset_prefix_cache(reset_running_requests={step.running})"
        assert isinstance(step, Pause)
        state = {"none": "UNPAUSED", "new": "PAUSED_NEW", "all": "PAUSED_ALL"}[step.what]
        return f"engine.scheduler.set_pause_state(PauseState.{state})"

    def _shown(self) -> Iterator[str]:
        """Hand-made tables."""
        yield "connector = KVConnectorFactory.create_connector("
        yield "    make_config(tmp_path), KVConnectorRole.SCHEDULER, make_kv_cache_config()"
        yield ")"
        number = 0
        for step in self._scenario.steps:
            if isinstance(step, Direct):
                yield f'request = make_request("{step.id}", list(range(1, {step.num_tokens + 1})))'
                yield f"tables = {[list(table) for table in step.tables]}  # 0 is the null block"
                yield "blocks = KVCacheBlocks(tuple([KVCacheBlock(i, is_null=i == 0) for i in table] for table in tables))"
                yield f"num_external, _ = connector.get_num_new_matched_tokens(request, {step.local})"
                yield "connector.update_state_after_alloc(request, blocks, num_external)"
            elif isinstance(step, Step):
                for _ in range(step.count):
                    number += 1
                    yield "metadata = connector.build_connector_meta(SchedulerOutput.make_empty())"
                    if number == self._finding.step:
                        return

    # -- what is asserted ----------------------------------------------------------------------------------------------

    def _asserted(self) -> Iterator[str]:
        request, number = self._finding.request, self._finding.step
        assert request is not None
        assert number is not None
        assert self._story.contract is not None
        step = self._story.steps[number]
        assert step.record is not None
        if self._scenario.driver != "direct":
            yield "metadata = engine.last_output.kv_connector_metadata"
        num_external, num_local = step.record.external.get(request, 0), step.record.hits.get(request, 0)
        if not num_external:
            yield "# It was granted no external tokens in this step."
            yield f'assert "{request}" not in metadata.reqs_to_fill'
            return
        tokens = token_range(num_local, num_local + num_external)
        yield f"# Of {request}, {num_local} tokens are in the prefix cache; external {tokens} follow, and are to be filled."
        yield f'groups, num_tokens = metadata.reqs_to_fill["{request}"]'
        yield f"assert num_tokens == {num_external}"
        tables = step.tables[request]
        expected = self._story.contract.loads(tables, num_local, num_external)
        for index, (blocks, table) in enumerate(zip(expected, tables, strict=True)):
            size = self._story.groups[index].block_size
            kind = self._scenario.groups[index].kind
            yield f"assert list(groups[{index}]) == [  # {kind}, {size} tokens a block"
            for line in _commented(blocks, table, size):
                yield f"    {line}"
            yield "]"


def _commented(blocks: list[int], table: list[int], size: int) -> Iterator[str]:
    """The IDs, each with its place in the block table, or, of many, each run of consecutive ones."""
    places = [(block, table.index(block)) for block in blocks]
    runs: list[list[tuple[int, int]]] = []
    for block, position in places:
        if len(places) > _ONE_BY_ONE and runs and runs[-1][-1] == (block - 1, position - 1):
            runs[-1].append((block, position))
        else:
            runs.append([(block, position)])
    for run in runs:
        (first, start), (last, end) = run[0], run[-1]
        tokens = f"tokens [{start * size}, {(end + 1) * size})"
        if len(run) == 1:
            yield f"{first},  # position {start}: {tokens}"
        else:
            yield f"*range({first}, {last + 1}),  # positions {start}..{end}: {tokens}"


def _in_steps(events: Iterator[_Event], is_async: bool) -> Iterator[_Event]:
    """Schedule and update, one after the other, are one step of a synchronous engine."""
    held: _Event | None = None
    for event in events:
        if held is not None and event.name == "update" and not is_async:
            held = None
            yield _Event("step")
            continue
        if held is not None:
            yield held
            held = None
        if event.name == "schedule":
            held = event
        else:
            yield event
    if held is not None:
        yield held


def _unless(default: object, **setting: object) -> dict[str, object]:
    """The setting, unless it is vLLM's default."""
    return {name: value for name, value in setting.items() if value != default}


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) and '"' not in value and "\\" not in value else repr(value)


def _listed(values: list[str]) -> str:
    return "[" + ", ".join(_literal(value) for value in values) + "]"


def _call(name: str, settings: Mapping[str, object]) -> Iterator[str]:
    yield f"        {name}("
    for key, value in settings.items():
        yield f"            {key}={_literal(value)},"
    yield "        ),"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    return line if len(line) <= _WIDTH else f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def _spec(group: AnyGroup) -> Iterator[str]:
    name, fields = _SPECS[type(group)]
    yield f"            {name}("
    for line in _mamba(group) if isinstance(group, Mamba) else _attention(group, fields):
        yield f"                {line},"
    yield "            ),"


def _attention(group: AnyGroup, fields: Mapping[str, str]) -> Iterator[str]:
    yield f"block_size={group.block}"
    yield f"num_kv_heads={group.heads}"
    yield f"head_size={group.head_size}"
    yield f"dtype=torch.{group.dtype}"
    for theirs, ours in fields.items():
        yield f"{theirs}={getattr(group, ours)}"
    if isinstance(group, SlidingWindowMLA) and group.bounded_replay:
        yield "bounded_replay=True"


def _mamba(group: Mamba) -> Iterator[str]:
    yield f"block_size={group.block}"
    yield f"shapes=(({group.heads}, {group.head_size}),)"
    yield f"dtypes=(torch.{group.dtype},)"
    yield f'mamba_cache_mode="{group.mode}"'
    if group.speculative_blocks:
        yield f"num_speculative_blocks={group.speculative_blocks}"
    if group.checkpoint_blocks:
        yield f"num_prefill_checkpoint_blocks={group.checkpoint_blocks}"
        field = "prefill_checkpoint_alignment"
        known = f'"{field}" in MambaSpec.__dataclass_fields__'
        yield f'**({{"{field}": {group.checkpoint_alignment}}} if {known} else {{}})'


_MODEL = """\
MODEL = {{
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": {max_model_len},
}}"""

_REQUEST = """\
def make_request(name: str, tokens: list[int], max_tokens: int = 1, **options: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **options,
    )"""

_ENGINE = """\
class Engine:
    \"\"\"A scheduler; the model answers with made-up tokens, those of a request from its number here on.\"\"\"

    OUTPUTS = {{{outputs}}}

    def __init__(self, folder: Path) -> None:
        init_none_hash(sha256)
        config = make_config(folder)
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            vllm_config=config,
            kv_cache_config=make_kv_cache_config(),
            structured_output_manager=StructuredOutputManager(config),
            block_size={scheduler_block},
            hash_block_size={hash_block},
        )
        self.requests = {{}}
        self.outputs = []

    def add(self, name: str, tokens: list[int], max_tokens: int, **options: object) -> None:
        request = make_request(name, tokens, max_tokens, arrival_time=float(len(self.requests)), **options)
        self.requests[name] = request
        self.scheduler.add_request(request)

    def schedule(self) -> None:
        self.last_output = self.scheduler.schedule()
        names = list(self.last_output.num_scheduled_tokens)
        self.outputs.append((self.last_output, {{name: not self.requests[name].is_prefill_chunk for name in names}}))

    def update(self) -> None:
        output, samples = self.outputs.pop(0)
        tokens = [
            [self.OUTPUTS[name] + self.requests[name].num_output_tokens] if has_token else []
            for name, has_token in samples.items()
        ]
        indices = {{name: index for index, name in enumerate(samples)}}
        answer = ModelRunnerOutput(req_ids=list(samples), req_id_to_index=indices, sampled_token_ids=tokens)
        self.scheduler.update_from_output(output, answer)

    def step(self) -> None:
        self.schedule()
        self.update()
"""

"""The ratios that the project promises, measured: interleaved, in one run, as medians.

Speed of a campaign is counted in processor time of both processes together, so that it does not depend on how many cores
happen to be free. *Real side* is the child's part: scheduler, connector, worker, painting, reading memory and state back.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from diff_tests.campaign import CASES_PER_SHARE, Crew, Shares, num_cores
from diff_tests.growth_bench import SERIES, Growth, exponent, measure_growth
from diff_tests.power_bench import BUGGY_RELEASE, NUM_SEEDS, measure_bug_sights, measure_guidance
from diff_tests.shard import Cases
from diff_tests.vllm_target.target import Target, TargetInfo
from diff_tests.workload.race import RIVAL, race
from diff_tests.workload.report import Origin
from sim.releases import Rules
from sim.scenario import Add, Engine, Full, Scenario, Span
from sim.scheduler import Scheduler

CASES_PER_BATCH = 150
NUM_BATCHES = 7
CASES_PER_RACE = 30 * CASES_PER_SHARE
NUM_ROUNDS = 5


@dataclass(frozen=True)
class Measure:
    """What was measured, in which unit, and the bound that it must keep if one is promised (at least or at most)."""

    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    detail: str = ""

    @property
    def kept(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )


def measure(
    target: Target, info: TargetInfo, only: str | None = None, device: str = "cpu", trace: Path | None = None
) -> list[Measure]:
    """All measures, or those of one part: `campaign`, `model`, `memory`, `growth`, or, on demand only, `bugs`, which needs
    a release of its own, `guidance`, which takes long, `probe`, which needs engines, and `workload`, which needs a trace.
    device: where KV memory lies. Raises RaceError, TargetStartError."""
    measures: list[Measure] = []
    if only == "workload" and trace is not None:
        measures.append(measure_workload(trace))
    if only == "bugs":
        measures += measure_bugs()
    if only == "guidance":
        measures += measure_guided(info.rules)
    if only == "probe":
        measures.append(measure_probe(target.vllm))
    if only in (None, "memory"):
        measures += measure_memory(device)
    if only in (None, "campaign"):
        measures += measure_campaign(target)
        measures += measure_jobs(target)
    if only in (None, "model"):
        measures += [
            measure_model(target, info.rules, num_requests=4, num_blocks=1000, num_steps=400),
            measure_model(target, info.rules, num_requests=256, num_blocks=100_000, num_steps=60),
            measure_building(info.rules),
        ]
    if only in (None, "growth"):
        measures += [growth_measure(measure_growth(target, series)) for series in SERIES]
    return measures


# -------------------------------------------------------------------------------------------------------------- memory


def measure_memory(device: str, num_bytes: int | None = None) -> list[Measure]:
    """Verification of KV memory against a copy of it on the same device."""
    from diff_tests.memory_bench import measure_verification

    figures = measure_verification(device, num_bytes)
    bounds = {"one run": 0.6}
    return [
        Measure(
            f"verification over memory copy on {device}, {name}",
            ratio,
            "times as fast",
            at_least=bounds.get(name),
            detail=f"{figures.verified[name] / 1e9:.3g} GB/s against {figures.copy / 1e9:.3g} GB/s",
        )
        for name, ratio in figures.ratios.items()
    ]


# ------------------------------------------------------------------------------------------------------------ campaign


def measure_campaign(target: Target) -> list[Measure]:
    """Cases per second on one core, and what a campaign costs over its real side.

    A batch is new to the child when its rate is measured. The ratio is of later rounds, in which both sides find the same
    configurations built; they take turns at coming first."""
    _campaign_batch_seconds(target, 0)  # warms both sides up
    first_round: list[float] = []
    campaign: list[float] = []
    real: list[float] = []
    for batch_index in range(1, NUM_BATCHES + 1):
        first_round.append(_campaign_batch_seconds(target, batch_index))
        sides = [(campaign, _campaign_batch_seconds), (real, _real_batch_seconds)]
        for seconds, measured in sides if batch_index % 2 else reversed(sides):
            seconds.append(measured(target, batch_index))
    ratio = median(c / r for c, r in zip(campaign, real, strict=True))
    rate = CASES_PER_BATCH / median(first_round)
    detail = f"real side alone: {CASES_PER_BATCH / median(real):.0f} cases/s"
    return [
        Measure("campaign, default mix", rate, "cases/s on one core", at_least=150),
        Measure("campaign over real side", ratio, "times", at_most=1.6, detail=detail),
    ]


def _campaign_batch_seconds(target: Target, batch_index: int) -> float:
    """Processor time of both processes for a campaign's work on one batch: generate, run, compare, judge, count."""
    started, child_started = time.process_time(), target.cpu_seconds()
    for _ in target.run_cases(Cases(batch_index), 0, CASES_PER_BATCH):
        pass
    return target.cpu_seconds() - child_started + time.process_time() - started


def _real_batch_seconds(target: Target, batch_index: int) -> float:
    """Processor time of the child's part of it."""
    return target.real_seconds(Cases(batch_index), 0, CASES_PER_BATCH)


def measure_jobs(target: Target) -> list[Measure]:
    """How much faster two jobs are than one, by the clock. Nothing on a machine with one core."""
    if num_cores() < 2:
        return []
    ratios = []
    for batch_index in range(NUM_ROUNDS):
        one, two = (_campaign_seconds(target, batch_index, num_jobs) for num_jobs in (1, 2))
        ratios.append(one / two)
    return [Measure("two jobs over one", median(ratios), "times the cases", at_least=1.8)]


def _campaign_seconds(target: Target, batch_index: int, num_jobs: int) -> float:
    """Seconds by the clock from the moment at which all children are there."""
    cases = Cases(batch_index)
    crew = Crew(target, lambda _: cases, Shares(CASES_PER_RACE), num_jobs, None)
    crew.start_children()
    started = time.perf_counter()
    for _ in crew.results():
        pass
    seconds = time.perf_counter() - started
    crew.close()
    return seconds


# --------------------------------------------------------------------------------------------------------------- model


def decoding(num_requests: int, num_blocks: int) -> Scenario:
    """`num_requests` requests that fit together and decode for long, with prompts of 200 tokens each."""
    adds = tuple(Add(id=f"R{i}", prompt=(Span(f"s{i}", 0, 200),), max_tokens=3000) for i in range(num_requests))
    engine = Engine(
        blocks=num_blocks, max_num_seqs=max(16, num_requests), max_num_batched_tokens=max(8192, 200 * num_requests)
    )
    return Scenario(engine=engine, groups=(Full(block=16),), steps=adds)


def measure_model(target: Target, rules: Rules, num_requests: int, num_blocks: int, num_steps: int) -> Measure:
    """How many times faster the model schedules and updates than the real scheduler, decode step for decode step."""
    scenario = decoding(num_requests, num_blocks)
    num_warmup_steps = 4
    ratios, ours, real = [], [], []
    for _ in range(NUM_ROUNDS):
        real.append(median(target.step_times(scenario, num_warmup_steps, num_steps)))
        ours.append(median(model_step_times(scenario, rules, num_warmup_steps, num_steps)))
        ratios.append(real[-1] / ours[-1])
    return Measure(
        f"model over scheduler, {num_requests} running, {num_blocks:,} blocks",
        median(ratios),
        "times faster",
        at_least=3.0,
        detail=f"{median(ours) * 1e6:.0f} against {median(real) * 1e6:.0f} microseconds a step",
    )


def model_step_times(scenario: Scenario, rules: Rules, num_warmup_steps: int, num_steps: int) -> list[float]:
    """Seconds that the model takes for each step after the warm-up, all requests there from the start."""
    model = Scheduler(scenario, rules)
    for step in scenario.steps:
        if isinstance(step, Add):
            model.add(step)
    seconds = []
    # The child measures without the garbage collector too.
    gc.disable()
    try:
        for _ in range(num_warmup_steps + num_steps):
            started = time.perf_counter()
            model.update(model.schedule())
            seconds.append(time.perf_counter() - started)
    finally:
        gc.enable()
    return seconds[num_warmup_steps:]


def measure_building(rules: Rules) -> Measure:
    """Milliseconds to build a model of 100,000 blocks. The real Scheduler takes some 400."""
    scenario = decoding(4, 100_000)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        Scheduler(scenario, rules)
        seconds.append(time.perf_counter() - started)
    return Measure("building a model of 100,000 blocks", median(seconds) * 1e3, "milliseconds", at_most=10.0)


# -------------------------------------------------------------------------------------------------------------- growth


def growth_measure(growth: Growth) -> Measure:
    """The exponent with which the cost of predicting, comparing and judging a case grows: no more than its size does, with
    room for what a busy machine adds."""
    sizes = growth.series.sizes
    detail = (
        f"{growth.judging[0] * 1e3:.3g} to {growth.judging[-1] * 1e3:.3g} milliseconds for {sizes[0]:,} to {sizes[-1]:,}; "
        f"real side: exponent {exponent(sizes, growth.real):.2f}"
    )
    value = exponent(sizes, growth.judging)
    return Measure(f"cost over {growth.series.name}", value, "as exponent", at_most=1.3, detail=detail)


# --------------------------------------------------------------------------------------------------------------- power


def measure_bugs(num_seeds: int = NUM_SEEDS) -> list[Measure]:
    """How soon campaigns see each known bug of 0.29.0's connector, on one core."""
    return [
        Measure(
            f"vLLM {BUGGY_RELEASE}: {figure.name}",
            figure.seconds,
            "seconds of processor time",
            at_most=10.0,
            detail=f"{figure.num_cases:g} cases; median of {num_seeds} seeds, {figure.missed} did not see it",
        )
        for figure in measure_bug_sights(num_seeds)
    ]


# --------------------------------------------------------------------------------------------------------------- probe


def measure_probe(vllm: str) -> Measure:
    """What the probe costs an engine while it verifies nothing."""
    from diff_tests.probe_bench import measure_probe_cost

    cost = measure_probe_cost(vllm)
    ratios = [probed / bare for bare, probed in zip(cost.without, cost.with_probe, strict=True)]
    return Measure(
        "an engine with the probe over one without",
        median(ratios),
        "times the processor time",
        at_most=1.05,
        detail=f"{median(cost.with_probe):.3g} and {median(cost.without):.3g} s; {min(ratios):.3f} to {max(ratios):.3f}",
    )


# ------------------------------------------------------------------------------------------------------------ workload


def measure_workload(trace: Path, num_rounds: int = NUM_ROUNDS) -> Measure:
    """Replaying a trace in the order of its requests, against kvcache-simulator. Raises RaceError."""
    found = race(trace, num_rounds)
    starts = f"commands as a whole {found.ours:.2f} and {found.theirs:.2f} s of processor time"
    return Measure(
        f"workload over {RIVAL}",
        found.ratio,
        "times faster, start-up apart",
        at_least=1.0,
        detail=f"{starts}, {found.our_start:.2f} and {found.their_start:.2f} s of it start-up",
    )


def measure_guided(rules: Rules, num_seeds: int = NUM_SEEDS, num_cases: int = 3000) -> list[Measure]:
    """How much sooner a guided campaign sees what is rare: known issues, in the model's own histories."""
    figures = measure_guidance(rules, num_seeds, num_cases)
    plain, guided = (
        sum(num_seeds - missed for missed in column) for column in zip(*(f.missed for f in figures), strict=True)
    )
    detail = f"a campaign sees {plain / num_seeds:.2f} of {len(figures)} plain, {guided / num_seeds:.2f} guided"
    name = f"known issues seen in {num_cases} cases, guided over plain"
    measures = [Measure(name, guided / plain, "times as many", at_least=1.0, detail=detail)]
    for figure in figures:
        texts = (
            f"{cases:g} ({missed} of {num_seeds} did not see it)"
            for cases, missed in zip(figure.cases, figure.missed, strict=True)
        )
        detail = "{} plain, {} guided".format(*texts)
        ratio = figure.cases[0] / figure.cases[1]
        measures.append(Measure(f"cases until {figure.issue}, plain over guided", ratio, "times", detail=detail))
    return measures


# -------------------------------------------------------------------------------------------------------------- output


def document(measures: Sequence[Measure], info: TargetInfo) -> dict[str, Any]:
    """The JSON document of `bench --json`."""
    return {
        "verdict": "pass" if all(m.kept for m in measures) else "fail",
        "target": {"vllm": info.version},
        "measures": [
            {
                "name": m.name,
                "value": m.value,
                "unit": m.unit,
                "at_least": m.at_least,
                "at_most": m.at_most,
                "kept": m.kept,
                "detail": m.detail,
            }
            for m in measures
        ],
    }


def print_measures(
    console: Console, measures: Sequence[Measure], info: TargetInfo, earlier: Mapping[str, Sequence[float]] | None = None
) -> None:
    """The same as a table, and last the verdict. earlier: values measured before, by name, oldest first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("", "measured", "", "promised", "before" if earlier else "", ""):
        table.add_column(title)
    for m in measures:
        bound = f"at least {m.at_least:g}" if m.at_least is not None else "nothing"
        bound = f"at most {m.at_most:g}" if m.at_most is not None else bound
        before = _before(m, earlier[m.name]) if earlier and m.name in earlier else ""
        table.add_row(m.name, f"{m.value:.3g}", m.unit, bound + ("" if m.kept else "  MISSED"), before, m.detail)
    console.print(table)
    missed = sum(not m.kept for m in measures)
    console.print(f"{'fail' if missed else 'pass'}: {len(measures)} measures, {missed} missed, vLLM {info.version}")


# ------------------------------------------------------------------------------------------------------------- history

_NUM_RECALLED = 5
_NOTABLE = 1.2


class HistoryError(ValueError):
    """A history of figures that cannot be read or written; one sentence with the place."""


class Figures(Struct, kw_only=True, forbid_unknown_fields=True):
    """One run of the benchmark, a line of its history: when (UTC), of what, on how many cores, and the values by name."""

    time: str
    kvoracle: str
    commit: str | None
    vllm: str
    command: str
    cores: int
    measures: dict[str, float]


def earlier_values(path: Path, vllm: str) -> dict[str, list[float]]:
    """By name, what the last runs with this vLLM measured, oldest first. Begins the file where there is none: that it
    cannot be written has to show before anything is measured. Raises HistoryError."""
    values: dict[str, list[float]] = defaultdict(list)
    try:
        with path.open("a+b") as file:
            file.seek(0)
            lines = file.read().splitlines()
    except OSError as error:
        raise HistoryError(f"{path}: cannot be written: {error.strerror}; name another file") from None
    for number, line in enumerate(lines, 1):
        try:
            figures = msgspec.json.decode(line, type=Figures)
        except msgspec.DecodeError as error:
            raise HistoryError(f"{path}: line {number} is no figures of `bench`: {error}; name another file") from None
        if figures.vllm == vllm:
            for name, value in figures.measures.items():
                values[name].append(value)
    return {name: found[-_NUM_RECALLED:] for name, found in values.items()}


def append_figures(path: Path, measures: Sequence[Measure], info: TargetInfo, made_by: Origin) -> None:
    """Adds a line with these measures. Raises HistoryError."""
    figures = Figures(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        kvoracle=made_by.kvoracle,
        commit=made_by.commit,
        vllm=info.version,
        command=made_by.command,
        cores=num_cores(),
        measures={m.name: m.value for m in measures},
    )
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(figures) + b"\n")
    except OSError as error:
        raise HistoryError(f"{path}: cannot be written: {error.strerror}") from None


def _before(measure: Measure, values: Sequence[float]) -> str:
    """The median of earlier values, and whether this one is notably worse."""
    usual = median(values)
    if measure.at_least is not None:
        is_worse = measure.value * _NOTABLE < usual
    else:
        is_worse = measure.at_most is not None and measure.value > usual * _NOTABLE
    return f"{usual:.3g}" + ("  WORSE" if is_worse else "")

"""The `workload` command: settings in, one study for each pool size, outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from diff_tests.workload.replay import Arrivals, parse_arrivals
from diff_tests.workload.report import Origin, Rows, origin, plot, print_summaries, summary
from diff_tests.workload.study import Study, StudyError, cache_of
from diff_tests.workload.trace import Labels, TraceError
from sim.releases import NEWEST, RELEASES, Rules, rules_of
from sim.scenario import Scenario, parse


class WorkloadError(ValueError):
    """Bad input; one sentence that names the place and the remedy."""


@dataclass(frozen=True)
class Settings:
    """The command's options, checked. caches: engine and groups by pool size, its max_model_len not yet settled."""

    path: Path
    labels: Labels
    hash_block_size: int
    arrivals: Arrivals
    limit: int | None
    caches: tuple[Scenario, ...]
    max_model_len: int | None
    out: Path | None
    plot: Path | None
    against: str | None
    vllm: str
    as_release: str | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Settings:
        """Checks the options. Raises WorkloadError or ScenarioError."""
        path: Path = options["trace"]
        if not path.is_file():
            raise WorkloadError(f"{path}: no such trace file")
        if options["as_release"] not in (None, *RELEASES):
            raise WorkloadError(f"no rules for vLLM {options['as_release']}; known: {', '.join(RELEASES)}")
        for option, endings in (("out", (".jsonl", ".csv")), ("plot_file", (".png", ".svg"))):
            if options[option] is not None and options[option].suffix not in endings:
                raise WorkloadError(f"{options[option]}: the file's name must end in {' or '.join(endings)}")
        try:
            arrivals = parse_arrivals(options["arrivals"])
        except ValueError as error:
            raise WorkloadError(str(error)) from None
        return cls(
            path=path,
            labels=_labels(options["labels"]),
            hash_block_size=options["hash_block"],
            arrivals=arrivals,
            limit=options["limit"],
            caches=tuple(_cache(options, num_blocks) for num_blocks in options["blocks"]),
            max_model_len=options["max_model_len"],
            out=options["out"],
            plot=options["plot_file"],
            against=options["against"],
            vllm=options["vllm"],
            as_release=options["as_release"],
        )


def run(settings: Settings, arguments: Sequence[str], console: Console | None) -> tuple[dict[str, Any], bool]:
    """(the JSON document, whether the real scheduler agreed as far as it was asked). Prints tables to the console.
    Raises WorkloadError, OSError, and what starting a target raises."""
    with ExitStack() as stack:
        target = None
        rules = rules_of(settings.as_release or NEWEST)
        if settings.against:
            from diff_tests.vllm_target.target import Target

            target = stack.enter_context(Target(settings.vllm, as_release=settings.as_release))
            rules = target.info.rules
        made = origin(rules.release, arguments)
        rows = stack.enter_context(Rows(settings.out, made)) if settings.out else None
        summaries, differences = [], []
        for cache in settings.caches:
            study = _study(settings, cache, rules)
            try:
                compared, difference = _play(study, target, rows)
            except TraceError as error:
                raise WorkloadError(str(error)) from None
            summaries.append(summary(study) | ({"compared_steps": compared} if target else {}))
            if difference is not None:
                differences.append(f"{cache.engine.blocks} blocks, {difference}")
        if settings.plot:
            _plot(settings, summaries, made)
    if console is not None:
        print_summaries(console, summaries, made)
        for difference in differences:
            console.print(f"different: {difference}", markup=False, highlight=False, soft_wrap=True)
    verdict = "different" if differences else "same" if settings.against else "done"
    document = {"verdict": verdict, **asdict(made), "caches": summaries, "differences": differences}
    return document, not differences


def _study(settings: Settings, cache: Scenario, rules: Rules) -> Study:
    try:
        scenario = cache_of(cache.engine, cache.groups, settings.arrivals.clock, rules, settings.max_model_len)
    except StudyError as error:
        raise WorkloadError(str(error)) from None
    return Study(
        settings.path,
        settings.labels,
        settings.hash_block_size,
        settings.arrivals,
        settings.limit,
        scenario,
        rules,
        with_digests=settings.against is not None,
    )


def _play(study: Study, target: Any, rows: Rows | None) -> tuple[int, str | None]:
    """(steps found equal, the first difference). Plays the study, beside the real scheduler if there is a target."""
    is_step = study.arrivals.clock != "order"
    num_blocks = study.scenario.engine.blocks
    if target is not None:
        from diff_tests.workload.against import Difference, compared

        num_equal = 0
        try:
            for event in compared(study, target):
                num_equal = event.number
                if rows is not None:
                    rows.add(num_blocks, event, is_step)
        except Difference as difference:
            return num_equal, str(difference)
        return num_equal, None
    for event in study.events():
        if rows is not None:
            rows.add(num_blocks, event, is_step)
    return 0, None


def _plot(settings: Settings, summaries: Sequence[dict[str, Any]], made: Origin) -> None:
    assert settings.plot is not None
    try:
        plot(settings.plot, summaries, made, f"{settings.path.name}, arrivals {settings.arrivals}")
    except ImportError:
        raise WorkloadError("--plot needs matplotlib; install kvoracle[plot]") from None


def _labels(given: Sequence[str]) -> Labels:
    names: dict[str, str] = {}
    for label in given:
        field, _, name = label.partition("=")
        if field not in Labels._fields or not name:
            raise WorkloadError(f"--label {label}: give FIELD=NAME with FIELD one of {', '.join(Labels._fields)}")
        names[field] = name
    return Labels(**names)


def _cache(options: Mapping[str, Any], num_blocks: int) -> Scenario:
    """Engine and groups. Raises ScenarioError with the path of what is wrong, WorkloadError for what is no YAML."""
    try:
        groups = yaml.safe_load(options["groups"])
    except yaml.YAMLError as error:
        raise WorkloadError(f"--groups: {' '.join(str(error).split())}") from None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise WorkloadError("--groups: give a list of groups, such as [{kind: full}, {kind: sliding_window, window: 1024}]")
    engine = {
        "blocks": num_blocks,
        "max_num_seqs": options["max_num_seqs"],
        "max_num_batched_tokens": options["max_num_batched_tokens"],
    }
    with_blocks = [{"block": options["block"], **group} for group in groups]
    return parse({"kvoracle": 1, "engine": engine, "groups": with_blocks, "steps": []})

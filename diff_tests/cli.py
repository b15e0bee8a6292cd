"""The command line. Heavy imports wait until a command needs them: `simulate` runs without torch and without vLLM."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import click
import msgspec
from click.shell_completion import CompletionItem

from sim.releases import NEWEST, RELEASES, Rules
from sim.scenario import Scenario, ScenarioError

if TYPE_CHECKING:
    from rich.console import Console

    from diff_tests.campaign import Plan, Summary
    from diff_tests.explain.source import Case
    from diff_tests.vllm_target.target import Target, TargetInfo

OK, FINDINGS, BAD_INPUT, NO_TARGET, INTERRUPTED = 0, 1, 2, 3, 130
F = TypeVar("F", bound=Callable[..., Any])


class InputError(click.ClickException):
    """Something the user gave cannot be used. One sentence that names the place and what to do."""

    exit_code = BAD_INPUT


class StartError(click.ClickException):
    """The target could not be started."""

    exit_code = NO_TARGET


class _Command(click.Command):
    """A command whose help keeps the layout of its examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.epilog:
            formatter.write_paragraph()
            formatter.write("Examples:\n")
            formatter.write("".join(f"  {line.strip()}\n" for line in self.epilog.strip().splitlines()))


class _Group(click.Group):
    command_class = _Command


def main(args: list[str] | None = None) -> NoReturn:
    """Entry point: runs a command and leaves with its exit code."""
    sys.exit(run_cli(args))


def run_cli(args: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 as expected, 1 findings, 2 bad input, 3 no target, 130 interrupted."""
    try:
        return cli.main(args, prog_name="kvoracle", standalone_mode=False) or OK
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; nothing more can be said, also not at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _show_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        from diff_tests.versions import version_text

        click.echo(version_text())
        context.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show versions and end.",
)
def cli() -> None:
    """Predicts which physical KV cache blocks vLLM gives to every request, runs the real vLLM beside the prediction,
    and names the first place where they part.

    Exit codes: 0 as expected (nothing found, known issues only, or a refusal that the release's rules foresee);
    1 findings; 2 bad input; 3 the target could not be started; 130 interrupted with nothing found.
    """


# ------------------------------------------------------------------------------------------------------------- options


def _complete_target(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Names of targets for a shell, and folders for those that are paths."""
    names = [CompletionItem(name) for name in ("current", *RELEASES) if name.startswith(begun)]
    return names or [CompletionItem(begun, type="dir")]


def _vllm_option(function: F) -> F:
    return click.option(
        "--vllm",
        metavar="TARGET",
        shell_complete=_complete_target,
        default="current",
        show_default=True,
        help="Which vLLM runs: 'current' (installed here), a release such as 0.30.0 (fetched once into the cache), or "
        "a path to a source checkout or site-packages folder.",
    )(function)


def _connector_option(function: F) -> F:
    return click.option(
        "--connector",
        metavar="NAME",
        help="Connector instead of the scenario's: a registered name, module:Class, or a .py file that replaces the "
        "installed one.",
    )(function)


def _as_option(function: F) -> F:
    return click.option(
        "--as",
        "as_release",
        metavar="RELEASE",
        help=f"Judge by the rules of this release instead of the target's own. Known: {', '.join(RELEASES)}.",
    )(function)


def _add_contract(context: click.Context, parameter: click.Parameter, paths: tuple[str, ...]) -> None:
    from oracle import contracts

    sys.path.append(os.getcwd())  # as for connectors: last, so that nothing there shadows a package
    for path in paths:
        try:
            contracts.add(path)
        except ValueError as error:
            raise InputError(f"--contract {error}") from None


def _contract_option(function: F) -> F:
    return click.option(
        "--contract",
        metavar="MODULE:CLASS",
        multiple=True,
        expose_value=False,
        callback=_add_contract,
        help="Contract of a connector from outside, for the connector class that its `name` says; see the README.",
    )(function)


def _json_option(function: F) -> F:
    return click.option(
        "--json", "as_json", is_flag=True, help="One JSON document on standard output, nothing else there."
    )(function)


def _kinds(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """The kinds of groups in a list with commas."""
    from diff_tests.behaviours import KINDS

    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise InputError(f"--kinds: no kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    return names


# ------------------------------------------------------------------------------------------------------------ commands


@cli.command(epilog="kvoracle simulate case.yaml\nkvoracle simulate case.yaml --as 0.29.0 --json | jq .steps[0].tables")
@click.argument("scenario", type=click.Path(path_type=Path))
@_as_option
@_json_option
def simulate(scenario: Path, as_release: str | None, as_json: bool) -> int:
    """Predict block IDs with the model alone.

    Prints, per engine step, the scheduled tokens, local hits, external tokens and every live request's block table per
    group (0 is the null block). Needs neither torch nor vLLM.
    """
    from diff_tests.simulation import predicted_document, print_prediction

    value = _load(scenario)
    document = _use(scenario, lambda: predicted_document(value, _rules(as_release)))
    if as_json:
        _print_json(document)
    else:
        print_prediction(_output(), document)
    return OK


@cli.command(epilog="kvoracle run case.yaml\nkvoracle run case.yaml --vllm 0.29.0 --json")
@click.argument("scenario", type=click.Path(path_type=Path))
@_vllm_option
@_connector_option
@_contract_option
@_as_option
@_json_option
def run(scenario: Path, vllm: str, connector: str | None, as_release: str | None, as_json: bool) -> int:
    """Run one scenario on both sides, compare and judge.

    The model predicts, the real vLLM runs, the laws judge. SCENARIO is a scenario file (YAML or JSON), a corpus case, or
    a failure saved by `fuzz`. Each finding names step, request, group, position and block, and why that block is wrong.
    """
    from diff_tests.report import outcome_document, print_outcome
    from diff_tests.run import run_on

    value = _load(scenario)
    with _Started(vllm, connector, as_release) as (target, info):
        outcome = _use(scenario, lambda: run_on(target, value))
    if as_json:
        _print_json(outcome_document(outcome, info))
    else:
        print_outcome(_output(), outcome, info)
    return FINDINGS if outcome.verdict == "different" else OK


@cli.command(
    epilog="kvoracle fuzz --minutes 1\nkvoracle fuzz --vllm 0.29.0 --cases 20000 --seed 1 --out my-run\n"
    "kvoracle fuzz --vllm all --cases 500000\nkvoracle fuzz --exhaustive --kinds full,sliding_window"
)
@click.option(
    "--vllm",
    metavar="TARGET",
    default="current",
    show_default=True,
    help="As for `run`; or 'all': the installed vLLM and every release in the cache, one after the other, each with its "
    "share of the cases or minutes and a folder of its own in the run folder.",
)
@_connector_option
@_as_option
@click.option("--minutes", metavar="M", type=click.FloatRange(min=0, min_open=True), help="Stop after M minutes of cases.")
@click.option(
    "--cases", metavar="N", type=click.IntRange(min=1), help="Stop after N cases. Default without --minutes: one minute."
)
@click.option(
    "--seed", metavar="S", type=click.IntRange(min=0), help="The same seed gives the same cases. Default: by the clock."
)
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Run folder. Default: kvoracle-runs/DATE-TIME-fuzz-RELEASE.",
)
@click.option(
    "--jobs", "-j", metavar="N", type=click.IntRange(min=1), help="Child processes. Default: one for each core we may use."
)
@click.option(
    "--ray",
    metavar="[ADDRESS]",
    is_flag=False,
    flag_value="",
    help="Run the cases on a Ray cluster: at an address, or 'auto' for this machine's; without one, on one started here.",
)
@click.option(
    "--resume",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Go on with the campaign of this run folder: its target, seed and findings; --minutes or --cases set a new bound.",
)
@click.option(
    "--guided",
    is_flag=True,
    help="Keep cases that show something new, and make half of the later ones by changing those. Finds rare faults sooner.",
)
@click.option("--coverage", is_flag=True, help="Print all that was exercised, by behaviour and by kinds of groups.")
@click.option(
    "--exhaustive",
    is_flag=True,
    help="Instead of generated cases, all of a small scope: up to three requests around block boundaries in the smallest "
    "pools, for each kind of group and each pair. --minutes and --cases take a part of it, spread evenly.",
)
@click.option(
    "--kinds",
    metavar="KIND,...",
    callback=_kinds,
    help="With --exhaustive: only these kinds, alone and in pairs.",
)
@_json_option
def fuzz(
    vllm: str,
    connector: str | None,
    as_release: str | None,
    minutes: float | None,
    cases: int | None,
    seed: int | None,
    out: Path | None,
    jobs: int | None,
    ray: str | None,
    resume: Path | None,
    guided: bool,
    coverage: bool,
    exhaustive: bool,
    kinds: tuple[str, ...] | None,
    as_json: bool,
) -> int:
    """Run generated scenarios through both sides until time is up.

    Every failure is saved in the run folder with its scenario and both histories. Failures equal in kind, law, cause and
    group kind are one fault; the first case of each is reduced to a small scenario. Ends with the faults, the command
    that repeats each, what was exercised and what was not. Ctrl-C and SIGTERM keep what was found, and --resume goes on;
    campaigns with different seeds may share a run folder.
    """
    from diff_tests.campaign import Plan, num_cores, prepare_folder
    from diff_tests.report import print_summary

    folder = resume or out or Path("kvoracle-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-fuzz-{_folder_name(vllm)}"
    try:
        prepare_folder(folder)
    except OSError as error:
        raise InputError(f"--out {folder}: cannot be written: {error.strerror}; name another folder") from None
    if kinds is not None and not exhaustive:
        raise InputError("--kinds: only with --exhaustive; generated cases mix all kinds")
    if guided and exhaustive:
        raise InputError("--guided: only for generated cases; the scope of --exhaustive is fixed")
    if resume is not None:
        plans = [_resumed(resume, seed, cases, minutes, jobs)]
    else:
        targets, not_run = _targets(vllm)
        if not targets:
            raise InputError("--vllm all: no vLLM is here; fetch one with kvoracle vllm add RELEASE")
        if not_run:
            click.echo(f"not cached, so not run: {', '.join(not_run)} (kvoracle vllm add RELEASE)", err=True)
        seconds = minutes * 60 if minutes is not None else (60.0 if cases is None and not exhaustive else None)
        plan = Plan(
            seed=int(time.time()) if seed is None else seed,
            folder=folder,
            vllm=vllm,
            connector=connector,
            as_release=as_release,
            cases=None
            if cases is None
            else max(1, cases // len(targets)),  # rounded down: no target has more than its share
            seconds=None if seconds is None else seconds / len(targets),
            jobs=jobs or num_cores(),
            guided=guided,
        )
        plans = [plan] if vllm != "all" else [replace(plan, vllm=t, folder=folder / _folder_name(t)) for t in targets]
    summaries: list[Summary] = []
    for plan in plans:
        plan.folder.mkdir(exist_ok=True)
        summaries.append(_fuzz(replace(plan, ray=ray), exhaustive, kinds))
        if not as_json:
            print_summary(_output(), summaries[-1], coverage)
        if summaries[-1].interrupted:
            break
    found = any(summary.faults for summary in summaries)
    if as_json:
        documents = [summary.document() for summary in summaries]
        together = {"verdict": "fail" if found else "pass", "campaigns": documents}
        _print_json(together if vllm == "all" else documents[0])
    if found:
        return FINDINGS
    return INTERRUPTED if summaries[-1].interrupted else OK


def _fuzz(plan: Plan, exhaustive: bool, kinds: tuple[str, ...] | None) -> Summary:
    """Runs one campaign, with a progress bar."""
    from diff_tests.campaign import Campaign
    from diff_tests.cluster import ClusterError

    with _Started(plan.vllm, plan.connector, plan.as_release) as (target, info), _sigterm_interrupts():
        if exhaustive:
            plan = _exhaustive(plan, info.rules, kinds)
        try:
            with _CampaignProgress(plan.cases, plan.seconds) as progress:
                return _target_errors(lambda: Campaign(plan, target, info).run(progress))  # type: ignore[no-any-return]
        except ClusterError as error:
            raise InputError(str(error)) from None
        except StartError as error:
            raise StartError(f"{error.message}; what was found until then is in {plan.folder}") from None


def _resumed(folder: Path, seed: int | None, cases: int | None, minutes: float | None, jobs: int | None) -> Plan:
    """The plan that goes on in a run folder. Without a new bound: to the number of cases set before, else one minute."""
    from diff_tests.campaign import Plan, num_cores
    from diff_tests.progress import StateError, load_state

    try:
        state = load_state(folder, seed)
    except StateError as error:
        raise InputError(f"--resume {error}") from None
    cases = cases or state.cases
    seconds = minutes * 60 if minutes is not None else (60.0 if cases is None else None)
    return Plan(
        seed=state.seed,
        folder=folder,
        vllm=state.vllm,
        connector=state.connector,
        as_release=state.as_release,
        cases=cases,
        seconds=seconds,
        features=state.features,
        kinds=state.kinds,
        jobs=jobs or num_cores(),
        resume=True,
        guided=state.guidance is not None,
    )


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """SIGTERM ends a campaign as Ctrl-C does, with a summary."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exhaustive(plan: Plan, rules: Rules, kinds: tuple[str, ...] | None) -> Plan:
    """The plan with the scope of a release, whose size is said beforehand."""
    from diff_tests.behaviours import KINDS
    from diff_tests.exhaustive import Scope

    scope = Scope(rules, kinds or KINDS)
    if not len(scope):
        raise InputError(f"--kinds: vLLM {rules.release} does not accept {', '.join(kinds or ())}; choose other kinds")
    click.echo(f"scope: {len(scope):,} cases over {len(scope.kind_sets)} kinds and pairs of kinds", err=True)
    return replace(plan, kinds=tuple(kinds or KINDS), cases=min(plan.cases or len(scope), len(scope)))


@cli.command(
    epilog="kvoracle explain case.yaml\nkvoracle explain kvoracle-runs/my-run --html story.html\n"
    "kvoracle explain case.yaml --actual 'B:0=[1, 2, 104]'\nkvoracle explain case.yaml --model-only --request B\n"
    "kvoracle explain case.yaml --vllm 0.29.0 --pytest test_case.py"
)
@click.argument("path", metavar="SCENARIO|FAILURE|TRACE", type=click.Path(path_type=Path))
@click.option(
    "--vllm",
    metavar="TARGET",
    help="As for `run`. Default: the installed vLLM; for a failure, what was saved of it, else the vLLM it failed on.",
)
@_connector_option
@_as_option
@click.option("--model-only", is_flag=True, help="Explain what the model predicts; run no vLLM.")
@click.option(
    "--history",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Explain this recorded history (JSON lines) of SCENARIO instead of running it.",
)
@click.option("--request", metavar="ID", help="Look at this request instead of the one that the finding names.")
@click.option("--step", metavar="N", type=click.IntRange(min=1), help="Look at this engine step.")
@click.option(
    "--actual",
    metavar="REQ:GROUP=[IDS]",
    multiple=True,
    help="Block IDs pasted from a log, for a request and a group: each is right, shifted, the null block, or whose it is.",
)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write one page with the pool over time; no network.",
)
@click.option(
    "--pytest",
    "test_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Also write a test of it in which nothing is ours: it fails on a vLLM with the fault, and passes without.",
)
@_json_option
def explain(
    path: Path,
    vllm: str | None,
    connector: str | None,
    as_release: str | None,
    model_only: bool,
    history: Path | None,
    request: str | None,
    step: int | None,
    actual: tuple[str, ...],
    html: Path | None,
    test_file: Path | None,
    as_json: bool,
) -> int:
    """Say what went wrong, and why, in one screen.

    Takes a scenario; a failure or a run folder of `fuzz`; or what the probe recorded of a live server.

    The headline names request, group, position and block. Then, position by position, each block of the table: what it
    holds, where it came from (fresh, evicted from whom, shared with whom, a copy, null), and whether it was expected,
    selected, received and written; the steps around it; why the lookup in the prefix cache ended where it did; and the
    law or rule that decides. Exit code 1 on new findings, or if a pasted list is not the right one.
    """
    from diff_tests.explain.actual import check_pasted, parse_pasted
    from diff_tests.explain.document import document
    from diff_tests.explain.explanation import explain as explain_outcome
    from diff_tests.explain.standalone import module_of
    from diff_tests.explain.text import print_checked, print_explanation

    case = _case_to_explain(path, vllm, connector, as_release, model_only, history)
    try:
        explanation = explain_outcome(case.outcome, case.rules, case.title, request, step)
        checked = [check_pasted(explanation.story, parse_pasted(text), step) for text in actual]
        test = module_of(case.outcome, explanation, case.rules) if test_file is not None else ""
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    if html is not None:
        from diff_tests.explain.page import render

        _write(html, render(explanation, checked))
    if test_file is not None:
        _write(test_file, test)
    if as_json:
        _print_json(document(explanation, checked))
    else:
        for one in checked:
            print_checked(_output(), one)
        if not checked:
            print_explanation(_output(), explanation)
    if checked:
        return OK if all(one.is_right for one in checked) else FINDINGS
    return FINDINGS if case.outcome.verdict == "different" else OK


def _trace_to_explain(path: Path) -> Case:
    from diff_tests.explain.source import trace_case
    from diff_tests.live.check import check_trace
    from diff_tests.live.trace import read_trace

    trace = _trace_errors(lambda: read_trace([path]))
    checked = _trace_errors(lambda: check_trace(trace))
    return trace_case(checked, f"Trace {path.name}, vLLM {trace.start.vllm}; {trace.start.connector.name}")


def _case_to_explain(
    path: Path, vllm: str | None, connector: str | None, as_release: str | None, model_only: bool, history: Path | None
) -> Case:
    """What the options of `explain` ask for: a prediction, a recorded history, a saved one, or a run."""
    from diff_tests.explain.source import failure_in, history_case, is_trace, predicted_case, recorded_case, saved_case
    from diff_tests.failures import load_failure
    from diff_tests.loading import is_failure

    if _reading(path, is_trace):
        return _trace_to_explain(path)
    path = _reading(path, failure_in)
    value = _load(path)
    if model_only:
        return _use(path, lambda: predicted_case(value, _rules(as_release)))  # type: ignore[no-any-return]
    if history is not None:
        _rules(as_release)
        return _reading(history, lambda file: history_case(value, file, as_release))  # type: ignore[no-any-return]
    if is_failure(path):
        failure = load_failure(path)
        case = saved_case(failure, path) if (vllm, connector, as_release) == (None, None, None) else None
        if case is not None:
            return case
        vllm, connector = vllm or failure.vllm, connector or failure.connector
    with _Started(vllm or "current", connector, as_release) as (target, info):
        observed = _use(path, lambda: target.run(value))
        return recorded_case(target.effective(value), observed, info.rules, f"vLLM {info.version}")


@cli.command(
    name="reduce",
    epilog="kvoracle reduce big.yaml --vllm 0.29.0 -o small.yaml\n"
    "kvoracle reduce big.yaml --connector my_connector.py --seconds 10",
)
@click.argument("scenario", type=click.Path(path_type=Path))
@_vllm_option
@_connector_option
@_as_option
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="File for the result. Default: standard output.",
)
@click.option(
    "--seconds",
    metavar="T",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Stop after T seconds with the smallest found until then.",
)
@_json_option
def reduce_command(
    scenario: Path,
    vllm: str,
    connector: str | None,
    as_release: str | None,
    output: Path | None,
    seconds: float,
    as_json: bool,
) -> int:
    """Find the smallest scenario that fails the same way.

    The result shows a finding with the same kind, law, cause and group kind as the first finding of SCENARIO, and the
    same known issue, or none. Exit code 1, as the result still fails; 0 if SCENARIO does not fail, then there is nothing
    to reduce.
    """
    from diff_tests.reduce import reduce
    from diff_tests.report import headline
    from diff_tests.run import run_on
    from sim.scenario import dump, plain

    value = _load(scenario)
    with _Started(vllm, connector, as_release) as (target, _):
        first = _use(scenario, lambda: run_on(target, value))
        if not first.findings:
            click.echo(f"{scenario}: nothing found, nothing to reduce", err=True)
            return OK
        fault, issue = first.findings[0].finding.fault, first.findings[0].issue
        found = reduce(
            value,
            lambda candidate: any((j.finding.fault, j.issue) == (fault, issue) for j in run_on(target, candidate).findings),
            max_seconds=seconds,
        )
    text = dump(found.scenario)
    if output is not None:
        _write(output, text)
    if as_json:
        finding = msgspec.to_builtins(first.findings[0].finding)
        _print_json({"scenario": plain(found.scenario), "finding": finding, "tries": found.tries})
    elif output is None:
        click.echo(text, nl=False)
    end = "" if found.complete else ", stopped by the time limit"
    click.echo(f"{headline(first.findings[0].finding)}; {found.tries} tries{end}", err=True)
    return FINDINGS


@cli.command(
    epilog="kvoracle keep kvoracle-runs/20260101-120000-fuzz-0.29.0\n"
    "kvoracle keep kvoracle-runs/gate/failures/case-mine-selection-law4-starts_early-full.json --vllm all"
)
@click.argument("failures", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--corpus", metavar="DIR", type=click.Path(path_type=Path), help="Folder of the corpus. Default: diff_tests/corpus."
)
@click.option("--why", metavar="TEXT", help="Why the case is kept, in a sentence. Default: the finding's own.")
@click.option(
    "--vllm",
    metavar="TARGET",
    help="Run what is kept on this release and record the verdict; 'all': the installed vLLM and every release in the "
    "cache. Default: only the verdict that the failure brings.",
)
def keep(failures: tuple[Path, ...], corpus: Path | None, why: str | None, vllm: str | None) -> int:
    """Turn failures saved by `fuzz` or `gate` into corpus cases.

    FAILURES are files, or run folders with everything in them. The reduced scenario is kept if there is one. Failures of
    one cause make one case; one that the corpus has already is not doubled.
    """
    from diff_tests.corpus import CORPUS, find_failures, record_verdicts
    from diff_tests.corpus import keep as keep_failure

    saved = [failure for path in failures for failure in _reading(path, find_failures)]
    kept = {}
    try:
        for failure in saved:
            case, is_new = keep_failure(failure, corpus or CORPUS, why)
            if case.path not in kept:
                click.echo(f"{'kept as' if is_new else 'already covered by'} {case.path}")
            kept[case.path] = case
        for name in _targets(vllm)[0] if vllm is not None else ():
            with _Started(name) as (target, info):
                _target_errors(partial(record_verdicts, list(kept.values()), target, info))
    except OSError as error:
        raise InputError(f"{error.filename or corpus}: cannot be written: {error.strerror}") from None
    return OK


@cli.command(epilog="kvoracle replay\nkvoracle replay --vllm all\nkvoracle replay kvoracle-runs/my-run --vllm 0.29.0")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--vllm",
    metavar="TARGET",
    default="current",
    show_default=True,
    help="As for `run`; or 'all': the installed vLLM and every release in the cache.",
)
@_connector_option
@_json_option
def replay(paths: tuple[Path, ...], vllm: str, connector: str | None, as_json: bool) -> int:
    """Run corpus cases and saved failures again.

    PATH names cases or folders of them; without any, the whole corpus. Says for each case and release: OK (nothing
    found, as expected), KNOWN (fails as recorded), FIXED (recorded as failing, does not) or FAILED.
    """
    from diff_tests.corpus import CORPUS, find_cases, replay_on
    from diff_tests.report import print_replay, replay_document

    cases = [case for path in paths or (CORPUS,) for case in _reading(path, lambda p: find_cases([p]))]
    targets, not_run = _targets(vllm)
    replayed = []
    for name in targets:
        with _Started(name, connector) as (target, info):
            replayed += list(replay_on(cases, target, info))
    if as_json:
        _print_json(replay_document(replayed, not_run))
    else:
        print_replay(_output(), replayed, not_run)
    return FINDINGS if any(r.bad for r in replayed) else OK


@cli.command(
    epilog='kvoracle record -- my-model --kv-transfer-config \'{"kv_connector": "DecodeBenchConnector", "kv_role": '
    '"kv_both"}\'\nkvoracle record --start --connector DecodeBenchConnector -- my-model --port 8000\n'
    "kvoracle record --print-probe > kvprobe.py"
)
@click.argument("arguments", nargs=-1)
@click.option("--print-probe", is_flag=True, help="Print the probe, one file that needs nothing but vLLM, and end.")
@click.option("--start", is_flag=True, help="Start the server instead of printing its command line.")
@click.option(
    "--dir",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of probe and trace. Default: kvoracle-runs/DATE-TIME-record.",
)
@click.option("--connector", metavar="NAME", help="KV connector of a server whose arguments name none.")
@click.option(
    "--verify",
    type=click.Choice(["off", "sample", "all"]),
    default="off",
    show_default=True,
    help="Read KV memory before and after each load; nothing is ever written.",
)
@click.option("--tokens", is_flag=True, help="Record token IDs. Without it: salted digests, which keep equality.")
@click.option("--rename", is_flag=True, help="Record salted digests instead of request IDs.")
@click.option("--max-mb", metavar="M", type=click.FloatRange(min=1), help="Size of one process's files. Default: 1024.")
def record(
    arguments: tuple[str, ...],
    print_probe: bool,
    start: bool,
    folder: Path | None,
    connector: str | None,
    verify: str,
    tokens: bool,
    rename: bool,
    max_mb: float | None,
) -> int:
    """Put the probe into a server: print its exact command line, or start it.

    ARGUMENTS are those of `vllm serve`, or a whole command that starts a server. The probe watches the KV connector, and
    each child of a MultiConnector; no line of vLLM is edited. Give what it wrote to `kvoracle check`.
    """
    from diff_tests.live.record import RecordError, prepare, probe_text

    if print_probe:
        click.echo(probe_text(), nl=False)
        return OK
    folder = folder or Path("kvoracle-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-record"
    settings = {"verify": verify, "tokens": tokens, "rename": rename, "max_mb": max_mb}
    try:
        recording = prepare(
            arguments, folder, {k: v for k, v in settings.items() if v not in (False, None, "off")}, connector
        )
    except RecordError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"--dir {folder}: cannot be written: {error.strerror}; name another folder") from None
    click.echo(f"trace in {recording.folder}; judge it with: kvoracle check {recording.folder}", err=True)
    if not start:
        click.echo(recording.shell())
        return OK
    try:
        os.execvpe(recording.command[0], recording.command, {**os.environ, **recording.environment})
    except OSError as error:
        raise StartError(f"{recording.command[0]}: {error.strerror}") from None


@cli.command(epilog="kvoracle check trace/\nkvoracle check trace/ --follow\nkvoracle check trace/ --scenario case.yaml")
@click.argument("paths", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--follow", is_flag=True, help="Go on while the server runs; findings are shown as they come. Ends with Ctrl-C."
)
@click.option(
    "--idle", metavar="T", type=click.FloatRange(min=0), help="With --follow: end after T seconds with nothing new."
)
@click.option(
    "--scenario",
    "output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write the run, or the part around the first finding, as a scenario for `run`, `reduce` and `explain`.",
)
@_json_option
def check(paths: tuple[Path, ...], follow: bool, idle: float | None, output: Path | None, as_json: bool) -> int:
    """Judge what the probe recorded of a live server.

    TRACE: the folder, or the files of all processes of one engine. The model follows the recorded decisions and predicts
    tables and hits; the laws look at what was selected, received and written. A trace that was cut off is judged as far
    as it goes. Of a vLLM that we have no rules for, only the laws judge.
    """
    from diff_tests.live.check import check_document, print_checked
    from diff_tests.live.export import export
    from diff_tests.live.watch import watch
    from sim.scenario import dump

    trace, checked, num_shown = _trace_errors(lambda: watch(paths, follow, idle, None if as_json else _output()))
    if output is not None:
        first = checked.findings[0].finding if checked.findings else None
        _write(output, dump(export(checked.rebuilt, first)))
    if as_json:
        _print_json(check_document(trace, checked))
    else:
        print_checked(_output(), trace, checked, num_shown)
    return FINDINGS if checked.verdict == "different" else OK


@cli.command(
    epilog="kvoracle gate --connector my_connector.py\nkvoracle gate --base 0.32.0 --head ../vllm --junit gate.xml --github"
)
@click.option(
    "--head",
    metavar="TARGET",
    shell_complete=_complete_target,
    default="current",
    show_default=True,
    help="The vLLM under test, as --vllm of `run`: 'current', a release, or a path.",
)
@click.option(
    "--base",
    metavar="TARGET",
    shell_complete=_complete_target,
    help="What head is held against. Default: the same as --head.",
)
@click.option(
    "--connector",
    "connectors",
    metavar="FILE|DIR",
    multiple=True,
    help="A candidate on head: a .py file that replaces the installed connector, or a folder of them. May be given more "
    "than once; each gets its own verdict. Base keeps its own connector.",
)
@_contract_option
@click.option(
    "--as",
    "as_release",
    metavar="RELEASE",
    help=f"Rules for a target that is no release, such as a checkout. Default: {NEWEST}, the newest.",
)
@click.option(
    "--cases",
    metavar="N",
    type=click.IntRange(min=0),
    help="Seeded cases after the corpus. Default: a number fixed in this release, for less than three minutes.",
)
@click.option(
    "--seed", metavar="S", type=click.IntRange(min=0), help="Of the seeded cases. Default: fixed in this release."
)
@click.option(
    "--minutes",
    metavar="M",
    type=click.FloatRange(min=0, min_open=True),
    help="Add cases until M minutes are over; the last line says how to repeat them.",
)
@click.option("--strict", is_flag=True, help="Changes of behaviour that break no law fail too.")
@click.option("--keep-going", is_flag=True, help="Run all cases of a candidate connector that has failed already.")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(path_type=Path),
    default=Path("kvoracle-runs/gate"),
    show_default=True,
    help="Folder for the scenarios of new failures.",
)
@click.option("--junit", metavar="FILE", type=click.Path(path_type=Path), help="Also write JUnit XML (needs junitparser).")
@click.option("--github", is_flag=True, help="Also print annotations for GitHub Actions, on standard error with --json.")
@_json_option
def gate(
    junit: Path | None, github: bool, as_json: bool, strict: bool, out: Path, minutes: float | None, **options: Any
) -> int:
    """Say what changed from a base to a head, before it is merged.

    Runs the corpus, then seeded cases, on both. Each finding is a new failure, fixed, known (a known issue that base has
    too), or the same on both sides; behaviour that changed and breaks no law is listed apart and passes. The same gate
    gives the same verdict again. A candidate connector that has failed is let go at once; the first new failures are
    reduced to small scenarios.

    Exit codes: 0 no new failure; 1 new failures, with --strict also changes; 2 bad input, or a connector file that cannot
    be run while no other one failed; 3 head or base could not be started.
    """
    from diff_tests.campaign import prepare_folder
    from diff_tests.gate.formats import github_lines, write_junit
    from diff_tests.gate.report import document, exit_code, print_result
    from diff_tests.gate.running import Gate, Plan

    _rules(options["as_release"])
    try:
        prepare_folder(out)
        plan = Plan(out, seconds=minutes and minutes * 60, **{name: v for name, v in options.items() if v is not None})
        with _GateProgress() as progress:
            result = _target_errors(lambda: Gate(plan).run(progress))
        if junit is not None:
            write_junit(result, junit)
    except OSError as error:
        raise InputError(f"{error.filename or out}: cannot be written: {error.strerror}; name another place") from None
    except ModuleNotFoundError as error:
        raise InputError(f"--junit: {error.name} is not installed; pip install {error.name}") from None
    for line in github_lines(result) if github else ():
        click.echo(line, err=as_json)
    if as_json:
        _print_json(document(result, strict))
    else:
        print_result(_output(), result, strict)
    return exit_code(result, strict)


@cli.command(epilog="kvoracle e2e\nkvoracle e2e --model all --json\nkvoracle e2e --vllm 0.29.0 --model qwen3 --http")
@click.option(
    "--model",
    "models",
    metavar="NAME",
    multiple=True,
    help="A model of the list below, or 'all'; may be given again. Default: qwen3 and granite.",
)
@_vllm_option
@click.option("--http", is_flag=True, help="Over vLLM's OpenAI-compatible server on 127.0.0.1 instead of in process.")
@_connector_option
@_json_option
def e2e(models: tuple[str, ...], vllm: str, http: bool, connector: str | None, as_json: bool) -> int:
    """Run the request matrix in a real engine with a tiny model.

    For each model an engine with made-up weights starts and is sent, one after another: prompts of 1,621 tokens that share
    1,616, a seed prompt, its prefix, an exact replay, growing and shrinking shared prefixes, a long producer overlapped by
    a shorter consumer, 16 requests at a time, and 16 that outgrow the pool. The probe connector records the run, all KV
    memory is painted before each load, and the run is followed by the model and judged by the laws. Prints a row for each
    admission and group: external tokens, their positions in the block table, and the blocks selected, received and written.

    Models: qwen3, cohere2, llama4, granite, nemotron_h, qwen3_next, deepseek_v2; and of ours, which compute nothing: rings,
    kernel_blocks, dcp.
    """
    from diff_tests.e2e.models import chosen_models
    from diff_tests.e2e.report import document, print_run, print_verdict, verdict
    from diff_tests.e2e.runs import ENGINE_TIMEOUT_S, ModelRun, probed_connector, run_model

    try:
        chosen = chosen_models(models)
    except ValueError as error:
        raise InputError(str(error)) from None
    name = _target_errors(partial(probed_connector, connector))
    runs: list[ModelRun] = []
    interrupted = False
    with _Started(vllm, connector, timeout_s=ENGINE_TIMEOUT_S, for_engines=True) as (target, info):
        try:
            for model in chosen:
                runs.append(_target_errors(partial(run_model, target, model, name, http)))
                if not as_json:
                    print_run(_output(), runs[-1])
        except KeyboardInterrupt:
            interrupted = True
    if as_json:
        _print_json(document(runs, info, name))
    else:
        print_verdict(_output(), runs, info, name)
    if runs and verdict(runs) == "fail":
        return FINDINGS
    return INTERRUPTED if interrupted else OK


@cli.command(
    epilog="kvoracle bench\nkvoracle bench --only memory --device cuda\nkvoracle bench --only workload --trace t.jsonl\n"
    "kvoracle bench --history figures.jsonl"
)
@_vllm_option
@click.option(
    "--only",
    type=click.Choice(["campaign", "model", "memory", "growth", "bugs", "guidance", "probe", "workload"]),
    help="One part: speed and cost of a campaign, speed of the model, verification of KV memory, how cost grows with size, "
    "how soon a campaign sees the five faults of 0.29.0's connector, what --guided gains, what the probe costs an engine, "
    "or speed of `workload` on the --trace.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the KV memory lies that is verified.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="For --only workload: a request trace with a hash for each 512 tokens.",
)
@click.option(
    "--history",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Add the figures to this file, a line of JSON a run, and show beside each what the last runs with the same vLLM "
    "measured. Keep one for each machine.",
)
@_json_option
def bench(vllm: str, only: str | None, device: str, trace: Path | None, history: Path | None, as_json: bool) -> int:
    """Measure the ratios that the project promises.

    Cases per second on one core in the default mix (at least 150); what a campaign costs over the real side alone (at
    most 1.6); how much two jobs gain on two cores (at least 1.8); how much faster than the real scheduler the model is,
    step for step (at least 3), with 4 running requests and with 256 over 100,000 blocks; what building a model of 100,000
    blocks costs; how fast KV memory is verified against a copy of it on the same device (at least 0.6, where the blocks
    that were filled lie in one run); the exponents with which the cost of judging a case grows with prompt length, running
    requests, pool size and groups, each doubled several times (at most 1.3). Ratios are medians of interleaved batches.
    `--only bugs`: processor time until a campaign on 0.29.0 sees each of the five faults of its connector (at most 10
    seconds; median of 20 seeds). `--only guidance`: cases until a campaign sees each known issue that the model foresees,
    with --guided and without (median of 20 seeds; takes ten minutes). `--only probe`: processor time of an engine with the
    probe, verifying nothing, over one without (at most 1.05). `--only workload --trace FILE`: how much faster than
    kvcache-simulator, which has to be on PATH, `workload` replays a trace in the order of its requests (at least 1). Exit
    code 1 if one is missed. Takes about two minutes.
    """
    from diff_tests.bench import HistoryError, append_figures, document, earlier_values, measure, print_measures
    from diff_tests.workload.race import RaceError
    from diff_tests.workload.report import origin

    if (only == "workload") != (trace is not None):
        raise InputError("--only workload and --trace FILE go together")
    if device == "cuda" and not _has_cuda():
        raise InputError("--device cuda: torch finds no CUDA device here; use cpu")
    with _Started(vllm) as (target, info):
        try:
            earlier = earlier_values(history, info.version) if history else {}
            measures = _target_errors(lambda: measure(target, info, only, device, trace))
            if history:
                append_figures(history, measures, info, origin(info.rules.release, sys.argv[1:]))
        except HistoryError as error:
            raise InputError(f"--history {error}") from None
        except RaceError as error:
            raise InputError(str(error)) from None
    if as_json:
        _print_json(document(measures, info))
    else:
        print_measures(_output(), measures, info, earlier)
    return OK if all(m.kept for m in measures) else FINDINGS


@cli.command(
    epilog="kvoracle workload trace.jsonl --arrivals order --block 512 --blocks 1000 --blocks 10000 --plot rates.svg\n"
    "kvoracle workload trace.jsonl --block 16 --blocks 40000 --requests 1000 --against vllm"
)
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--block", metavar="TOKENS", type=click.IntRange(min=1), default=16, show_default=True, help="Block size.")
@click.option(
    "--blocks",
    metavar="N",
    type=click.IntRange(min=2),
    multiple=True,
    default=(10_000,),
    show_default=True,
    help="Blocks in the pool, the null block included. Give it several times to compare sizes.",
)
@click.option(
    "--groups",
    metavar="YAML",
    default="[{kind: full}]",
    show_default=True,
    help="KV cache groups as in a scenario; their `block` is --block where they say nothing.",
)
@click.option(
    "--arrivals",
    metavar="CLOCK",
    default="closed:8",
    show_default=True,
    help="closed:N keeps N requests in flight; step:MS lets them arrive at their time, an engine step taking MS "
    "milliseconds; order looks one up after the other and allocates, without decoding.",
)
@click.option("--requests", "limit", metavar="N", type=click.IntRange(min=1), help="Only the first N of the trace.")
@click.option(
    "--max-model-len",
    metavar="TOKENS",
    type=click.IntRange(min=2),
    help="Longer requests are left out, and counted. Default: the longest that the pool admits.",
)
@click.option(
    "--max-num-seqs",
    metavar="N",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests at once.",
)
@click.option(
    "--max-num-batched-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens that a step may compute.",
)
@click.option(
    "--hash-block", metavar="TOKENS", type=click.IntRange(min=1), default=512, show_default=True,
    help="Tokens that one hash of the trace stands for.",
)  # fmt: skip
@click.option(
    "--label", "labels", metavar="FIELD=NAME", multiple=True,
    help="The name of a field in this trace: timestamp, input_length, output_length or hash_ids.",
)  # fmt: skip
@click.option(
    "--out", metavar="FILE", type=click.Path(path_type=Path), help="A row a request and a row a step: .jsonl or .csv."
)
@click.option(
    "--plot", "plot_file", metavar="FILE", type=click.Path(path_type=Path), help="Hit rate over pool size: .png or .svg."
)
@click.option("--against", type=click.Choice(["vllm"]), help="The real scheduler plays it too, and every step is compared.")
@_vllm_option
@_as_option
@_json_option
def workload(**options: Any) -> int:
    """Replay a request trace through the model.

    TRACE has one JSON object a line, with a timestamp in milliseconds, prompt and output lengths in tokens, and a hash for
    each block of the prompt; .gz is read too. Reports hits by vLLM's definitions and by the literature's, evictions,
    preemptions and occupancy for each pool size. Needs neither torch nor vLLM, except for --against vllm; exit code 1 if
    the real scheduler then does anything else than the model, or counts other hits.
    """
    from diff_tests.workload.command import Settings, WorkloadError, run

    try:
        settings = Settings.of(options)
        document, equal = run(settings, sys.argv[1:], None if options["as_json"] else _output())
    except (ScenarioError, WorkloadError, OSError) as error:
        raise InputError(str(error)) from None
    if options["as_json"]:
        _print_json(document)
    return OK if equal else FINDINGS


@cli.command(epilog="kvoracle mutants\nkvoracle mutants --only named\nkvoracle mutants --connector mine.py --json")
@_vllm_option
@click.option(
    "--connector",
    metavar="NAME|FILE",
    default="DecodeBenchConnector",
    show_default=True,
    help="The connector whose file is mutated: a registered name, or a .py file.",
)
@click.option(
    "--only",
    type=click.Choice(["named", "first-order"]),
    help="Named defects, or mutants of the file.",
)
@click.option("--cases", metavar="N", type=click.IntRange(min=1), default=60, show_default=True, help="Cases for each.")
@click.option("--seed", metavar="S", type=click.IntRange(min=0), default=1, show_default=True, help="Of the cases.")
@click.option("--jobs", "-j", metavar="N", type=click.IntRange(min=1), help="Child processes. Default: one for each core.")
@click.option("--all", "run_all", is_flag=True, help="Run those judged equivalent, too: one that is found was misjudged.")
@_json_option
def mutants(
    vllm: str,
    connector: str,
    only: str | None,
    cases: int,
    seed: int,
    jobs: int | None,
    run_all: bool,
    as_json: bool,
) -> int:
    """Measure which planted defects the tester finds.

    Named defects are planted in engine, worker and connector; first-order mutants are the connector's file with one small
    change each: a comparison, an operator, a constant or boundary, a condition, a statement left out, a slice, a loop, a
    return value, two arguments swapped. Each runs against the cases of the corpus with that connector, then generated ones,
    until something is found. Survivors are shown with what was changed. Those judged equivalent are listed, with the
    reason, in diff_tests/equivalent_mutants.toml, and not run. Exit code 1 if another one survives.
    """
    from diff_tests import mutants as trials
    from diff_tests.campaign import num_cores
    from diff_tests.mutation import mutants as first_order
    from diff_tests.vllm_target.connectors import is_file

    name = "DecodeBenchConnector" if is_file(connector) else connector
    equivalent = trials.load_equivalent()
    with _Started(vllm) as (target, info):
        first = trials.directed_cases(name, info.rules.release)
        trial = trials.Trial(vllm, name, seed, cases, jobs or num_cores(), first)
        source = _target_errors(lambda: trials.installed_source(target, connector))
        subjects = [] if only == "first-order" else trials.named_subjects(source)
        if only != "named":
            changed = first_order(source)
            gone = trials.stale(equivalent, changed)
            equivalent = {key: entry for key, entry in equivalent.items() if key not in gone}
            if gone:
                click.echo(
                    f"{len(gone)} mutants judged equivalent are no longer there or changed: {', '.join(gone)}", err=True
                )
            subjects += trials.subjects_of([m for m in changed if run_all or m.key not in equivalent])
        else:
            equivalent = {}
        with _Bar("mutants", len(subjects), counts=True) as bar:
            results = _target_errors(lambda: trials.Run(trial, subjects).results(lambda result: bar.advance()))
    document = trials.document(trial, results, equivalent)
    if as_json:
        _print_json(document)
    else:
        trials.print_results(_output(), trial, results, equivalent)
    if len(results) < len(subjects):
        return INTERRUPTED
    return OK if document["verdict"] == "pass" else FINDINGS


def _complete_issue(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    from oracle.known_issues import load as load_issues

    return [CompletionItem(issue.id) for issue in load_issues() if issue.id.startswith(begun)]


@cli.command(epilog="kvoracle issues\nkvoracle issues kernel-rows > kernel-rows.md")
@click.argument("name", required=False, shell_complete=_complete_issue)
@click.option(
    "--vllm",
    metavar="TARGET",
    shell_complete=_complete_target,
    help="Where to run the scenario, as for `run`. Default: the installed vLLM if it has the issue, else the newest "
    "release in the cache that has it.",
)
@_json_option
def issues(name: str | None, vllm: str | None, as_json: bool) -> int:
    """List known issues of vLLM, or print the evidence for one.

    Without NAME, a line for each: its id, the law, the releases that have it. With NAME, a page in Markdown that can be
    sent upstream as it is: what must hold and what happened instead, the smallest scenario, and a test that uses only
    vLLM's own classes.
    """
    from diff_tests import issues as known
    from diff_tests.run import run_on
    from diff_tests.vllm_target.releases import cached_releases, installed_version

    if name is None:
        if as_json:
            _print_json(known.list_document())
        else:
            known.print_list(_output())
        return OK
    try:
        issue = known.issue_named(name)
        where = vllm or known.affected_release(issue, installed_version(), cached_releases())
    except ValueError as error:
        raise InputError(f"{name}: {error}") from None
    with _Started(where) as (target, info):
        found = known.findings_of(issue, run_on(target, known.scenario_of(issue)))
    if as_json:
        _print_json(known.document(issue, info.version, found))
    else:
        click.echo(known.page(issue, info.version, found), nl=False)
    return OK


@cli.command(
    epilog='eval "$(kvoracle completion bash)"\nkvoracle completion fish > ~/.config/fish/completions/kvoracle.fish'
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> int:
    """Print the script with which a shell completes commands, options, files and releases."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None  # click knows these three
    click.echo(kind(cli, {}, "kvoracle", "_KVORACLE_COMPLETE").source())
    return OK


@cli.group(cls=_Group)
def vllm() -> None:
    """List, fetch and delete vLLM releases.

    A release is fetched once into the cache and runs with this environment's packages. The cache is kvoracle below
    ~/.cache, or where KVORACLE_CACHE says.
    """


@vllm.command(name="list", epilog="kvoracle vllm list\nkvoracle vllm list --json")
@_json_option
def vllm_list(as_json: bool) -> int:
    """Show the releases we have rules for, and where each is."""
    from diff_tests.vllm_target.releases import cached_releases, installed_version

    installed, cached = installed_version(), cached_releases()
    rows = [{"release": r, "installed": r == installed, "cached": r in cached} for r in RELEASES]
    if as_json:
        _print_json({"installed": installed, "releases": rows})
        return OK
    for row in rows:
        places = [name for name in ("installed", "cached") if row[name]]
        click.echo(f"{row['release']:<10} {', '.join(places) or '-'}")
    if installed is not None and installed not in RELEASES:
        click.echo(f"{installed:<10} installed, judged by the rules of {NEWEST}")
    return OK


@vllm.command(name="add", epilog="kvoracle vllm add 0.29.0\nkvoracle vllm add 0.30.0 0.31.0 0.33.0")
@click.argument("releases", nargs=-1, required=True)
def vllm_add(releases: tuple[str, ...]) -> int:
    """Fetch releases from the package index into the cache."""
    from diff_tests.vllm_target.releases import add, is_cached

    for release in releases:
        was_there = is_cached(release)
        folder = _target_errors(partial(add, release))
        click.echo(f"{release} {'was already in' if was_there else 'is now in'} {folder}")
    return OK


@vllm.command(name="remove", epilog="kvoracle vllm remove 0.29.0\nkvoracle vllm remove 0.30.0 0.31.0")
@click.argument("releases", nargs=-1, required=True)
def vllm_remove(releases: tuple[str, ...]) -> int:
    """Delete releases from the cache."""
    from diff_tests.vllm_target.releases import remove

    for release in releases:
        removed = _target_errors(partial(remove, release))
        click.echo(f"{release} {'removed' if removed else 'was not in the cache'}")
    return OK


# ------------------------------------------------------------------------------------------------------------- helpers


def _load(path: Path) -> Scenario:
    """A scenario from any file that holds one. Raises InputError."""
    from diff_tests.loading import load_scenario

    scenario: Scenario = _reading(path, load_scenario)
    return scenario


def _reading(path: Path, read: Callable[[Path], Any]) -> Any:
    """Reads a file; what is wrong with it becomes one message."""
    try:
        return read(path)
    except ScenarioError as error:
        raise InputError(f"{path}: {error}") from None
    except OSError as error:
        raise InputError(f"{error.filename or path}: cannot be read: {error.strerror}") from None


def _use(path: Path, use: Callable[[], Any]) -> Any:
    """Does something with the scenario of a file; an impossible request of it becomes one message."""
    try:
        return use()
    except ScenarioError as error:
        raise InputError(f"{path}: {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _rules(release: str | None) -> Rules:
    """The rules to judge by. Raises InputError for a release we do not know."""
    if release is None:
        return RELEASES[NEWEST]
    if release not in RELEASES:
        raise InputError(f"--as {release}: no rules for this release; known: {', '.join(RELEASES)}")
    return RELEASES[release]


def _targets(vllm: str) -> tuple[list[str], list[str]]:
    """The targets that `--vllm` names where it may be `all`, and the known releases that are not here."""
    from diff_tests.vllm_target.releases import cached_releases, installed_version

    if vllm != "all":
        return [vllm], []
    installed = installed_version()
    targets = (["current"] if installed else []) + [r for r in cached_releases() if r != installed]
    return targets, [r for r in RELEASES if r != installed and r not in targets]


def _target_errors(use: Callable[[], Any]) -> Any:
    """Turns the target's errors into messages and exit codes."""
    from diff_tests.vllm_target.releases import TargetInputError, TargetStartError

    try:
        return use()
    except TargetInputError as error:
        raise InputError(str(error)) from None
    except TargetStartError as error:
        raise StartError(str(error)) from None


def _trace_errors(use: Callable[[], Any]) -> Any:
    """Turns what is wrong with a trace into one message."""
    from diff_tests.live.trace import TraceError

    try:
        return use()
    except TraceError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from None


class _Started:
    """A started target, as a context: the target and what it is."""

    def __init__(
        self,
        vllm: str,
        connector: str | None = None,
        as_release: str | None = None,
        timeout_s: float = 60.0,
        for_engines: bool = False,
    ) -> None:
        from diff_tests.vllm_target.target import Target

        self._target: Target = _target_errors(
            lambda: Target(vllm, connector, timeout_s=timeout_s, as_release=as_release, for_engines=for_engines)
        )

    def __enter__(self) -> tuple[Target, TargetInfo]:
        return self._target, _target_errors(self._target.start)

    def __exit__(self, *error: object) -> None:
        self._target.close()


def progress_line(summary: Summary) -> str:
    """`4128 cases, 180/s, faults: law 4: 2, divergence: 1, 120 of 214 behaviours`"""
    rate = summary.num_cases / summary.seconds if summary.seconds else 0.0
    by_law = Counter("divergence" if fault.law is None else f"law {fault.law}" for fault in summary.faults)
    faults = ", ".join(f"{law}: {count}" for law, count in sorted(by_law.items())) or "none"
    seen = sum(1 for count in summary.coverage.counts.values() if count)
    return f"{summary.num_cases} cases, {rate:.0f}/s, faults: {faults}, {seen} of {len(summary.coverage.counts)} behaviours"


class _Bar:
    """A progress bar on standard error where that is a terminal. total: None where the end is not known; counts: how much
    is done is shown in numbers."""

    def __init__(self, what: str, total: float | None, counts: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        numbers = (MofNCompleteColumn(),) if counts else ()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), *numbers, TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One more is done."""
        self._bar.advance(self._task)


class _CampaignProgress(_Bar):
    """Of a campaign; called with the summary after each share."""

    def __init__(self, num_cases: int | None, seconds: float | None) -> None:
        super().__init__("fuzz", float(num_cases or seconds or 1))
        self._num_cases = num_cases

    def __call__(self, summary: Summary) -> None:
        if self._bar.disable:
            return
        done = float(summary.num_cases) if self._num_cases is not None else summary.seconds
        self._bar.update(self._task, completed=done, description=progress_line(summary))


class _GateProgress(_Bar):
    """Of a gate, which does not know its end; called with the result so far."""

    def __init__(self) -> None:
        super().__init__("gate", None)

    def __call__(self, result: Any) -> None:  # a gate's result
        failed = sum(candidate.verdict == "fail" for candidate in result.candidates)
        text = f"{result.num_corpus + result.num_seeded} cases, {failed} of {len(result.candidates)} failed"
        self._bar.update(self._task, description=text)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _folder_name(vllm: str) -> str:
    """What `--vllm` named, as part of a folder's name."""
    return Path(vllm).name or "target"


def _output() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_json(document: object) -> None:
    click.echo(msgspec.json.encode(document))


if __name__ == "__main__":
    main()

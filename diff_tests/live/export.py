"""A recorded run, or the part of it around a finding, as a scenario for the desk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from diff_tests.live.rebuild import Rebuilt
from oracle.findings import Finding
from sim.geometry import effective_block_size
from sim.history import Scheduled
from sim.scenario import (
    Abort,
    Add,
    AnyStep,
    Connector,
    Engine,
    LoadDone,
    ResetPrefixCache,
    Scenario,
    Schedule,
    Span,
    Step,
    Update,
)

Named = Add | Abort | LoadDone


def export(rebuilt: Rebuilt, finding: Finding | None) -> Scenario:
    """The whole run; with a finding, only up to its step, and only the requests that were there then or share a prefix
    with one that was. Settings that a trace cannot tell are vLLM's defaults."""
    scenario = rebuilt.scenario
    steps: Sequence[AnyStep] = scenario.steps
    about = f"a recorded run of {len(rebuilt.ids)} requests"
    if finding is not None and finding.step:
        steps = _up_to(steps, finding.step)
        kept = _related(steps, _present(rebuilt, finding))
        steps = [step for step in steps if not isinstance(step, Named) or step.id in kept]
        about = f"from a recorded run, around step {finding.step}: {finding.kind}, {finding.cause}"
    connector = scenario.connector
    if rebuilt.contract is None or not rebuilt.is_alone:
        connector = Connector(name="scripted")
        steps = _scripted(steps, rebuilt)
    engine = _with_small_pool(rebuilt, steps)
    renamed = _renamed(_joined(steps))
    return replace(scenario, about=about, engine=engine, connector=connector, steps=renamed)


def _up_to(steps: Iterable[AnyStep], last: int) -> list[AnyStep]:
    """Through the end of step `last`: a synchronous engine's output of it included."""
    kept: list[AnyStep] = []
    num_scheduled = num_updated = 0
    for step in steps:
        if isinstance(step, Schedule):
            if num_scheduled == last:
                break
            num_scheduled += 1
        elif isinstance(step, Update):
            num_updated += 1
        kept.append(step)
        if num_updated == last:
            break
    return kept


def _present(rebuilt: Rebuilt, finding: Finding) -> set[str]:
    """Who had blocks, or was let in, in the step of the finding."""
    record = next(r for r in rebuilt.history if isinstance(r, Scheduled) and r.step == finding.step)
    present = {*(record.tables or {}), *record.external, *record.scheduled}
    return present | ({finding.request} if finding.request else set())


def _related(steps: Iterable[AnyStep], present: set[str]) -> set[str]:
    """Those, and whoever first had a prefix that one of them has."""
    adds = {step.id: step for step in steps if isinstance(step, Add)}
    kept: set[str] = set()
    todo = [name for name in present if name in adds]
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        kept.add(name)
        add = adds[name]
        owners = {span.stream.rpartition(".")[0] for span in (*add.prompt, *add.output)}
        todo += [owner for owner in owners if owner in adds and owner not in kept]
    return kept


def _scripted(steps: Iterable[AnyStep], rebuilt: Rebuilt) -> list[AnyStep]:
    """With the external tokens that each request was granted, for a connector whose answers follow no rule of ours."""
    granted: dict[str, tuple[int, bool]] = {}
    for record in rebuilt.history:
        if isinstance(record, Scheduled):
            for name, num_external in record.external.items():
                granted.setdefault(name, (num_external, name not in record.scheduled))
    scripted: list[AnyStep] = []
    for step in steps:
        if isinstance(step, Add) and granted.get(step.id, (0, False))[0]:
            num_external, is_later = granted[step.id]
            step = replace(step, external=num_external, load="async" if is_later else "sync")
        scripted.append(step)
    return scripted


def _with_small_pool(rebuilt: Rebuilt, steps: Iterable[AnyStep]) -> Engine:
    """Blocks that were never taken play no part, but for the room that a request asks for before it is let in."""
    engine = rebuilt.scenario.engine
    used = [
        block
        for record in rebuilt.history
        if isinstance(record, Scheduled)
        for tables in (record.tables or {}).values()
        for table in tables
        for block in table
    ]
    longest = max((a.num_prompt_tokens + a.max_tokens for a in steps if isinstance(a, Add)), default=0)
    longest = min(longest, engine.max_model_len)
    rules, groups = rebuilt.geometry.rules, rebuilt.scenario.groups
    room = sum(-(-longest // effective_block_size(group, engine.dcp, rules)) + 2 for group in groups)  # rounds up
    return replace(engine, blocks=min(engine.blocks, max(used, default=0) + room + 2))


def _joined(steps: Iterable[AnyStep]) -> list[AnyStep]:
    """Both halves of a step as one, and equal neighbours as one with a count."""
    joined: list[AnyStep] = []
    for step in steps:
        last = joined[-1] if joined else None
        if isinstance(step, Update) and isinstance(last, Schedule):
            joined.pop()
            before = joined[-1] if joined else None
            if isinstance(before, Step):
                joined[-1] = Step(count=before.count + 1)
            else:
                joined.append(Step(count=1))
        elif isinstance(step, ResetPrefixCache) and step == last:
            continue
        else:
            joined.append(step)
    return joined


def _renamed(steps: Sequence[AnyStep]) -> tuple[AnyStep, ...]:
    """Requests r1, r2, ... in order of arrival instead of vLLM's long IDs."""
    names = {step.id: "" for step in steps if isinstance(step, Add)}
    names = {old: f"r{number}" for number, old in enumerate(names, start=1)}

    def span(old: Span) -> Span:
        owner, _, part = old.stream.rpartition(".")
        return old._replace(stream=f"{names[owner]}.{part}") if owner in names else old

    renamed: list[AnyStep] = []
    for step in steps:
        if isinstance(step, Add):
            prompt, output = (tuple(map(span, spans)) for spans in (step.prompt, step.output))
            step = replace(step, id=names[step.id], prompt=prompt, output=output)
        elif isinstance(step, (Abort, LoadDone)):
            step = replace(step, id=names[step.id])
        renamed.append(step)
    return tuple(renamed)

"""Known issues: violations of vLLM's own, each shown by a stand-alone script, that must not hide anything new.

An entry of `known_issues.toml` matches a finding, never a scenario. Its fields:

- `id`, `title`, `reason`: a slug, a line, and why the finding is vLLM's fault. `upstream`: address of the report, if any.
- `releases`: those that have it. `law`, `cause`: of the findings; several causes where one defect shows in several ways.
- `raises`: of a finding about an exception, which one: see `Raised`.
- `groups`: kinds of the finding's group; missing: any. `where`: what else must hold, see `_WHERE`.
- `follows`: ids of entries without which this one does not come about, so that its scenario shows their findings too.
- `scenario`: the smallest one that shows it. `script`: shows it on its own and exits with an error where vLLM has the
  issue. Both are paths from the root of the repository.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from oracle.findings import Finding
from oracle.values import clamp
from sim.geometry import FULL_LIKE, block_sizes, effective_block_size, has_partial_hits, replay_window
from sim.groups.base import ceil_div
from sim.releases import Rules
from sim.scenario import Add, AnyGroup, ChunkedLocal, LoadFailed, Mamba, Scenario, SlidingWindow, SlidingWindowMLA
from sim.speculation import num_lookahead
from sim.startup import smallest_pool, startup_blocks

Value = bool | str | list[str] | dict[str, bool | str | list[str]]
"""What something has to be: this value, one of these, or (true, false) set or not; or several fields of it."""


WINDOWS = SlidingWindow | SlidingWindowMLA | ChunkedLocal
"""Groups that give back the blocks that a window or a chunk has left."""


class Raised(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An exception as law 7 reports it: its type (or one of several), a function of vLLM that it came through (the
    qualified name), and parts of the line that raised it and of its message."""

    type: str | list[str]
    through: str = ""
    line: str = ""
    message: str = ""

    def fits(self, observed: object) -> bool:
        """Whether this is the exception of a finding's `observed`."""
        if not isinstance(observed, Mapping):
            return False
        return (
            observed["type"] in _listed(self.type)
            and (not self.through or self.through in observed["trail"])
            and self.line in observed["line"]
            and self.message in observed["message"]
        )


class KnownIssue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the list."""

    id: str
    title: str
    reason: str
    releases: list[str]
    law: int
    cause: str | list[str]
    scenario: str
    script: str
    raises: Raised | None = None
    groups: list[str] = []
    where: dict[str, Value] = {}
    follows: list[str] = []
    upstream: str | None = None


class _Subject(NamedTuple):
    """A finding, its group if it has one, the scenario that showed it, and the rules of the release."""

    finding: Finding
    group: AnyGroup | None
    scenario: Scenario
    rules: Rules


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _is_so(actual: Any, wanted: Value) -> bool:
    if isinstance(wanted, bool):
        return bool(actual) == wanted
    return actual in wanted if isinstance(wanted, list) else actual == wanted


def _has(settings: Struct | None, wanted: Value) -> bool:
    """Whether the fields of an engine, a group or a drafter are as wanted. What is not there has none."""
    assert isinstance(wanted, dict)
    return settings is not None and all(_is_so(getattr(settings, name, None), value) for name, value in wanted.items())


def _engine(subject: _Subject, wanted: Value) -> bool:
    return _has(subject.scenario.engine, wanted)


def _speculative(subject: _Subject, wanted: Value) -> bool:
    return _has(subject.scenario.engine.speculative, wanted)


def _group(subject: _Subject, wanted: Value) -> bool:
    return _has(subject.group, wanted)


def _any_group(subject: _Subject, wanted: Value) -> bool:
    return any(_has(group, wanted) for group in subject.scenario.groups)


def _connector(subject: _Subject, wanted: Value) -> bool:
    connector = subject.scenario.connector
    return _is_so(connector.name if connector is not None else None, wanted)


def _connector_option(subject: _Subject, wanted: Value) -> bool:
    connector = subject.scenario.connector
    return connector is not None and bool(connector.extra.get(str(wanted)))


def _kernel_block_smaller(subject: _Subject, wanted: Value) -> bool:
    group = subject.group
    return (group is not None and group.kernel_block is not None and group.kernel_block < group.block) == wanted


def _chunk_over_block_end(subject: _Subject, wanted: Value) -> bool:
    group, positions = subject.group, subject.finding.positions
    if not isinstance(group, ChunkedLocal) or not positions:
        return not wanted
    return ((positions[0] + 1) * group.block % group.chunk != 0) == wanted


def _rows_per_step(scenario: Scenario) -> int:
    """Tokens that one request can get in a step: the budget without the draft model's own row."""
    speculative = scenario.engine.speculative
    has_draft_row = speculative is not None and speculative.method == "draft_model"
    return scenario.engine.max_num_batched_tokens - has_draft_row


def _padding_over_budget(subject: _Subject, wanted: Value) -> bool:
    speculative = subject.scenario.engine.speculative
    return (speculative is not None and 1 + speculative.tokens > _rows_per_step(subject.scenario)) == wanted


def _aligned(scenario: Scenario) -> list[Mamba]:
    """Groups of states in mode align."""
    return [group for group in scenario.groups if isinstance(group, Mamba) and group.mode == "align"]


def _state_block_over_rows(subject: _Subject, wanted: Value) -> bool:
    rows, budget = _rows_per_step(subject.scenario), subject.scenario.engine.max_num_batched_tokens
    return any(rows < group.block <= budget for group in _aligned(subject.scenario)) == wanted


def _drafts_fill_a_block(subject: _Subject, wanted: Value) -> bool:
    speculative, group = subject.scenario.engine.speculative, subject.group
    return (speculative is not None and group is not None and speculative.tokens >= group.block) == wanted


def _load_failure(subject: _Subject, wanted: Value) -> bool:
    connector = subject.scenario.connector
    return connector is not None and _is_so(connector.load_failure, wanted)


def _num_copied_blocks(subject: _Subject) -> int:
    """Blocks that a request holds beside its copies of them, at most: one a group, where hits may end inside a block."""
    if not has_partial_hits(subject.scenario, subject.rules):
        return 0
    return sum(isinstance(group, (*FULL_LIKE, Mamba)) for group in subject.scenario.groups)


def _num_states_in_flight(subject: _Subject) -> int:
    """Blocks of states that may be held beside the one that a step in flight writes and the one that the next step writes:
    the one that it reads, and to 0.29 one more, as a state before a null is not let go."""
    if not subject.scenario.engine.async_scheduling:
        return 0
    num_groups = len(_aligned(subject.scenario))
    return num_groups if subject.rules.mamba_release_passes_nulls else 2 * num_groups


def _pool_lacks(subject: _Subject, num_blocks: int) -> bool:
    """Whether one request can want so many blocks beside those of the start-up check, and the pool has fewer."""
    return subject.scenario.engine.blocks < smallest_pool(subject.scenario, subject.rules) + num_blocks


def _copies_over_promise(subject: _Subject, wanted: Value) -> bool:
    return _pool_lacks(subject, _num_copied_blocks(subject)) == wanted


def _states_over_promise(subject: _Subject, wanted: Value) -> bool:
    num_states = _num_states_in_flight(subject)
    return (num_states > 0 and _pool_lacks(subject, num_states + _num_copied_blocks(subject))) == wanted


def _num_counted_nulls(subject: _Subject) -> int:
    """Entries of a step with a checkpoint that are counted as blocks and become null: those between its two states to 0.30,
    in 0.31 at most as many as there are blocks for drafts."""
    engine, rules = subject.scenario.engine, subject.rules
    groups = [group for group in _aligned(subject.scenario) if group.checkpoint_blocks]
    if rules.checkpoint_estimate_is_exact:
        most = min(engine.max_num_batched_tokens, engine.max_model_len)
        return sum(ceil_div(most, effective_block_size(group, engine.dcp, rules)) for group in groups)
    return sum(group.speculative_blocks for group in groups) if rules.checkpoint_cap_includes_speculative else 0


def _nulls_over_promise(subject: _Subject, wanted: Value) -> bool:
    num_nulls = _num_counted_nulls(subject)
    num_others = _num_states_in_flight(subject) + _num_copied_blocks(subject)
    return (num_nulls > 0 and _pool_lacks(subject, num_nulls + num_others)) == wanted


def _keeps_passed_states(subject: _Subject, wanted: Value) -> bool:
    engine = subject.scenario.engine
    return (engine.async_scheduling or engine.speculative is not None) == wanted


def _blocks_differ(subject: _Subject, wanted: Value) -> bool:
    sizes = {effective_block_size(group, subject.scenario.engine.dcp, subject.rules) for group in subject.scenario.groups}
    return (len(sizes) > 1) == wanted


def _hits_inside_blocks(subject: _Subject, wanted: Value) -> bool:
    return has_partial_hits(subject.scenario, subject.rules) == wanted


def _loads_later(subject: _Subject, wanted: Value) -> bool:
    return any(isinstance(step, Add) and step.load == "async" for step in subject.scenario.steps) == wanted


def _load_over_cap(subject: _Subject, wanted: Value) -> bool:
    scenario, rules = subject.scenario, subject.rules
    adds = [step for step in scenario.steps if isinstance(step, Add) and step.load == "async"]
    longest = max((add.num_prompt_tokens + add.max_tokens for add in adds), default=0)
    return (
        any(
            isinstance(group, WINDOWS) and ceil_div(longest, effective_block_size(group, scenario.engine.dcp, rules)) > cap
            for group, cap in zip(scenario.groups, startup_blocks(scenario, rules), strict=True)
        )
        == wanted
    )


def _load_leaves_nothing(subject: _Subject, wanted: Value) -> bool:
    adds = [step for step in subject.scenario.steps if isinstance(step, Add) and step.load == "async"]
    replays = replay_window(subject.scenario.groups) > 0
    return any(add.num_prompt_tokens == 1 or replays for add in adds) == wanted


def _drafts_over_promise(subject: _Subject, wanted: Value) -> bool:
    scenario, rules = subject.scenario, subject.rules
    speculative = scenario.engine.speculative
    if speculative is None:
        return not wanted
    if rules.reservation_is_per_group:
        sizes = [effective_block_size(g, scenario.engine.dcp, rules) for g in scenario.groups if not isinstance(g, Mamba)]
    else:
        sizes = [block_sizes(scenario, rules)[0]]
    most = 1 + 2 * speculative.tokens  # the drafts, and as many slots behind them
    return _pool_lacks(subject, sum(ceil_div(most, size) for size in sizes)) == wanted


def _lookahead_over_promise(subject: _Subject, wanted: Value) -> bool:
    engine = subject.scenario.engine
    windows = [group for group in subject.scenario.groups if isinstance(group, WINDOWS)]
    sizes = [effective_block_size(group, engine.dcp, subject.rules) for group in windows]
    return _pool_lacks(subject, sum(ceil_div(num_lookahead(engine), size) for size in sizes)) == wanted


def _load_failed(subject: _Subject, wanted: Value) -> bool:
    steps = subject.scenario.steps
    failed = {step.id for step in steps if isinstance(step, LoadFailed)}
    return any(isinstance(step, Add) and step.id in failed and step.load == wanted for step in steps)


def _at_start(subject: _Subject, wanted: Value) -> bool:
    return (subject.finding.step == 0) == wanted


def _salt_names_an_adapter(subject: _Subject, wanted: Value) -> bool:
    adds = [step for step in subject.scenario.steps if isinstance(step, Add)]
    shared = {add.salt for add in adds} & {add.lora for add in adds} - {None}
    return bool(shared) == wanted


def _fill_out_of_range(subject: _Subject, wanted: Value) -> bool:
    connector = subject.scenario.connector
    extra = connector.extra if connector is not None else {}
    mean, drawn = float(extra.get("fill_mean", 0.0)), float(extra.get("fill_std", 0.0)) > 0
    return any(_needs_encoding(group, mean, drawn) for group in subject.scenario.groups) == wanted


def _needs_encoding(group: AnyGroup, mean: float, drawn: bool) -> bool:
    """Whether the type that the group's memory is stored in cannot take the fill as it is."""
    if isinstance(group, Mamba):
        return drawn or not -129 < mean < 128
    if group.dtype.startswith("fp8") or group.dtype == "packed":
        return drawn or not -1 < mean < 256
    return clamp(mean, group.dtype) != mean


# Name in `where` -> whether it holds.
_WHERE: dict[str, Callable[[_Subject, Value], bool]] = {
    "engine": _engine,  # these settings of the engine
    "speculative": _speculative,  # the engine drafts, with these settings
    "group": _group,  # these fields of the finding's group
    "any_group": _any_group,  # some group of the scenario has these fields
    "connector": _connector,  # the connector's name; true, false: any, none
    "connector_option": _connector_option,  # this key of the connector's extra config is set
    "kernel_block_smaller": _kernel_block_smaller,  # the group's kernel blocks are smaller than the manager's
    "chunk_over_block_end": _chunk_over_block_end,  # a chunk of the group goes on behind the end of the finding's block
    "padding_over_budget": _padding_over_budget,  # a token and its drafts are more than a step can give one request
    "state_block_over_rows": _state_block_over_rows,  # so is a block of states, though it is within the whole budget
    "drafts_fill_a_block": _drafts_fill_a_block,  # a step drafts at least as many tokens as the group's block holds
    "load_failure": _load_failure,  # what becomes of a request whose load failed
    "copies_over_promise": _copies_over_promise,  # hits end inside blocks, and the pool may lack those that are copied
    "states_over_promise": _states_over_promise,  # the pool may lack blocks for states that a step in flight keeps
    "nulls_over_promise": _nulls_over_promise,  # the pool may lack blocks for entries that become null beside a checkpoint
    "keeps_passed_states": _keeps_passed_states,  # a step in flight, or wrong drafts, keep a state that was passed
    "blocks_differ": _blocks_differ,  # the groups' blocks hold different numbers of tokens
    "hits_inside_blocks": _hits_inside_blocks,  # hits may end inside blocks
    "loads_later": _loads_later,  # some request's external tokens arrive after the step that grants them
    "load_over_cap": _load_over_cap,  # a late load's request has a longer table than it can hold blocks, in some window
    "load_leaves_nothing": _load_leaves_nothing,  # a late load brings a prompt of one token, or is computed again
    "drafts_over_promise": _drafts_over_promise,  # the pool may lack the blocks that are set aside for drafts
    "lookahead_over_promise": _lookahead_over_promise,  # the pool may lack slots behind a step's tokens, in windows
    "load_failed": _load_failed,  # a load of the scenario that is sync, or async, fails
    "at_start": _at_start,  # before the first step
    "fill_out_of_range": _fill_out_of_range,  # some group's memory, as it is stored, cannot take the fill unencoded
    "salt_names_an_adapter": _salt_names_an_adapter,  # a request's cache salt is the name of another's LoRA adapter
}


class _Document(Struct, forbid_unknown_fields=True):
    issue: list[KnownIssue] = []


@lru_cache(maxsize=1)
def load() -> tuple[KnownIssue, ...]:
    """All entries. Raises ValueError where the list is not well formed."""
    text = files("oracle").joinpath("known_issues.toml").read_text(encoding="utf-8")
    return parse(text)


def parse(text: str) -> tuple[KnownIssue, ...]:
    """Entries from TOML text. Raises ValueError that names the entry."""
    issues = msgspec.convert(tomllib.loads(text), _Document).issue
    for issue in issues:
        if unknown := issue.where.keys() - _WHERE.keys():
            raise ValueError(f"known issue {issue.id}: unknown condition {sorted(unknown)}; known: {sorted(_WHERE)}")
    if len({issue.id for issue in issues}) != len(issues):
        raise ValueError("two known issues have the same id")
    return tuple(issues)


def match(finding: Finding, scenario: Scenario, rules: Rules) -> KnownIssue | None:
    """The entry that explains a finding, or None."""
    return next((issue for issue in load() if explains(issue, finding, scenario, rules)), None)


def explains(issue: KnownIssue, finding: Finding, scenario: Scenario, rules: Rules) -> bool:
    """Whether an entry is about this finding."""
    if rules.release not in issue.releases or finding.law != issue.law or finding.cause not in _listed(issue.cause):
        return False
    if issue.raises is not None and not issue.raises.fits(finding.observed):
        return False
    if issue.groups and finding.group_kind not in issue.groups:
        return False
    group = scenario.groups[finding.group] if finding.group is not None else None
    subject = _Subject(finding, group, scenario, rules)
    return all(_WHERE[name](subject, wanted) for name, wanted in issue.where.items())

"""Known issues: violations of vLLM's own, each shown by a stand-alone script, that must not hide anything new.

An entry of `known_issues.toml` matches a finding, never a scenario. Its fields:

- `id`, `title`, `reason`: a slug, a line, and why the finding is vLLM's fault. `upstream`: address of the report, if any.
- `releases`: those that have it. `law`, `cause`: of the findings. `groups`: kinds of the finding's group; missing: any.
- `where`: what else must hold, see `_WHERE`. `scenario`: the smallest one that shows it. `script`: shows it on its own
  and exits with an error where vLLM has the issue. Both are paths from the root of the repository.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import lru_cache
from importlib.resources import files

import msgspec
from msgspec import Struct

from oracle.findings import Finding
from oracle.values import clamp
from sim.releases import Rules
from sim.scenario import Add, AnyGroup, Mamba, Scenario

Value = bool | str | list[str]


class KnownIssue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the list."""

    id: str
    title: str
    reason: str
    releases: list[str]
    law: int
    cause: str
    scenario: str
    script: str
    groups: list[str] = []
    where: dict[str, Value] = {}
    upstream: str | None = None


def _group_dtype(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    assert isinstance(value, list)
    return group is not None and group.dtype in value


def _kernel_block_smaller(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    smaller = group is not None and group.kernel_block is not None and group.kernel_block < group.block
    return smaller == value


def _context_parallel(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    return (scenario.engine.dcp > 1) == value


def _connector_option(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    return scenario.connector is not None and bool(scenario.connector.extra.get(str(value)))


def _salt_names_an_adapter(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    adds = [step for step in scenario.steps if isinstance(step, Add)]
    shared = {add.salt for add in adds} & {add.lora for add in adds} - {None}
    return bool(shared) == value


def _fill_out_of_range(group: AnyGroup | None, scenario: Scenario, value: Value) -> bool:
    extra = scenario.connector.extra if scenario.connector is not None else {}
    mean, drawn = float(extra.get("fill_mean", 0.0)), float(extra.get("fill_std", 0.0)) > 0
    return any(_needs_encoding(spec, mean, drawn) for spec in scenario.groups) == value


def _needs_encoding(group: AnyGroup, mean: float, drawn: bool) -> bool:
    """Whether the type that the group's memory is stored in cannot take the fill as it is."""
    if isinstance(group, Mamba):
        return drawn or not -129 < mean < 128
    if group.dtype in ("fp8_e4m3", "fp8_e5m2"):
        return drawn or not -1 < mean < 256
    return clamp(mean, group.dtype) != mean


# Name in `where` -> whether the finding's group and the scenario meet it.
_WHERE: dict[str, Callable[[AnyGroup | None, Scenario, Value], bool]] = {
    "dtype": _group_dtype,  # the group's dtype is one of these
    "kernel_block_smaller": _kernel_block_smaller,  # kernel blocks are smaller than the manager's
    "context_parallel": _context_parallel,  # decode context parallelism is on
    "fill_out_of_range": _fill_out_of_range,  # some group's memory, as it is stored, cannot take the fill unencoded
    "salt_names_an_adapter": _salt_names_an_adapter,  # a request's cache salt is the name of another's LoRA adapter
    "connector_option": _connector_option,  # this key of the connector's extra config is set
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
    if rules.release not in issue.releases or (finding.law, finding.cause) != (issue.law, issue.cause):
        return False
    if issue.groups and finding.group_kind not in issue.groups:
        return False
    group = scenario.groups[finding.group] if finding.group is not None else None
    return all(_WHERE[name](group, scenario, value) for name, value in issue.where.items())

"""A long campaign on the model alone, and the tables of the README that say what it exercised.

`python -m diff_tests.tests.promise` writes the tables anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from diff_tests.behaviours import TABLE, Behaviour
from diff_tests.coverage import Coverage, accepted_kind_sets, can_hit
from diff_tests.generate import SeededChooser, case_seed, generate
from diff_tests.run import predict
from sim.refusals import refusal
from sim.releases import NEWEST, RELEASES
from sim.scenario import Scenario, parse
from sim.tests.test_refusals import CASES

README = Path(__file__).parents[2] / "README.md"
NUM_CASES = 10_000
CASES_PER_PART = 1250
SEED = 1


# -------------------------------------------------------------------------------------------------------------- campaign


@cache
def long_campaign(release: str) -> Coverage:
    """What NUM_CASES generated cases exercise, by their predicted histories.

    A real campaign compares each observed history with the predicted one in all that coverage reads, so where it finds no
    divergence both count alike; `test_a_prediction_counts_as_the_real_run_does` holds that. The model alone takes a quarter
    of the time.
    """
    starts = range(0, NUM_CASES, CASES_PER_PART)
    whole = Coverage(RELEASES[release])
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for part in pool.map(partial(_count_part, release), starts):
            whole.restore(part)
    return whole


def _count_part(release: str, start: int) -> dict[str, Any]:
    coverage = Coverage(RELEASES[release])
    for case in range(start, start + CASES_PER_PART):
        scenario = generate(SeededChooser(case_seed(SEED, case)), coverage.rules)
        coverage.add(scenario, predict(scenario, coverage.rules) or [])
    return coverage.plain()


# ---------------------------------------------------------------------------------------------------------------- tables


def behaviour_rows(coverage: Coverage) -> Iterator[tuple[str, ...]]:
    """(section, behaviour, releases that have it, count)."""
    for name, behaviour in TABLE.items():
        count = f"{coverage.counts[name]:,}" if name in coverage.counts else "-"
        yield behaviour.section, name, _releases(behaviour), "real runs" if behaviour.needs_worker else count


def _releases(behaviour: Behaviour) -> str:
    having = [release for release, rules in RELEASES.items() if behaviour.exists(rules)]
    return "all" if len(having) == len(RELEASES) else _span(having)


def _span(releases: list[str]) -> str:
    """`0.30.0 on`, `to 0.31.0`, or the releases one by one."""
    known = list(RELEASES)
    if releases == known[-len(releases) :]:
        return f"{releases[0]} on"
    return f"to {releases[-1]}" if releases == known[: len(releases)] else ", ".join(releases)


def kind_rows(coverage: Coverage) -> Iterator[tuple[str, ...]]:
    """(kind or pair, cases, hits, refused for now, preemptions)."""
    for kinds in accepted_kind_sets(coverage.rules):
        count = coverage.kinds[kinds]
        hits = f"{count.hits:,}" if can_hit(kinds) else "-"
        yield " + ".join(kinds), f"{count.cases:,}", hits, f"{count.refused:,}", f"{count.preemptions:,}"


def refusal_rows() -> Iterator[tuple[str, ...]]:
    """(reason, error, releases)."""
    seen: dict[tuple[str, str], list[str]] = {}
    for scenario in _refused_somewhere():
        for release, rules in RELEASES.items():
            found = refusal(scenario, rules)
            if found is not None and release not in seen.setdefault((found.message, found.type), []):
                seen[found.message, found.type].append(release)
    for (message, error), releases in seen.items():
        yield message, error, "all" if len(releases) == len(RELEASES) else _span(sorted(releases))


_FULL = {"kind": "full", "block": 4}
_REPLAYED = {"kind": "sliding_window_mla", "block": 4, "window": 5, "bounded_replay": True}
_MORE_CASES: list[tuple[Any, ...]] = [
    ({"connector": {"name": "DecodeBenchConnector"}}, [{**_FULL, "kernel_block": 2}, {**_FULL, "head_size": 64}]),
    ({}, [_REPLAYED, {"kind": "circular", "block": 4}]),
    ({}, [_FULL, _REPLAYED, {**_REPLAYED, "window": 9}]),
    ({"prefix_caching": False}, [{"kind": "mamba", "block": 4, "mode": "all"}]),
    ({"long_prefill_adaptive": True, "long_prefill_token_threshold": 8}, [_FULL]),
    ({"async_scheduling": True, "speculative": {"method": "ngram", "tokens": 2}}, [_FULL]),
]


def _refused_somewhere() -> Iterator[Scenario]:
    """Configurations that some release refuses."""
    cases: list[tuple[Any, ...]] = [*CASES, *_MORE_CASES]
    for settings, groups, *_ in cases:
        engine = {"blocks": 40, "max_model_len": 64, **settings}
        connector = engine.pop("connector", None)
        yield parse({"kvoracle": 1, "engine": engine, "connector": connector, "groups": groups, "steps": []})


TABLES = {
    "behaviours": ("part", "behaviour", "releases", "seen"),
    "kinds": ("kinds of groups", "cases", "hits", "refused for now", "preemptions"),
    "refusals": ("what is refused", "error", "releases"),
}
"""The README's tables and their columns."""


def _markers(table: str) -> tuple[str, str]:
    return f"<!-- {table} -->\n", f"<!-- end of {table} -->"


def table_in_readme(table: str) -> list[tuple[str, ...]]:
    """The rows that the README has, without the head."""
    start, end = _markers(table)
    lines = README.read_text(encoding="utf-8").partition(start)[2].partition(end)[0].strip().splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("|")]
    return rows[2:]


def write_tables() -> None:
    """Puts the tables of the newest release into the README."""
    coverage = long_campaign(NEWEST)
    rows = {"behaviours": behaviour_rows(coverage), "kinds": kind_rows(coverage), "refusals": refusal_rows()}
    text = README.read_text(encoding="utf-8")
    for table, columns in TABLES.items():
        start, end = _markers(table)
        before, _, rest = text.partition(start)
        after = rest.partition(end)[2]
        lines = [columns, ("---",) * len(columns), *rows[table]]
        body = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        text = f"{before}{start}\n{body}\n{end}{after}"
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_tables()

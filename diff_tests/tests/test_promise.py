"""A campaign of ten thousand cases reaches everything that the model knows, on every release; the README lists it all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sim.refusals
from diff_tests.behaviours import TABLE
from diff_tests.coverage import accepted_kind_sets
from diff_tests.tests.promise import kind_rows, long_campaign, refusal_rows, table_in_readme
from sim.releases import NEWEST, RELEASES

FOR_WORKERS = {name for name, behaviour in TABLE.items() if behaviour.needs_worker}

RARE = {"preempted after a copy", "external tokens given up for a hit inside a block"}
"""Conjunctions so rare that ten thousand cases of one release may miss them; those of all releases together must not."""


@pytest.mark.parametrize("release", RELEASES)
def test_every_behaviour_is_reached(release: str) -> None:
    assert sorted(set(long_campaign(release).at_zero) - FOR_WORKERS - RARE) == []


def test_what_is_rare_is_reached_on_some_release() -> None:
    assert {name for name in RARE if not any(long_campaign(release).counts[name] for release in RELEASES)} == set()


@pytest.mark.parametrize("release", RELEASES)
def test_every_kind_and_every_pair_shows_cases_hits_refusals_and_preemptions(release: str) -> None:
    missing = long_campaign(release).kinds_at_zero
    elsewhere = [long_campaign(other).kinds_at_zero for other in RELEASES if other != release]
    # A pair's pool may never be short in the cases of one release; on another it must be.
    short = ("refused", "preemptions")
    assert [line for line in missing if not line.endswith(short) or all(line in lines for lines in elsewhere)] == []


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_is_refused_without_a_known_reason(release: str) -> None:
    assert long_campaign(release).refusals.keys() <= {row[0] for row in refusal_rows()}


def test_the_readme_lists_every_behaviour_and_what_it_says_was_seen() -> None:
    rows = table_in_readme("behaviours")
    assert [row[1] for row in rows] == list(TABLE), "run `python -m diff_tests.tests.promise`"
    assert [row[0] for row in rows] == [behaviour.section for behaviour in TABLE.values()]
    unpromised = {name for name, behaviour in TABLE.items() if not behaviour.promised}
    assert {row[1] for row in rows if row[3] == "0"} <= unpromised | RARE


def test_the_readme_lists_every_kind_and_pair_and_every_refusal() -> None:
    names = [" + ".join(kinds) for kinds in accepted_kind_sets(RELEASES[NEWEST])]
    rows = table_in_readme("kinds")
    assert [row[0] for row in rows] == names, "run `python -m diff_tests.tests.promise`"
    assert not any("0" in row[:3] for row in rows)
    assert table_in_readme("refusals") == list(refusal_rows())


def test_every_reason_for_a_refusal_is_in_the_table() -> None:
    source = Path(sim.refusals.__file__).read_text(encoding="utf-8")
    reasons = set(re.findall(r'message="([^"]+)"', source))
    assert reasons
    assert reasons == {row[0] for row in refusal_rows()}


def test_the_tables_count_the_newest_release() -> None:
    assert [row[0] for row in kind_rows(long_campaign(NEWEST))] == [row[0] for row in table_in_readme("kinds")]

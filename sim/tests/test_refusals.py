"""Configurations that vLLM refuses, release by release."""

from __future__ import annotations

import pytest

from sim.history import Refusal
from sim.refusals import refusal
from sim.releases import RELEASES
from sim.scenario import parse
from sim.simulator import Simulator

FULL = {"kind": "full", "block": 4}
WINDOW = {"kind": "sliding_window", "block": 4, "window": 8}
CIRCULAR = {"kind": "circular", "block": 4}
MAMBA = {"kind": "mamba", "block": 64}
REPLAYED = {**WINDOW, "kind": "sliding_window_mla", "bounded_replay": True}
ALL = frozenset(RELEASES)
OLD = frozenset({"0.29.0", "0.30.0"})
NEWEST = frozenset({"0.33.0"})
DRAFTS = {"method": "draft_model", "tokens": 2}

# Engine settings, groups, releases that refuse them, type of the exception.
CASES = [
    ({"chunked_prefill": False, "max_num_batched_tokens": 63}, [FULL], ALL, "ValidationError"),
    ({"max_num_batched_tokens": 15}, [FULL], ALL, "ValidationError"),
    ({"long_prefill_token_threshold": 65}, [FULL], ALL, "ValidationError"),
    ({"retention_interval": 4}, [FULL], ALL, "ValueError"),
    ({"retention_interval": 6}, [FULL, WINDOW], ALL, "ValueError"),
    ({"retention_interval": 8}, [FULL, WINDOW], frozenset(), ""),
    ({"prefix_match_unit": 2}, [FULL], frozenset({"0.32.0", "0.33.0"}), "ValueError"),
    ({"prefix_match_unit": 3}, [FULL, WINDOW], ALL, "ValueError"),
    ({"dcp": 2}, [FULL, WINDOW], OLD, "AssertionError"),
    ({"dcp": 2, "prefix_caching": False}, [WINDOW], OLD, "AssertionError"),
    ({"dcp": 2}, [FULL, CIRCULAR], OLD, "AssertionError"),
    ({"dcp": 2, "prefix_caching": False}, [FULL, CIRCULAR], frozenset(), ""),
    ({"dcp": 2}, [FULL], frozenset(), ""),
    ({"dcp": 2, "prefix_caching": False}, [FULL, {**FULL, "dcp_sharded": False}], OLD, "Unsupported"),
    ({"max_num_batched_tokens": 16, "speculative": {"method": "eagle", "tokens": 16}}, [FULL], NEWEST, "ValueError"),
    ({"max_num_batched_tokens": 17, "speculative": {"method": "eagle", "tokens": 16}}, [FULL], frozenset(), ""),
    ({"max_num_batched_tokens": 16, "speculative": {"tokens": 16}}, [FULL], frozenset(), ""),
    ({"max_num_batched_tokens": 1, "max_num_seqs": 1, "speculative": DRAFTS}, [FULL], ALL, "ValueError"),
    ({}, [FULL, MAMBA], ALL, "AssertionError"),
    ({"long_prefill_token_threshold": 8, "long_prefill_adaptive": True}, [FULL], OLD, "ValidationError"),
    ({"async_scheduling": True, "speculative": {"tokens": 2}}, [FULL], ALL - NEWEST, "ValidationError"),
    ({}, [FULL, {**MAMBA, "block": 4, "mode": "all"}], frozenset({"0.32.0", "0.33.0"}), "ValidationError"),
    ({}, [FULL, {**MAMBA, "block": 4, "mode": "align"}], frozenset(), ""),
    ({}, [FULL, REPLAYED], OLD, "TypeError"),
    ({}, [CIRCULAR, CIRCULAR], ALL, "AssertionError"),
    ({"retention_interval": 8}, [FULL, {**REPLAYED, "bounded_replay": False}], frozenset(), ""),
    ({"dcp": 2}, [FULL, {**MAMBA, "block": 8, "mode": "align"}], frozenset(), ""),
    ({"dcp": 2}, [{**MAMBA, "block": 8, "mode": "align"}], OLD, "AssertionError"),
    ({"prefix_caching": False}, [FULL, MAMBA], frozenset(), ""),
]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("engine", "groups", "releases", "kind"), CASES)
def test_what_is_refused(engine: dict, groups: list, releases: frozenset[str], kind: str, release: str) -> None:
    raw = {"kvoracle": 1, "engine": {"blocks": 40, "max_model_len": 64, **engine}, "groups": groups, "steps": []}
    found = refusal(parse(raw), RELEASES[release])
    assert (found.type if found is not None else "") == (kind if release in releases else "")


@pytest.mark.parametrize("release", sorted(ALL - OLD))
def test_windows_that_are_computed_again_must_be_equal(release: str) -> None:
    groups = [FULL, REPLAYED, {**REPLAYED, "window": 9}]
    found = refusal(parse({"kvoracle": 1, "engine": {"blocks": 40}, "groups": groups, "steps": []}), RELEASES[release])
    assert found is not None
    assert found.type == "AssertionError"


@pytest.mark.parametrize("release", RELEASES)
def test_only_old_workers_refuse_to_split_blocks_between_pages_of_other_sizes(release: str) -> None:
    groups = [{**FULL, "kernel_block": 2}, {**FULL, "head_size": 64}]
    raw = {"kvoracle": 1, "engine": {"blocks": 40}, "groups": groups, "steps": []}
    assert refusal(parse(raw), RELEASES[release]) is None  # without a connector there is no worker
    found = refusal(parse({**raw, "connector": {"name": "DecodeBenchConnector"}}), RELEASES[release])
    assert (found is not None and found.type == "ValueError") == (release in {"0.29.0", "0.30.0", "0.31.0"})
    # The page that is as large as all others of a block together leaves no gap.
    groups = [FULL, {**FULL, "head_size": 64, "kernel_block": 2}]
    assert (
        refusal(parse({**raw, "groups": groups, "connector": {"name": "DecodeBenchConnector"}}), RELEASES[release]) is None
    )


def test_the_direct_driver_has_no_scheduler_that_would_refuse() -> None:
    raw = {"kvoracle": 1, "driver": "direct", "engine": {"blocks": 40, "retention_interval": 5}, "groups": [FULL]}
    assert refusal(parse({**raw, "steps": []}), RELEASES["0.33.0"]) is None
    raw["engine"] = {"blocks": 40, "max_num_batched_tokens": 3}
    assert refusal(parse({**raw, "steps": []}), RELEASES["0.33.0"]) is not None


def test_a_refusal_is_the_only_record() -> None:
    raw = {"kvoracle": 1, "engine": {"blocks": 40, "retention_interval": 5}, "groups": [FULL], "steps": [{"run": 5}]}
    (record,) = Simulator(parse(raw)).history()
    assert isinstance(record, Refusal)

"""Scenarios that several tests of the target share."""

from __future__ import annotations

from typing import Any

from sim.scenario import Scenario, parse

FULL = {"kind": "full", "block": 16}
DECODE_BENCH = {"name": "DecodeBenchConnector"}


def scenario(steps: list[Any], groups: list[Any] | None = None, connector: Any = DECODE_BENCH, **engine: Any) -> Scenario:
    """A scenario over one full attention group and 300 blocks, unless told otherwise."""
    engine = {"blocks": 300, "max_model_len": 2048, **engine}
    return parse({"kvoracle": 1, "engine": engine, "connector": connector, "groups": groups or [FULL], "steps": steps})


def add(request_id: str, *prompt: tuple[str, int], max_tokens: int = 4) -> dict[str, Any]:
    """An `add` step."""
    return {"add": {"id": request_id, "prompt": [list(span) for span in prompt], "max_tokens": max_tokens}}


def three_requests(**changes: Any) -> Scenario:
    """A prompt of 1,621 tokens; one that shares 1,616 of them when it is gone; a replay while that one lives."""
    return scenario(
        [
            add("A", ("sys", 1616), ("a", 5)),
            {"run": 100},
            add("B", ("sys", 1616), ("b", 5)),
            {"step": 1},
            add("C", ("sys", 1616), ("a", 5)),
            {"run": 100},
        ],
        **changes,
    )

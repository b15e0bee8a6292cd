"""Reads a scenario out of any file that holds one: a scenario, a corpus case, a saved failure. Needs the model only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sim.scenario import Scenario, ScenarioError, loads, parse

_FAILURE_START = b'{"kvoracle_failure"'


def load_scenario(path: str | Path) -> Scenario:
    """The scenario of a file; of a saved failure, the reduced one if there is one. Raises ScenarioError, OSError."""
    if is_failure(path):
        raw = _failure_data(Path(path).read_bytes())
        return parse(raw.get("reduced") or raw.get("scenario"))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScenarioError("$", f"not a text file: {error.reason} at byte {error.start}") from None
    if is_corpus_case(text):
        raw = read_yaml(text)
        return parse(raw.get("scenario"))
    return loads(text)


def is_failure(path: str | Path) -> bool:
    """Whether the file is a failure saved by a campaign, by its first bytes. Raises OSError."""
    with Path(path).open("rb") as file:
        return file.read(len(_FAILURE_START)) == _FAILURE_START


def is_corpus_case(text: str) -> bool:
    """Whether a file's text is a corpus case rather than a bare scenario."""
    return any(line.startswith("expect:") for line in text.splitlines())


def read_yaml(text: str) -> dict[str, Any]:
    """A YAML mapping. Raises ScenarioError."""
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or "cannot be parsed"
        raise ScenarioError("$", f"not valid YAML{place}: {reason}") from None
    if not isinstance(raw, dict):
        raise ScenarioError("$", "expected a mapping")
    return raw


def _failure_data(data: bytes) -> dict[str, Any]:
    try:
        raw = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ScenarioError("$", f"not valid JSON: {error}") from None
    assert isinstance(raw, dict)  # it starts with a brace
    return raw

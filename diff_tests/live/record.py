"""The command line of a server with the probe in place."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

PROBE = "kvprobe"
_OPTION = "--kv-transfer-config"
_PREFIX = "Probe_"


class RecordError(ValueError):
    """A server command that cannot be probed; the message says what to change."""


@dataclass(frozen=True)
class Recording:
    """A command to run, with a folder that Python finds the probe in. environment: what to set besides."""

    command: list[str]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": str(self.folder) + (os.pathsep + before if before else "")}

    def shell(self) -> str:
        """For a shell, wherever the folder is there."""
        folder = shlex.quote(str(self.folder))
        return f'PYTHONPATH={folder}"${{PYTHONPATH:+:$PYTHONPATH}}" {shlex.join(self.command)}'


def probe_text() -> str:
    """The probe, as one file."""
    return files("diff_tests.vllm_target").joinpath(f"{PROBE}.py").read_text(encoding="utf-8")


def prepare(arguments: Sequence[str], folder: Path, options: dict[str, Any], connector: str | None = None) -> Recording:
    """arguments: of `vllm serve`, or a whole command that starts a server. options: of the probe. connector: where the
    arguments name none. Writes the probe into the folder. Raises RecordError, OSError."""
    folder = folder.absolute()
    settings = {"dir": str(folder), **options}
    command = list(arguments)
    if not command:
        raise RecordError("what to record? Give the arguments of `vllm serve` after --")
    if _is_argument(command[0]):
        command = ["vllm", "serve", *command]
    place, text = _transfer_config(command)
    if place is None:
        if connector is None:
            raise RecordError(
                f"the server has no {_OPTION}, and the probe watches a KV connector; give one, or --connector NAME, "
                "such as DecodeBenchConnector"
            )
        command += [_OPTION, json.dumps(probed({"kv_connector": connector, "kv_role": "kv_both"}, settings))]
    else:
        try:
            config = json.loads(text)
        except ValueError as error:
            raise RecordError(f"{_OPTION}: not valid JSON: {error}") from None
        if not isinstance(config, dict) or not config.get("kv_connector"):
            raise RecordError(f"{_OPTION}: names no kv_connector")
        value = json.dumps(probed(config, settings))
        command[place] = f"{_OPTION}={value}" if command[place].startswith(f"{_OPTION}=") else value
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.jsonl")):
        raise RecordError(f"{folder} has a trace already; name another folder with --dir")
    (folder / f"{PROBE}.py").write_text(probe_text(), encoding="utf-8")
    return Recording(command, folder)


def probed(config: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """A KV transfer config with the probe in place; of MultiConnector, its children."""
    extra = dict(config.get("kv_connector_extra_config") or {})
    children = extra.get("connectors")
    if config["kv_connector"] == "MultiConnector" and isinstance(children, list):
        extra["connectors"] = [probed(child, settings) for child in children]
        return {**config, "kv_connector_extra_config": extra}
    # A registered connector keeps its name: vLLM treats some names specially. A class of one's own is named in full.
    name, module = str(config["kv_connector"]), config.get("kv_connector_module_path")
    if module == PROBE:
        raise RecordError(f"{name} is probed already")
    extra[PROBE] = settings
    full_name = f"{_PREFIX}{module}.{name}" if module else name
    return {
        **config,
        "kv_connector": full_name,
        "kv_connector_module_path": PROBE,
        "kv_connector_extra_config": extra,
    }


def _is_argument(word: str) -> bool:
    """Whether the words begin with the arguments of `vllm serve` rather than with a program."""
    program = Path(word).name
    return not (program in ("vllm", "env", "uv", "torchrun") or program.startswith("python"))


def _transfer_config(command: Sequence[str]) -> tuple[int | None, str]:
    """(place of the value, value) of the option; the place is None without it. Raises RecordError."""
    for i, word in enumerate(command):
        if word == _OPTION:
            if i + 1 == len(command):
                raise RecordError(f"{_OPTION} needs a value")
            return i + 1, command[i + 1]
        if word.startswith(f"{_OPTION}="):
            return i, word.partition("=")[2]
        if word.startswith(f"{_OPTION}."):
            raise RecordError(f"{word}: give the settings as one JSON value of {_OPTION}")
    return None, ""

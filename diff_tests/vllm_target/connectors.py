"""`--connector`: the connector under test, instead of the one that a scenario names.

A registered name, `module:Class`, or a `.py` file that takes the place of the installed connector's file.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from diff_tests.vllm_target.releases import TargetInputError
from sim.scenario import Scenario

# CPython 3.11 counts the depth of a syntax tree for all threads together, and raises SystemError if two build one at once.
_PARSING = threading.Lock()


def is_file(connector: str) -> bool:
    """Whether a `--connector` argument means a file."""
    return connector.endswith(".py")


def check_file(connector: str) -> None:
    """Fails early, without starting vLLM, where the file cannot be read or parsed. Raises TargetInputError."""
    _parse(connector)


def contract_name(connector: str) -> str | None:
    """The name by which the oracle looks up the contract: the class name. None for a file: that of the scenario."""
    return None if is_file(connector) else connector.rpartition(":")[2]


def with_connector(scenario: Scenario, name: str | None) -> Scenario:
    """The scenario with another connector in place of its own; without one it stays without."""
    if name is None or scenario.connector is None or scenario.connector.name == name:
        return scenario
    return replace(scenario, connector=replace(scenario.connector, name=name))


def defined_classes(path: str) -> set[str]:
    """Names of the classes that a connector file defines. Raises TargetInputError."""
    return {node.name for node in _parse(path).body if isinstance(node, ast.ClassDef)}


def _parse(path: str) -> ast.Module:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise TargetInputError(f"--connector {path}: {error.strerror}") from None
    try:
        with _PARSING:
            return ast.parse(source, filename=path)
    except SyntaxError as error:
        raise TargetInputError(f"--connector {path}, line {error.lineno}: {error.msg}") from None
    except ValueError as error:
        raise TargetInputError(f"--connector {path}: {error}") from None


# ------------------------------------------------------------------------------------------- in the child, beside vLLM


class Installed(NamedTuple):
    """The connector under test. name: for vLLM's configuration, instead of each scenario's own; None to keep those.
    replaces: the registered name that a file stands for."""

    name: str | None = None
    replaces: str | None = None


def install(connector: str | None) -> Installed:
    """Makes vLLM use the connector. Raises TargetInputError where there is none or its code does not import."""
    if connector is None:
        return Installed()
    if is_file(connector):
        return Installed(replaces=_install_file(connector))
    if ":" in connector:
        return Installed(_import_class(connector))
    if connector not in _registered():
        raise TargetInputError(f"--connector {connector}: not registered; known: {', '.join(sorted(_registered()))}")
    return Installed(connector)


def file_of(connector: str) -> str:
    """The file in which a connector is defined. Raises TargetInputError."""
    if is_file(connector):
        return connector
    homes = _homes()
    module_path = connector.partition(":")[0] if ":" in connector else homes.get(connector, ("", ""))[0]
    spec = importlib.util.find_spec(module_path) if module_path else None
    if spec is None or spec.origin is None:
        raise TargetInputError(f"--connector {connector}: no source file; known: {', '.join(sorted(homes))}")
    return spec.origin


def _registered() -> dict[str, Any]:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory._registry


def _import_class(connector: str) -> str:
    module_path, _, class_name = connector.partition(":")
    try:
        module = importlib.import_module(module_path)
    except Exception as error:
        raise TargetInputError(f"--connector {connector}: {type(error).__name__}: {error}") from None
    if not hasattr(module, class_name):
        raise TargetInputError(f"--connector {connector}: module {module_path} has no class {class_name}")
    return connector


def _install_file(path: str) -> str:
    """Loads the file as the module that the registered connector lives in, so that vLLM finds it in its place. Returns the
    registered name."""
    defined = defined_classes(path)
    names = sorted(name for name, (_, class_name) in _homes().items() if class_name in defined)
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise TargetInputError(f"--connector {path}: must define one connector that vLLM registers, found {found}")
    module_path, _ = _homes()[names[0]]
    spec = importlib.util.spec_from_file_location(module_path, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_path] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f", line {lines[-1]}" if lines else ""
        raise TargetInputError(f"--connector {path}{where}: {type(error).__name__}: {error}") from None
    return names[0]


def _homes() -> dict[str, tuple[str, str]]:
    """(module path, class name) by registered name. vLLM keeps them in the closures of its lazy loaders."""
    homes = {}
    for name, loader in _registered().items():
        kept = inspect.getclosurevars(loader).nonlocals
        if "module_path" in kept and "class_name" in kept:
            homes[name] = (kept["module_path"], kept["class_name"])
    return homes

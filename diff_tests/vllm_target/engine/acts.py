"""The order in which the worker of an engine acts on KV memory: zero, copy, fill, forward, as they happen.

vLLM's own functions tell when they run; what they do stays the same. One worker a process, so one log a process.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from sim.history import Act

_RUNNERS = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")


class ActLog:
    """The acts of the step under way. What a model does outside a step, to warm up, does not count."""

    def __init__(self) -> None:
        self._acts: list[Act] = []
        self._is_bound = False

    def note(self, act: Act) -> None:
        """The worker does this now. A forward pass is a step's only with metadata bound; zeroing and copies come before."""
        if self._is_bound or act in ("zero", "copy"):
            self._acts.append(act)

    def bind(self) -> None:
        """The worker is given the metadata of a step."""
        self._is_bound = True

    def take(self) -> list[Act]:
        """The acts of the step, which ends here."""
        acts, self._acts, self._is_bound = self._acts, [], False
        return acts


LOG = ActLog()


def watch() -> None:
    """Has vLLM's functions tell the log, in this process. Done again, it changes nothing."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.platforms import current_platform
    from vllm.v1.worker import utils

    original = utils.copy_kv_cache_blocks_inplace
    copy: Any = _told("copy", original)
    for module in (utils, *(sys.modules[name] for name in _RUNNERS if name in sys.modules)):
        if getattr(module, "copy_kv_cache_blocks_inplace", None) is original:
            module.copy_kv_cache_blocks_inplace = copy  # type: ignore[attr-defined]
    _tell(utils.KVBlockZeroer, "zero_block_ids")
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        _tell(CPUModelRunner, "_zero_block_ids")
    _watch_models(BaseModelLoader)


def _tell(kind: Any, name: str) -> None:
    setattr(kind, name, _told("zero", getattr(kind, name)))


def _told(act: Act, function: Any) -> Any:
    if hasattr(function, "_kvoracle_told"):
        return function

    @functools.wraps(function)
    def told(*args: Any, **rest: Any) -> Any:
        LOG.note(act)
        return function(*args, **rest)

    told._kvoracle_told = True  # type: ignore[attr-defined]
    return told


def _watch_models(loader: Any) -> None:
    """The forward pass of a model tells when it begins."""
    load = loader.load_model
    if hasattr(load, "_kvoracle_told"):
        return

    @functools.wraps(load)
    def load_model(*args: Any, **rest: Any) -> Any:
        model = load(*args, **rest)
        model.register_forward_pre_hook(lambda *_: LOG.note("forward"))
        return model

    load_model._kvoracle_told = True  # type: ignore[attr-defined]
    loader.load_model = load_model

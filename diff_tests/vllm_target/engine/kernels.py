"""Stands in for the kernels of a CPU where the build of vLLM has none.

Releases without a CPU build are official wheels, whose engine starts on a CPU if told to but lacks what is compiled for it.
Models of ours compute nothing, so little is called, and none of it decides a block; models that compute do not run there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

_SLOTS = "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, int size) -> ()"
_KERNELS: dict[str, Callable[..., Any]] = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(dim=-1),
    _SLOTS: lambda *_: None,  # nobody reads the slots that tokens would be written to
}
_library: Any = None  # what it defines lives as long as it does


def stand_in() -> None:
    """Defines what an engine on a CPU calls of them though its model computes nothing. Done again, it changes nothing."""
    global _library
    if _library is not None or importlib.util.find_spec("vllm._C") is not None:
        return
    import torch

    _library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, function in _KERNELS.items():
        _library.define(schema)
        _library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")

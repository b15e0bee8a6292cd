"""What a vLLM process needs of us to run the engines of `e2e`: a general plugin, loaded in each of its processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Makes the synthetic model known, steps around what a CPU cannot compute, has the worker tell what it does, puts the
    connector in place."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform

    from diff_tests.e2e.models import SYNTHETIC_ARCHITECTURE
    from diff_tests.vllm_target import connectors
    from diff_tests.vllm_target.api_server import CONNECTOR_VARIABLE
    from diff_tests.vllm_target.engine import acts, kernels
    from diff_tests.vllm_target.engine.synthetic import KVOracleForCausalLM
    from diff_tests.vllm_target.platforms import look_at_models_here

    look_at_models_here()
    ModelRegistry.register_model(SYNTHETIC_ARCHITECTURE, KVOracleForCausalLM)
    if current_platform.is_cpu():
        _let_attention_take_small_blocks()
        _let_mamba2_prefill()
        _let_ranks_share_a_context()
        kernels.stand_in()
    acts.watch()
    connectors.install(os.environ.get(CONNECTOR_VARIABLE))


def _let_attention_take_small_blocks() -> None:
    """Blocks of 16 tokens: its kernels on a CPU compute with them as well, only not at their best."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    attention: Any = CPUAttentionBackend
    attention.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])


def _let_mamba2_prefill() -> None:
    """Lets Mamba2 prefills go through on a CPU.

    A prefill that crosses a block boundary wants the state after each chunk, to keep the one at the boundary. The kernel
    for CPUs gives the state after each request, whatever it is asked for, and keeping one takes Triton: the engine dies.
    What states hold is not judged here, so neither needs to be right.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    mixer: Any = mamba_mixer2
    if hasattr(mixer, "store_prefill_checkpoint"):
        mixer.mamba_chunk_scan_combined_varlen = _by_chunk(mixer.mamba_chunk_scan_combined_varlen)
        mixer.store_prefill_checkpoint = lambda *_, **__: None


def _let_ranks_share_a_context() -> None:
    """Lets decode context parallelism run on a CPU: no kernel there works out the slots of a rank's tokens. Only a model
    that computes nothing gets that far, and it reads no slots."""
    from vllm.v1.worker.block_table import BlockTable

    table: Any = BlockTable
    compute = table.compute_slot_mapping

    @functools.wraps(compute)
    def compute_slot_mapping(self: Any, *args: Any, **rest: Any) -> None:
        if self.dcp_world_size == 1:
            compute(self, *args, **rest)

    table.compute_slot_mapping = compute_slot_mapping


def _by_chunk(scan: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scan)
    def states_by_chunk(*args: Any, return_intermediate_states: bool = False, **rest: Any) -> Any:
        states = scan(*args, **rest)
        if not return_intermediate_states:
            return states
        num_chunks = len(rest["cu_chunk_seqlens"]) - 1
        by_chunk = states.new_zeros(num_chunks, *states.shape[1:])
        by_chunk[rest["last_chunk_indices"]] = states
        return by_chunk

    return states_by_chunk

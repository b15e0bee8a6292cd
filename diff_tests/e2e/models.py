"""The models of `e2e`: tiny, with made-up weights, one for each way in which an architecture groups its KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYNTHETIC_ARCHITECTURE = "KVOracleForCausalLM"
SYNTHETIC_GROUPS_KEY = "kvoracle_groups"
"""What the synthetic model's config.json has beside the usual: its KV cache groups, as in a scenario."""

VOCABULARY_SIZE = 1 << 15
MAX_MODEL_LEN = 2048
"""Tokens; the longest prompt of the matrix has 1,621."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}
# Experts where an architecture has no layers without them.
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Model:
    """A model by the name that `--model` takes. config: its config.json. block: tokens in a block of its engine.
    settings: further engine arguments."""

    name: str
    about: str
    config: Mapping[str, Any]
    block: int = 32
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def computes(self) -> bool:
        """Whether it has layers that compute, and so needs kernels."""
        return SYNTHETIC_ARCHITECTURE not in self.config["architectures"]

    @property
    def tokens_per_entry(self) -> int:
        """Tokens that an entry of a block table stands for: a block on each rank that shares a context."""
        ranks: int = self.settings.get("decode_context_parallel_size", 1)
        return self.block * ranks


def _model(name: str, about: str, architecture: str, model_type: str, config: dict[str, Any], **rest: Any) -> Model:
    return Model(name, about, {**_COMMON, "architectures": [architecture], "model_type": model_type, **config}, **rest)


_REAL_MODELS = (
    _model(
        "qwen3",
        "full attention",
        "Qwen3ForCausalLM",
        "qwen3",
        {"num_hidden_layers": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        block=16,
    ),
    _model(
        "cohere2",
        "three groups of sliding window attention and one of full attention",
        "Cohere2ForCausalLM",
        "cohere2",
        {"num_hidden_layers": 4, "sliding_window": 128, "num_key_value_heads": 2},
    ),
    _model(
        "llama4",
        "chunked local attention and full attention",
        "Llama4ForCausalLM",
        "llama4_text",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "attention_chunk_size": 128,
            "interleave_moe_layer_step": 4,
            "pad_token_id": 0,
        },
    ),
    _model(
        "granite",
        "Mamba states and full attention",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            "num_hidden_layers": 2,
            "layer_types": ["mamba", "attention"],
            "num_key_value_heads": 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 2,
            "mamba_d_head": 32,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
            "mamba_expand": 1,
            "tie_word_embeddings": True,
        },
    ),
    _model(
        "nemotron_h",
        "Mamba states and full attention",
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            "num_key_value_heads": 2,
            "hybrid_override_pattern": "M*",
            "num_hidden_layers": 2,
            "mamba_num_heads": 2,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
    _model(
        "qwen3_next",
        "linear attention and full attention",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **_EXPERTS,
            # The kernel of linear attention has few head sizes. A state has to fit into a page of full attention.
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_hidden_layers": 4,
            "num_experts": 2,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        block=64,
    ),
    _model(
        "deepseek_v2",
        "multi-head latent attention",
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_EXPERTS,
            "num_hidden_layers": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
        },
        block=16,
    ),
)


def _synthetic(name: str, about: str, groups: list[dict[str, Any]], **settings: Any) -> Model:
    config = {
        **_COMMON,
        "architectures": [SYNTHETIC_ARCHITECTURE],
        "model_type": "qwen3",
        "num_hidden_layers": 1,
        SYNTHETIC_GROUPS_KEY: groups,
    }
    return Model(name, about, config, block=groups[0]["block"], settings=settings)


_SYNTHETIC_MODELS = (
    _synthetic(
        "rings",
        "synthetic: full attention, a sliding window and circular buffers, block 16",
        [
            {"kind": "full", "block": 16},
            {"kind": "sliding_window", "block": 16, "window": 40},
            {"kind": "circular", "block": 16},
        ],
    ),
    _synthetic(
        "kernel_blocks",
        "synthetic: blocks of 32 tokens in kernel blocks of 16",
        [
            {"kind": "full", "block": 32, "kernel_block": 16},
            {"kind": "sliding_window", "block": 32, "window": 64, "kernel_block": 16},
        ],
    ),
    _synthetic(
        "dcp",
        "synthetic: full attention over two ranks of decode context parallelism",
        [{"kind": "full", "block": 16, "layers": 2}],
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
    ),
)

MODELS = {model.name: model for model in (*_REAL_MODELS, *_SYNTHETIC_MODELS)}
DEFAULT_MODELS = ("qwen3", "granite")


def chosen_models(names: Sequence[str]) -> list[Model]:
    """The models of these names, in their own order; `all` is every one, none given the default. Raises ValueError."""
    unknown = [name for name in names if name not in MODELS and name != "all"]
    if unknown:
        raise ValueError(f"--model {unknown[0]}: no such model; known: {', '.join(MODELS)}, or all")
    wanted = MODELS if "all" in names else names or DEFAULT_MODELS
    return [model for model in MODELS.values() if model.name in wanted]

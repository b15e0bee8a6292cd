"""What a case may use, and what has been decided about it so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diff_tests.generate.chooser import Chooser
from sim.releases import Rules
from sim.scenario import AnyGroup, Span, Speculative


@dataclass(frozen=True)
class Feature:
    """Something a case may use: how often, and whether a release knows it."""

    probability: float
    allowed: Callable[[Rules], bool] = lambda rules: True


FEATURES: dict[str, Feature] = {
    "direct": Feature(0.12),
    "connector": Feature(0.5),
    "scripted": Feature(0.4),
    "async_loads": Feature(0.5),
    "failed_loads": Feature(0.4),
    "no_prefix_caching": Feature(0.1),
    "several_groups": Feature(0.6),
    "mixed_blocks": Feature(0.35),
    "checkpoints": Feature(0.5),
    "dcp": Feature(0.15),
    "dcp_replicated": Feature(0.1, lambda rules: rules.dcp_sharded_flag),
    "priority": Feature(0.3),
    "async_scheduling": Feature(0.3),
    "speculative": Feature(0.25),
    "draft_groups": Feature(0.4),
    "chunked_off": Feature(0.15),
    "long_prefill": Feature(0.25),
    "long_prefill_adaptive": Feature(0.3, lambda rules: rules.long_prefill_threshold_adapts),
    "prefill_interval": Feature(0.12),
    "small_budget": Feature(0.5),
    "few_seqs": Feature(0.25),
    "watermark": Feature(0.15),
    "gate_off": Feature(0.3),
    "retention_dense": Feature(0.3),
    "retention_interval": Feature(0.3),
    "match_unit": Feature(0.3),
    "tight_pool": Feature(0.6),
    "pool_below_smallest": Feature(0.04),
    "refused": Feature(0.02),
    "roomy_length": Feature(0.2),
    "layers": Feature(0.4),
    "uniform": Feature(0.08),
    "kernel_blocks": Feature(0.2),
    "other_dtype": Feature(0.3),
    "mixed_dtypes": Feature(0.15),
    "other_mean": Feature(0.3),
    "random_fill": Feature(0.06),
    "startup_fill": Feature(0.06),
    "sharing": Feature(0.85),
    "bursts": Feature(0.5),
    "phases": Feature(0.35),
    "halves": Feature(0.3),
    "pauses": Feature(0.12),
    "aborts": Feature(0.25),
    "resets": Feature(0.25),
    "reused_ids": Feature(0.3),
    "salts": Feature(0.1),
    "loras": Feature(0.07),
    "skip_cache": Feature(0.1),
    "embeds": Feature(0.06),
    "encoder": Feature(0.04),
    "kv_events": Feature(0.25),
}


@dataclass
class RequestDraft:
    """A request to come. external, load: what the scripted connector has for it."""

    prompt: tuple[Span, ...]
    max_tokens: int
    salt: str | None = None
    lora: str | None = None
    priority: int = 0
    skip_cache: bool = False
    external: int | None = None
    loads_later: bool = False
    embeds: bool = False
    encoder: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(span.count for span in self.prompt)


@dataclass
class Draft:
    """What has been decided so far. Sizes are in tokens. `on`: names out of FEATURES."""

    chooser: Chooser
    rules: Rules
    on: frozenset[str]
    base_block: int = 16
    dcp: int = 1
    max_model_len: int = 0
    speculative: Speculative | None = None
    replayed_window: int = 1
    requests: list[RequestDraft] = field(default_factory=list)
    groups: tuple[AnyGroup, ...] = ()

    def near_multiple(self, unit: int, most: int) -> int:
        """k * unit, or one beside it, or anything up to most * unit; at least 1."""
        exact = self.chooser.integer(1, most) * unit
        return max(1, exact + self.chooser.one_of((0, 0, 1, -1, 0, 1, -1, self.chooser.integer(-unit, unit))))

    @property
    def num_drafted(self) -> int:
        """Tokens drafted per request and step."""
        return self.speculative.tokens if self.speculative else 0

    @property
    def is_scripted(self) -> bool:
        """Whether the scripted connector answers."""
        return {"connector", "scripted"} <= self.on and "direct" not in self.on

"""The encoder of an encoder-decoder model, as far as the scheduler knows of it: how many tokens its inputs have."""

from __future__ import annotations

from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderDecoderCacheManager

from sim.scenario import Add, Scenario


def give_encoder(scheduler: Any, scenario: Scenario) -> None:
    """What vLLM derives from such a model and its processor: that there is an encoder, and room for as many of its tokens
    in a step as for others."""
    num_tokens = scenario.engine.max_num_batched_tokens
    scheduler.is_encoder_decoder = True
    scheduler.max_num_encoder_input_tokens = num_tokens
    scheduler.encoder_cache_manager = EncoderDecoderCacheManager(cache_size=num_tokens)


def encoder_input(add: Add) -> MultiModalFeatureSpec:
    """The one input that a request brings its encoder."""
    position = PlaceholderRange(offset=0, length=add.encoder)
    return MultiModalFeatureSpec(data=None, modality="audio", identifier=add.id, mm_position=position)

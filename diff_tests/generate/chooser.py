"""Where the randomness of a generated case comes from: a seed, or Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Chooser(Protocol):
    """Where the randomness comes from."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options; earlier ones are simpler."""

    def flag(self, probability: float) -> bool:
        """True with about this probability."""


class SeededChooser:
    """A fast chooser; the same seed gives the same choices on every machine."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def integer(self, low: int, high: int) -> int:
        return low + int(self._random() * (high - low + 1))

    def one_of(self, options: Sequence[T]) -> T:
        return options[int(self._random() * len(options))]

    def flag(self, probability: float) -> bool:
        return self._random() < probability


class HypothesisChooser:
    """Choices drawn by Hypothesis, so that failures shrink. `draw` is what `st.composite` hands over."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        from hypothesis import strategies

        self._draw = draw
        self._strategies = strategies

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(self._strategies.integers(low, high)))

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def flag(self, probability: float) -> bool:
        return self.integer(0, 99) >= 100 - round(probability * 100)


def case_seed(campaign_seed: int, case_index: int) -> int:
    """The chooser's seed of one case of a campaign."""
    return (campaign_seed << 32) + case_index

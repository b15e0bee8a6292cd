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


Lineage = tuple[int, ...]
"""What a case is made from: a seed, then one for each change made to it since."""

_CHANGE_RATES = (0.3, 0.1, 0.03)


class LineageChooser(SeededChooser):
    """The choices of a seed, some of which each change makes anew. What is chosen differently may ask for more or fewer
    choices after it, so that a change may also turn all that follows into something else."""

    def __init__(self, lineage: Lineage) -> None:
        super().__init__(lineage[0])
        for seed in lineage[1:]:
            self._random = _changed(self._random, random.Random(seed).random)


def _changed(before: Callable[[], float], change: Callable[[], float]) -> Callable[[], float]:
    """Draws as before, some of them made anew: few or many, as the change has it."""
    rate = _CHANGE_RATES[int(change() * len(_CHANGE_RATES))]

    def draw() -> float:
        value = before()
        return change() if change() < rate else value

    return draw


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

"""Guided campaigns: cases that show something new are kept, and half of what comes later is made by changing them.

New is a pair of behaviours that no case showed together before. Kept cases are chosen the more often the rarer the pairs
are that they were among the first to show. All is decided in rounds: what a round is made from depends only on the rounds
up to the last but one. So any number of jobs makes the same cases, and a few never wait for each other.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from diff_tests.generate import Lineage, case_seed

CASES_PER_ROUND = 128
_ROUNDS_AHEAD = 2
_SHARE_OF_NEW = 0.5
"""Cases that are made from nothing; the others change a kept one."""
_MOST_SEEDS = 4
"""A case that was changed more often forgets its last changes but this many seeds."""
_STILL_NEW = 4
"""A pair counts for those who show it for the first, second, ... time up to this one."""
_MOST_KEPT = 2000
_UNIT = 1 << 20


class Guide(Struct, frozen=True):
    """What the cases of a round are made from: kept ones, and the sums of their weights up to each."""

    kept: list[Lineage] = []
    sums: list[int] = []

    def lineage(self, seed: int, index: int) -> Lineage:
        """What the index-th case of a campaign is made from."""
        own = case_seed(seed, index)
        draw = random.Random(f"guided {own}").random
        if not self.kept or draw() < _SHARE_OF_NEW:
            return (own,)
        chosen = self.kept[bisect_right(self.sums, int(draw() * self.sums[-1]))]
        return (*chosen[: _MOST_SEEDS - 1], own)


class _Kept(Struct):
    """A case that showed a new pair of behaviours, and the rare pairs that it showed, as places in the table of counts."""

    lineage: Lineage
    pairs: list[int]


class Guidance(Struct):
    """What a campaign has learned: it goes to disk and back. num_rounds: rounds that are taken in; counts: how often each
    pair of behaviours was seen, int32 as bytes; guides: of the rounds that may run now; seen: by case, what those showed
    whose round is not taken in yet, a bit a behaviour."""

    seed: int
    num_behaviours: int
    num_rounds: int = 0
    counts: bytes = b""
    kept: list[_Kept] = []
    guides: dict[int, Guide] = field(default_factory=lambda: {r: Guide() for r in range(_ROUNDS_AHEAD)})
    seen: dict[int, bytes] = {}

    @property
    def num_open(self) -> int:
        """Cases that may run: those of rounds that have a guide."""
        return (self.num_rounds + _ROUNDS_AHEAD) * CASES_PER_ROUND

    def guide(self, index: int) -> Guide:
        """What the index-th case is made from; of a case that is not through."""
        return self.guides[index // CASES_PER_ROUND]  # floor: its round

    def take(self, seen: Iterable[tuple[int, bytes]]) -> None:
        """What some cases showed. Rounds that are complete are taken in, in order."""
        self.seen.update(seen)
        while all(index in self.seen for index in self._round()):
            self._take_round()

    def _round(self) -> range:
        start = self.num_rounds * CASES_PER_ROUND
        return range(start, start + CASES_PER_ROUND)

    def _take_round(self) -> None:
        size = self.num_behaviours
        counts = np.frombuffer(self.counts or bytes(4 * size * size), np.int32).reshape(size, size).copy()
        guide = self.guides.pop(self.num_rounds)
        for index in self._round():
            self._take_case(guide.lineage(self.seed, index), behaviours_of(self.seen.pop(index), size), counts)
        weights = [self._weight(kept, counts) for kept in self.kept]
        if len(weights) > _MOST_KEPT:
            least = sorted(weights, reverse=True)[_MOST_KEPT]
            self.kept = [kept for kept, weight in zip(self.kept, weights, strict=True) if weight > least]
            weights = [weight for weight in weights if weight > least]
        self.counts = counts.tobytes()
        self.guides[self.num_rounds + _ROUNDS_AHEAD] = Guide([k.lineage for k in self.kept], list(accumulate(weights)))
        self.num_rounds += 1

    def _take_case(self, lineage: Lineage, shown: NDArray[np.intp], counts: NDArray[np.int32]) -> None:
        places = np.ix_(shown, shown)
        now = counts[places] + 1
        counts[places] = now
        if (now == 1).any():
            first, second = np.nonzero(np.triu(now <= _STILL_NEW))
            pairs = shown[first] * self.num_behaviours + shown[second]
            self.kept.append(_Kept(lineage, pairs.tolist()))

    def _weight(self, kept: _Kept, counts: NDArray[np.int32]) -> int:
        """Whole numbers, so that every machine chooses alike."""
        return int((_UNIT // counts.ravel()[kept.pairs].astype(np.int64)).sum())  # rounded down


def bits(shown: NDArray[np.bool_]) -> bytes:
    """What a case showed, a bit a behaviour."""
    return np.packbits(shown).tobytes()


def behaviours_of(data: bytes, num_behaviours: int) -> NDArray[np.intp]:
    """The indexes of what `bits` was given."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), count=num_behaviours))

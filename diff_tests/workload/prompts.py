"""What the rows of a trace look like to a cache: tokens for the real scheduler, prefix numbers for the model.

Token j of hash h is the same in every prompt. What a request generates is its own, so nobody shares it.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.scenario import FIRST_TOKEN

_OUTPUT_BITS = 62
"""Output tokens are numbered from here on; no hash of a trace reaches so far."""


def prompt_tokens(hash_ids: Sequence[int], num_tokens: int, hash_block_size: int) -> list[int]:
    """The prompt of a row, `num_tokens` token numbers. hash_block_size: tokens that one hash stands for."""
    tokens: list[int] = []
    for hash_id in hash_ids:
        first = FIRST_TOKEN + hash_id * hash_block_size
        tokens += range(first, first + hash_block_size)
    del tokens[num_tokens:]
    return tokens


def output_token(request_index: int, output_index: int) -> int:
    """A token generated for the request_index-th request of a trace."""
    return (1 << _OUTPUT_BITS) + (request_index << 32) + output_index


class TracePrefixes:
    """The model's prefix index over a trace: the number of a prefix follows from the trace's chained hashes and the
    place where the prefix ends, without looking at tokens. Stands in for `sim.prefix.PrefixIndex`.

    hash_block_size: tokens between two prefixes of the cache; trace_block_size: tokens that one hash of the trace stands
    for. Prompts have even numbers, prefixes that reach into outputs odd ones, each its own.
    """

    lookahead = 0

    def __init__(self, hash_block_size: int, trace_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self.trace_block_size = trace_block_size
        self._prompts: dict[int, tuple[list[int], int]] = {}
        self._num_outputs = 0

    def add(self, request_index: int, chain: list[int], num_tokens: int) -> None:
        """A prompt arrives: the numbers of its chained hashes, and its length in tokens."""
        self._prompts[request_index] = chain, num_tokens

    def remove(self, request_index: int) -> None:
        """The request has ended."""
        del self._prompts[request_index]

    def extend(
        self, prefixes: list[int], tokens: Sequence[int], request_index: int, salt: str | None, lora: str | None
    ) -> None:
        """Appends the numbers of all whole hash blocks of `tokens` that `prefixes` does not cover yet."""
        size = self.hash_block_size
        num_known, num_hashed = len(prefixes), len(tokens) // size  # whole hash blocks only
        chain, num_prompt = self._prompts[request_index]
        num_in_prompt = min(num_prompt // size, num_hashed)  # whole hash blocks only
        if num_known < num_in_prompt:
            prefixes += self.prompt_numbers(chain, num_known, num_in_prompt)
            num_known = num_in_prompt
        for _ in range(num_known, num_hashed):
            prefixes.append(2 * self._num_outputs + 1)
            self._num_outputs += 1

    def prompt_numbers(self, chain: list[int], start: int, end: int) -> list[int]:
        """Numbers of the prefixes that end with the hash blocks [start, end). A trace block that holds several ends has a
        number for each; the numbers stay dense, since a dictionary's keys should differ in their low bits."""
        size, trace_size = self.hash_block_size, self.trace_block_size
        if size % trace_size == 0:
            stride = size // trace_size  # divides evenly
            return [2 * number for number in chain[(start + 1) * stride - 1 : end * stride : stride]]
        if trace_size % size == 0:
            ends = trace_size // size  # divides evenly
            return [2 * (chain[i // ends] * ends + i % ends) for i in range(start, end)]  # floor: the block i lies in
        lasts = range((start + 1) * size - 1, end * size, size)
        return [2 * (chain[last // trace_size] * trace_size + last % trace_size) for last in lasts]  # floor: as above

"""Prefix keys: one number for each distinct prefix that requests have, whatever vLLM's hash bytes are.

The key of a prefix follows from the key of the prefix one hash block shorter, the tokens of that hash block, and what
else tells requests apart (cache salt in the first block, LoRA adapter in each). With a lookahead, the tokens that follow
count too, and the key exists once they do.
"""

from __future__ import annotations

from collections.abc import Hashable


class PrefixIndex:
    """Interns prefixes at the granularity of the hash block size, and remembers who had each first."""

    def __init__(self, hash_block_size: int, lookahead: int = 0, extras_told_apart: bool = True) -> None:
        self.hash_block_size = hash_block_size
        self.lookahead = lookahead
        self.extras_told_apart = extras_told_apart
        self._numbers: dict[Hashable, int] = {}
        self.first_owners: list[tuple[int, int]] = []
        """Per prefix number: (index of the request that had it first, tokens in the prefix)."""

    def extend(
        self, prefixes: list[int], tokens: list[int], request_index: int, salt: str | None, lora: str | None
    ) -> None:
        """Appends the numbers of all whole hash blocks of `tokens` that `prefixes` does not cover yet."""
        size = self.hash_block_size
        start = len(prefixes) * size
        while start + size + self.lookahead <= len(tokens):
            end = start + size
            parent = prefixes[-1] if prefixes else -1
            extras: tuple[str | None, ...] = (lora, None if prefixes else salt)
            if not self.extras_told_apart:
                extras = tuple(extra for extra in extras if extra is not None)
            identity = (parent, extras, *tokens[start : end + self.lookahead])
            number = self._numbers.get(identity)
            if number is None:
                number = len(self.first_owners)
                self._numbers[identity] = number
                self.first_owners.append((request_index, end))
            prefixes.append(number)
            start = end

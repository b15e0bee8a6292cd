"""Which blocks hold which tokens: read off a block table entry by entry, never from a connector's arithmetic.

A block table lists block IDs by position; the entry at position i holds the tokens [i * block size, (i + 1) * block
size). Null entries, ID 0, stand for tokens that the group does not keep.
"""

from __future__ import annotations

from collections.abc import Sequence

NULL = 0


def blocks_of_tokens(table: Sequence[int], block_size: int, start: int, end: int) -> list[int]:
    """The non-null blocks that hold at least one of the tokens [start, end), in order. Tokens beyond the table have no
    block. block_size is the effective one, in tokens."""
    if start >= end:
        return []
    return [
        block_id
        for position, block_id in enumerate(table)
        if block_id != NULL and position * block_size < end and (position + 1) * block_size > start
    ]


def state_block(table: Sequence[int], block_size: int, num_tokens: int) -> list[int]:
    """The block of the state after `num_tokens` tokens, which is where the last of them lies. Blocks before it hold
    older states, blocks after it are scratch."""
    return blocks_of_tokens(table, block_size, num_tokens - 1, num_tokens)


def whole_table(table: Sequence[int]) -> list[int]:
    """All non-null blocks: what a buffer holds depends on every slot of it."""
    return [block_id for block_id in table if block_id != NULL]

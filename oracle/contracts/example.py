"""ExampleConnector: keeps the whole blocks of a prompt in files that are named by its tokens.

A prompt that was not loaded is stored in the step of its admission; a later one that begins with the same tokens is given
them before its forward pass. It knows one group of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from oracle.contracts.keeping import Keeping
from sim.history import Move, Moves


class Example(Keeping):
    """The contract under one scenario and release."""

    name = "ExampleConnector"
    requires_kv_delivery = True
    loads_later = False

    def moves(self, metadata: Any, tokens: Mapping[str, Sequence[int]]) -> Moves | None:
        """See KeepsContent. The metadata names no request: it is the one whose tokens these are, in order of admission."""
        parts = getattr(metadata, "requests", None)
        if parts is None:
            return None
        left = dict(tokens)
        moves = Moves([], [])
        for part in parts:
            numbers = part.token_ids.tolist()
            request = next((name for name, known in left.items() if list(known[: len(numbers)]) == numbers), "")
            left.pop(request, None)
            slots = part.slot_mapping.tolist()
            # A slot is a block and an offset; the blocks come one after the other.
            blocks = [slot // self.block_sizes[0] for slot in slots[:: self.block_sizes[0]]]
            name = hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]
            move = Move(request, 0, blocks, [f"{name}/{i}" for i in range(len(blocks))])
            (moves.stores if part.is_store else moves.loads).append(move)
        return moves

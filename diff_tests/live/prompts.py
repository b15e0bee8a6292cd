"""Prompts out of digests: which requests share which prefixes is all that a trace tells, and all that block IDs need.

Two requests whose i-th hash blocks have equal digests have equal tokens up to there. So a request's tokens are those of
whoever had its longest known prefix first, and then a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sim.scenario import Span


class Tokens(NamedTuple):
    """A request's tokens as spans: its prompt, and what it generates before it goes on with a stream of its own."""

    prompt: tuple[Span, ...]
    output: tuple[Span, ...]


def prompts(requests: Iterable[tuple[str, int, Sequence[str]]], hash_block_size: int) -> dict[str, Tokens]:
    """requests: (name, tokens in the prompt, digests of all its whole hash blocks) in order of arrival."""
    owners: dict[str, tuple[str, int]] = {}  # digest -> who had that prefix first, and its tokens
    whole: dict[str, list[Span]] = {}
    found: dict[str, Tokens] = {}
    for name, num_prompt, digests in requests:
        shared = _longest_known(digests, owners)
        spans = _cut(whole[shared[0]], 0, shared[1]) if shared else []
        num_shared = shared[1] if shared else 0
        if num_shared < num_prompt:
            spans.append(Span(f"{name}.in", 0, num_prompt - num_shared))
        output = tuple(_cut(spans, num_prompt, num_shared))
        num_given = max(num_shared - num_prompt, 0)
        whole[name] = [*spans, Span(f"{name}.out", num_given, 1 << 40)]
        found[name] = Tokens(tuple(_cut(spans, 0, num_prompt)), output)
        for index, digest in enumerate(digests):
            owners.setdefault(digest, (name, (index + 1) * hash_block_size))
    return found


def _longest_known(digests: Sequence[str], owners: dict[str, tuple[str, int]]) -> tuple[str, int] | None:
    for digest in reversed(digests):
        if digest in owners:
            return owners[digest]
    return None


def _cut(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    """The tokens [start, end) of a sequence of spans; adjoining pieces of one stream become one."""
    cut: list[Span] = []
    at = 0
    for span in spans:
        first, last = max(start - at, 0), min(end - at, span.count)
        if first < last:
            piece = Span(span.stream, span.start + first, last - first)
            if cut and cut[-1].stream == piece.stream and cut[-1].start + cut[-1].count == piece.start:
                cut[-1] = cut[-1]._replace(count=cut[-1].count + piece.count)
            else:
                cut.append(piece)
        at += span.count
        if at >= end:
            break
    return cut

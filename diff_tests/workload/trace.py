"""Request traces: JSON lines with arrival time, lengths, and one hash per block of the prompt.

Equal hashes mean equal blocks. In a *chained* trace a hash stands for the whole prefix up to its block; where one hash
follows different ones, the trace is unchained and `Chains` chains it. Rows are read one by one, so memory does not grow
with the file beyond what the chains need.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class TraceError(ValueError):
    """A line that cannot be used; the message names file, line and remedy."""


class Labels(NamedTuple):
    """Names of the fields in a trace."""

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"


class Row(NamedTuple):
    """One request. timestamp in milliseconds, lengths in tokens; hash_ids: one number for each block of the prompt, the
    last one possibly partial."""

    line: int
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, hash_block_size: int, labels: Labels = Labels()) -> Iterator[Row]:  # noqa: B008  (immutable)
    """The rows of a trace file, plain or gzipped. hash_block_size: tokens that one hash stands for.

    Raises TraceError for a line that is not such a row, or whose token and hash counts contradict each other.
    """
    row_type = msgspec.defstruct(
        "TraceLine",
        [
            ("timestamp", float),
            ("input_length", int),
            ("output_length", int),
            ("hash_ids", list[int]),
        ],
        rename=dict(labels._asdict()),
    )
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(row_type)
    last_timestamp = -math.inf
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                fields = decoder.decode(line)
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                raise TraceError(f"{path}, line {number}: {error}; name other fields with --label") from None
            row = Row(number, fields.timestamp, fields.input_length, fields.output_length, fields.hash_ids)
            _check(row, path, hash_block_size, last_timestamp)
            last_timestamp = row.timestamp
            yield row


def _check(row: Row, path: Path, hash_block_size: int, last_timestamp: float) -> None:
    """Raises TraceError."""
    num_hashes = -(-row.input_length // hash_block_size)  # rounded up: the last block may be partial
    if row.input_length < 1 or row.output_length < 0:
        raise TraceError(f"{path}, line {row.line}: {row.input_length} input and {row.output_length} output tokens")
    if len(row.hash_ids) != num_hashes:
        raise TraceError(
            f"{path}, line {row.line}: {row.input_length} input tokens have {num_hashes} blocks of {hash_block_size} "
            f"tokens, but there are {len(row.hash_ids)} hashes; --hash-block says how many tokens a hash stands for"
        )
    if row.timestamp < last_timestamp:
        raise TraceError(f"{path}, line {row.line}: timestamp {row.timestamp:g} is before the line above; sort the file")


@dataclass
class Chains:
    """Numbers for prefixes: equal numbers if and only if all hashes up to there are equal.

    As long as every hash has one predecessor the numbers are the hashes themselves. num_rechained counts blocks whose
    hash had another predecessor before; new numbers are taken from below -1.
    """

    num_rechained: int = 0

    def __post_init__(self) -> None:
        self._parents: dict[int, int] = {}
        self._renamed: dict[tuple[int, int], int] = {}

    @property
    def num_prefixes(self) -> int:
        """Different prefixes so far."""
        return len(self._parents) + len(self._renamed)

    def number(self, hash_ids: list[int]) -> list[int]:
        """The numbers of a prompt's prefixes, block by block."""
        if not hash_ids:
            return []
        parents = self._parents
        num_known = len(parents)
        before = [-1, *hash_ids[:-1]]
        if list(map(parents.setdefault, hash_ids, before)) == before:
            return hash_ids
        while len(parents) > num_known:  # their predecessors may have other numbers than their hashes
            parents.popitem()
        return self._rechained(hash_ids)

    def _rechained(self, hash_ids: Sequence[int]) -> list[int]:
        numbers = []
        parent = -1
        for hash_id in hash_ids:
            number = hash_id
            if self._parents.setdefault(hash_id, parent) != parent:
                number = self._renamed.setdefault((parent, hash_id), -2 - len(self._renamed))
                self.num_rechained += 1
            numbers.append(number)
            parent = number
        return numbers

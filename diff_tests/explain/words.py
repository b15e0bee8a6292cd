"""Small pieces of sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def names(requests: Sequence[str], most: int = 3) -> str:
    """`A`, `A and B`, `A, B, C and 4 more`."""
    if len(requests) > most:
        return f"{', '.join(requests[:most])} and {len(requests) - most} more"
    return " and ".join([", ".join(requests[:-1]), requests[-1]] if len(requests) > 1 else requests)


def span(first: int, last: int) -> str:
    """`7` or `7..9`."""
    return str(first) if first == last else f"{first}..{last}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """`1..101` and `105`: numbers in their order, those that rise by one drawn together."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [span(first, last) for first, last in runs]


def count(number: int, noun: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"

"""The element a fill writes, as bytes in memory order: numbers encoded per dtype, without torch.

A fill value is exact: whoever reads memory back compares bytes, so rounding and clamping are part of the truth.
"""

from __future__ import annotations

from math import copysign, erf, exp, frexp, isnan, pi, sqrt
from typing import NamedTuple

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "raw": 1}
"""Bytes of one element. `raw` is memory without a number format of its own: pages of states, packed data."""


class FillValue(NamedTuple):
    """What a fill leaves in every element of a group's blocks.

    element: the constant as bytes in memory order; empty where values are drawn at random. dtype: a key of
    ELEMENT_BYTES. mean, std: of the distribution the values are drawn from; std 0 for a constant.
    """

    element: bytes
    dtype: str
    mean: float = 0.0
    std: float = 0.0

    @property
    def is_random(self) -> bool:
        return self.std > 0


class _Format(NamedTuple):
    """A binary float: exponent and fraction bits, exponent bias, largest finite value."""

    exponent_bits: int
    fraction_bits: int
    bias: int
    largest: float


_FORMATS = {
    "bfloat16": _Format(8, 7, 127, (2 - 2**-7) * 2.0**127),
    "float16": _Format(5, 10, 15, 65504.0),
    "float32": _Format(8, 23, 127, (2 - 2**-23) * 2.0**127),
    "fp8": _Format(4, 3, 7, 448.0),
    "fp8_e4m3": _Format(4, 3, 7, 448.0),
    "fp8_e5m2": _Format(5, 2, 15, 57344.0),
}


def encode(number: float, dtype: str) -> bytes:
    """The element nearest to `number`, ties to even, clamped to the finite range. Raises ValueError on NaN.

    `raw` memory holds no numbers: it is all zero bytes.
    """
    if isnan(number):
        raise ValueError("a fill value must be a number, found NaN")
    if dtype == "raw":
        return bytes(ELEMENT_BYTES[dtype])
    form = _FORMATS[dtype]
    magnitude = min(abs(number), form.largest)
    bits = _magnitude_bits(magnitude, form)
    if copysign(1.0, number) < 0:
        bits |= 1 << (form.exponent_bits + form.fraction_bits)
    return bits.to_bytes(ELEMENT_BYTES[dtype], "little")


def _magnitude_bits(magnitude: float, form: _Format) -> int:
    """Exponent and fraction of a finite, non-negative number. A carry out of the fraction runs into the exponent."""
    if magnitude == 0:
        return 0
    exponent = max(frexp(magnitude)[1] - 1, 1 - form.bias)  # below the smallest normal number the step stays the same
    steps = round(magnitude / 2.0 ** (exponent - form.fraction_bits))  # Python rounds ties to even
    return ((exponent + form.bias - 1) << form.fraction_bits) + steps


def clamped_moments(mean: float, std: float, dtype: str) -> tuple[float, float]:
    """Mean and deviation of normal values that were clamped to the finite range of the dtype."""
    largest = _FORMATS[dtype].largest
    low, high = ((bound - mean) / std for bound in (-largest, largest))
    below, above = (1 + erf(low / sqrt(2))) / 2, (1 - erf(high / sqrt(2))) / 2  # shares that are clamped
    if below + above == 0:
        return mean, std
    density_low, density_high = (exp(-x * x / 2) / sqrt(2 * pi) for x in (low, high))
    inside = 1 - below - above
    # Moments of the standard normal between the bounds, then the two clamped shares on the bounds themselves.
    first = density_low - density_high + low * below + high * above
    second = inside + low * density_low - high * density_high + low * low * below + high * high * above
    return mean + std * first, std * sqrt(max(second - first * first, 0.0))


def clamp(number: float, dtype: str) -> float:
    """`number` within the finite range of the dtype."""
    largest = _FORMATS[dtype].largest
    return min(max(number, -largest), largest)

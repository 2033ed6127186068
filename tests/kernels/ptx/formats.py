"""Small floating-point formats: bits to numbers and back, by their definitions."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

__all__ = ["BF16", "E4M3", "FP16", "Format"]

Array = npt.NDArray[Any]


@attrs.frozen
class Format:
    """A sign bit, so many bits of exponent and of fraction."""

    exponent_bits: int
    fraction_bits: int
    has_infinity: bool = True
    """IEEE 754's use of the largest exponent; else only the pattern of all ones is NaN."""

    @property
    def bias(self) -> int:
        """The bias of the exponent."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def nan(self) -> int:
        """The canonical NaN: all ones but the sign."""
        return (1 << (self.exponent_bits + self.fraction_bits)) - 1

    def decode(self, bits: Array) -> Array:
        """Return the numbers as float64, which holds all of them."""
        bits = bits.astype(np.int64)
        fraction = bits & ((1 << self.fraction_bits) - 1)
        exponent = bits >> self.fraction_bits & ((1 << self.exponent_bits) - 1)
        significand = np.where(exponent > 0, fraction + (1 << self.fraction_bits), fraction)
        power = np.maximum(exponent, 1) - self.bias - self.fraction_bits
        size = np.ldexp(significand.astype(np.float64), power.astype(np.int32))
        if self.has_infinity:
            top = exponent == (1 << self.exponent_bits) - 1
            size = np.where(top, np.where(fraction == 0, np.inf, np.nan), size)
        else:
            size = np.where(bits & self.nan == self.nan, np.nan, size)
        negative = bits >> (self.exponent_bits + self.fraction_bits) & 1
        return np.where(negative == 1, -size, size)

    def encode(self, numbers: Array, *, saturate: bool = False) -> Array:
        """Round float64 numbers to the nearest, ties to even; NaN becomes the canonical one.

        What is too large becomes infinity, or the largest number if ``saturate`` or there is none.
        """
        size = np.abs(numbers)
        finite = np.where(np.isfinite(size), size, 0.0)
        smallest = 1 - self.bias
        _, exponent = np.frexp(finite)
        power = np.where(finite > 0, np.maximum(exponent - 1, smallest), smallest)
        units = np.rint(np.ldexp(finite, self.fraction_bits - power)).astype(np.int64)
        # A significand that is rounded up to a power of two carries over into the exponent.
        code = units + (power - smallest << self.fraction_bits)
        largest = self.nan - 1
        if self.has_infinity:
            largest = self.nan - (1 << self.fraction_bits)
        too_large = largest if saturate or not self.has_infinity else largest + 1
        code = np.where(np.isinf(size) | (code > largest), too_large, code)
        code |= np.signbit(numbers).astype(np.int64) << (self.exponent_bits + self.fraction_bits)
        return np.where(np.isnan(numbers), self.nan, code).astype(np.uint64)


BF16 = Format(8, 7)
FP16 = Format(5, 10)
E4M3 = Format(4, 3, has_infinity=False)

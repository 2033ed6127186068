"""Instructions that compute each thread's registers from its own: integers, floats, conversions.

A row of ``RESULTS`` is a function from the sources' bits to the result's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from tests.kernels.ptx.formats import BF16, E4M3, FP16, Format
from tests.kernels.ptx.machine import Array, dtype_of, to_bits, typed

__all__ = ["RESULTS"]

Result = Callable[..., Array]
_SMALLEST_NORMAL = np.float32(2.0**-126)


def _of_type(kind: str, function: Callable[..., Array]) -> Result:
    """``function`` of numbers of one type, which the result has, too."""
    return lambda *bits: to_bits(
        function(*(typed(each, kind) for each in bits)).astype(dtype_of(kind))
    )


def _compared(kind: str, function: Callable[..., Array]) -> Result:
    """Return the predicate that ``function`` gives."""
    return lambda a, b: function(typed(a, kind), typed(b, kind)).astype(np.uint64)


def _shifted(kind: str, function: Callable[..., Array]) -> Result:
    """Return a shift; amounts past the width shift everything out."""
    width = int(kind[1:])

    def result(a: Array, amount: Array) -> Array:
        amount = np.minimum(amount & np.uint64(0xFFFFFFFF), np.uint64(width))
        mask = np.uint64(2**width - 1)
        return function(a & mask, amount) & mask

    return result


def _wide(kind: str) -> Result:
    """Return a product of twice the width."""
    wide = f"{kind[0]}{2 * int(kind[1:])}"

    def result(a: Array, b: Array) -> Array:
        numbers = [typed(each, kind).astype(dtype_of(wide)) for each in (a, b)]
        return to_bits(numbers[0] * numbers[1])

    return result


def _truncated(a: Array) -> Array:
    """float32 to u32 toward 0; what doesn't fit becomes the nearest that does, and NaN 0."""
    numbers = np.nan_to_num(typed(a, "f32").astype(np.float64), nan=0, posinf=2**32, neginf=0)
    return np.clip(np.trunc(numbers), 0, 2**32 - 1).astype(np.uint64)


def _converted(to: str, source: str) -> Result:
    """From integers to integers: cut off, or extended by the source's sign."""
    return lambda a: to_bits(typed(a, source).astype(dtype_of(to)))


def _permuted(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``: each nibble of the selector picks a byte of b:a, its top bit that byte's sign."""
    both = (b & np.uint64(0xFFFFFFFF)) << np.uint64(32) | (a & np.uint64(0xFFFFFFFF))
    result = np.zeros_like(both)
    for place in range(4):
        nibble = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (np.uint64(8) * (nibble & np.uint64(7))) & np.uint64(255)
        sign = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        result |= np.where(nibble >= 8, sign, byte) << np.uint64(8 * place)
    return result


def _narrowed(target: Format, *, saturate: bool = False) -> Result:
    return lambda a: target.encode(typed(a, "f32").astype(np.float64), saturate=saturate)


def _narrowed_pair(target: Format, *, saturate: bool = False) -> Result:
    """Narrow two float32; the first goes to the upper half."""
    width = np.uint64(1 + target.exponent_bits + target.fraction_bits)
    one = _narrowed(target, saturate=saturate)
    return lambda a, b: one(a) << width | one(b)


def _widened(a: Array) -> Array:
    return to_bits(FP16.decode(a & np.uint64(0xFFFF)).astype(np.float32))


def _widened_pair(a: Array) -> Array:
    """Return two e4m3 to two halves, the upper to the upper."""
    low, high = (FP16.encode(E4M3.decode(a >> np.uint64(at) & np.uint64(255))) for at in (0, 8))
    return high << np.uint64(16) | low


def _flushed(x: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < _SMALLEST_NORMAL, np.copysign(np.float32(0), x), x)


def _approximate(function: Callable[[Array], Array]) -> Result:
    """``.approx.ftz.f32``: here the nearest float to the exact result."""

    def result(a: Array) -> Array:
        exact = function(_flushed(typed(a, "f32")).astype(np.float64))
        return to_bits(_flushed(exact.astype(np.float32)))

    return result


def _results() -> dict[str, Result]:
    results: dict[str, Result] = {
        "prmt.b32": _permuted,
        "abs.f32": _of_type("f32", np.abs),
        "add.rn.f32": _of_type("f32", operator.add),
        "mul.f32": _of_type("f32", operator.mul),
        "min.f32": _of_type("f32", np.fmin),  # of a number and NaN the number
        "setp.lt.f32": _compared("f32", operator.lt),
        "setp.nan.f32": _compared("f32", lambda a, b: np.isnan(a) | np.isnan(b)),
        "max.u32": _of_type("u32", np.maximum),
        "cvt.rzi.u32.f32": _truncated,
        "cvt.f32.f16": _widened,
        "cvt.rn.bf16.f32": _narrowed(BF16),
        "cvt.rn.f16.f32": _narrowed(FP16),
        "cvt.rn.bf16x2.f32": _narrowed_pair(BF16),
        "cvt.rn.f16x2.f32": _narrowed_pair(FP16),
        "cvt.rn.satfinite.e4m3x2.f32": _narrowed_pair(E4M3, saturate=True),
        "cvt.rn.f16x2.e4m3x2": _widened_pair,
        "ex2.approx.ftz.f32": _approximate(np.exp2),
        "lg2.approx.ftz.f32": _approximate(np.log2),
        "rsqrt.approx.ftz.f32": _approximate(lambda x: 1 / np.sqrt(x)),
        "rcp.approx.ftz.f32": _approximate(lambda x: 1 / x),
        # Global addresses are the same in the generic space.
        "cvta.to.global.u64": lambda a: a,
    }
    integers = ("u16", "s16", "u32", "s32", "u64", "s64")
    for kind in integers:
        results[f"add.{kind}"] = _of_type(kind, operator.add)
        results[f"sub.{kind}"] = _of_type(kind, operator.sub)
        results[f"mul.lo.{kind}"] = _of_type(kind, operator.mul)
        results[f"mad.lo.{kind}"] = _of_type(kind, lambda a, b, c: a * b + c)
        for name in ("eq", "ne", "lt", "le", "gt", "ge"):
            results[f"setp.{name}.{kind}"] = _compared(kind, getattr(operator, name))
        for source in integers:
            results[f"cvt.{kind}.{source}"] = _converted(kind, source)
    for kind in ("u16", "s16", "u32", "s32"):
        results[f"mul.wide.{kind}"] = _wide(kind)
    for kind in ("b16", "b32", "b64"):
        for name, function in (("and", operator.and_), ("or", operator.or_)):
            results[f"{name}.{kind}"] = _of_type(kind, function)
        results[f"xor.{kind}"] = _of_type(kind, operator.xor)
        results[f"shl.{kind}"] = _shifted(kind, np.left_shift)
    results["shr.u32"] = _shifted("u32", np.right_shift)
    for kind in ("b32", "u32", "s32", "f32", "b64"):
        results[f"selp.{kind}"] = _selected
    return results


def _selected(a: Array, b: Array, predicate: Array) -> Array:
    return np.where(predicate != 0, a, b)


RESULTS = _results()

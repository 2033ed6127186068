"""Launches of small kernels that between them execute each primitive of ``hardware.cuh``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import torch

from gpu.kernels import KernelLoader
from tests.kernels.memory import place, poisoned
from tests.kernels.test_conformance import E4M3, FILE, HALVES, all_patterns, floats_around, run

__all__ = ["CASES", "PRIMITIVES", "Case", "agree"]

PRIMITIVES = Path(__file__).parent / "primitives.cu"
_SHARED_BYTES = 1024  # of copy_groups: two groups of 32 copies


@attrs.frozen(eq=False)
class Case:
    """One launch."""

    kernel: str
    shape: tuple[int, ...]
    """Shape of ``out``."""
    inputs: Callable[[], list[torch.Tensor]]
    """The tensors a, b and c, as many as the kernel reads."""
    dtype: torch.dtype = torch.int32
    """Type of ``out``; floats are compared as numbers, so that any NaN is NaN, others by bits."""
    num: int = 0
    element: torch.dtype = torch.bfloat16
    num_threads: int = 32
    num_blocks: int = 1
    file: Path = FILE
    zeroed: bool = False
    """``out`` starts as zeros, for atomics; else as NaN."""
    together: bool = False
    """The interpreter may run threads in step: they have nothing to do with each other."""
    rtol: float = 0
    atol: tuple[float, ...] = (0,)
    """The tolerance of the results; the absolute error is that of each column."""

    def run(self, loader: KernelLoader) -> torch.Tensor:
        """Launch, and return ``out``."""
        if self.zeroed:
            out = place(torch.zeros(self.shape, dtype=self.dtype), loader)
        else:
            out = poisoned(self.shape, self.dtype, loader)
        return run(
            loader,
            self.kernel,
            out,
            *self.inputs(),
            num=self.num,
            element=self.element,
            num_threads=self.num_threads,
            num_blocks=self.num_blocks,
            file=self.file,
            shared_bytes=_SHARED_BYTES if self.kernel == "copy_groups" else 0,
        )


def agree(case: Case, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare two results of ``case``."""
    if not case.dtype.is_floating_point:
        return torch.equal(one, other)
    infinite = one.isinf() | other.isinf()
    near = (one - other).abs() <= case.rtol * other.abs() + torch.tensor(case.atol)
    same = torch.where(infinite, one == other, near) | (one.isnan() & other.isnan())
    zeros = (one == 0) & (other == 0)
    return bool(same.all()) and torch.equal(one[zeros].signbit(), other[zeros].signbit())


def _elementwise(
    kernel: str,
    inputs: Callable[[], list[torch.Tensor]],
    num: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    element: torch.dtype = torch.bfloat16,
    rtol: float = 0,
    atol: tuple[float, ...] = (0,),
) -> Case:
    return Case(
        kernel,
        shape,
        inputs,
        dtype,
        num=num,
        element=element,
        num_threads=256,
        num_blocks=-(-num // 256),
        together=True,
        rtol=rtol,
        atol=atol,
    )


def _rows(*sizes: int) -> list[torch.Tensor]:
    """Different words, none of them 0; of each size so many rows of 16 bytes."""
    return [torch.arange(1, 4 * n + 1, dtype=torch.int32) * 0x1020301 for n in sizes]


def _fragments(element: torch.dtype, special: bool) -> list[torch.Tensor]:
    """Return a, b and c with products and sums exact in float32; ``special`` ones among them."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-60, 60, shape, generator=generator) / 8

    a, b, c = numbers(32, 8).to(element), numbers(32, 4).to(element), numbers(32, 4)
    if special:
        a[3, 2], a[9, 0], a[17, 5] = torch.inf, -torch.inf, torch.nan
        # The smallest number is alone in row 1, where its products are exact.
        a[4:8, [0, 1, 4, 5]], c[4:8, :2] = 0.0, 0.0
        a.view(torch.int16)[5, 1] = 1
    return [a, b, c]


def _arguments() -> torch.Tensor:
    """Numbers of every size, subnormal and special ones too."""
    positive = torch.cat(
        [
            torch.linspace(0.01, 140, 700),
            torch.logspace(-37, 38, 300),
            torch.tensor([0.0, 1e-40, torch.inf, torch.nan, 1.0, 2.0]),
        ]
    )
    return torch.cat([positive, -positive])


def _some_floats(element: torch.dtype) -> torch.Tensor:
    """Numbers at and around the limits of rounding, as many as fill groups of four."""
    x = floats_around(element)
    x = x if element == E4M3 else x[::7]
    return x[: len(x) // 4 * 4]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for element in (*HALVES, E4M3):
        name = str(element).removeprefix("torch.")
        bits = torch.uint8 if element == E4M3 else torch.int16
        wide, narrow = all_patterns(element), _some_floats(element)
        cases[f"widen-{name}"] = _elementwise(
            "widen", lambda x=wide: [x], len(wide), (len(wide),), torch.float32, element
        )
        cases[f"narrow-{name}"] = _elementwise(
            "narrow", lambda x=narrow: [x], len(narrow), (len(narrow),), bits, element
        )
        if element == E4M3:
            continue
        pairs = len(narrow) // 2
        cases[f"pack_pairs-{name}"] = _elementwise(
            "pack_pairs", lambda x=narrow: [x], pairs, (pairs,), torch.int32, element
        )
        cases[f"unpack_e4m3-{name}"] = _elementwise(
            "unpack_e4m3",
            lambda: [all_patterns(E4M3).repeat(4)[torch.arange(1024) * 37 % 256]],
            256,
            (256, 2),
            torch.int32,
            element,
        )
        for special in (False, True):
            cases[f"multiply-{name}{'-special' * special}"] = Case(
                "multiply",
                (32, 4),
                lambda element=element, special=special: _fragments(element, special),
                torch.float32,
                element=element,
            )
        cases[f"multiply_first-{name}"] = Case(
            "multiply_first",
            (32, 4),
            lambda element=element: _fragments(element, special=False),
            torch.float32,
            element=element,
            file=PRIMITIVES,
        )
    fours = _some_floats(E4M3)
    cases["pack_e4m3"] = _elementwise(
        "pack_e4m3", lambda: [fours], len(fours) // 4, (len(fours) // 4,), torch.int32
    )
    x = _arguments()
    # Two units in the last place and a rounding; near 1 the error of a logarithm is absolute.
    cases["approximate"] = _elementwise(
        "approximate",
        lambda: [x],
        len(x),
        (len(x), 4),
        torch.float32,
        rtol=3 * 2**-23,
        atol=(2**-126, 3 * 2**-23, 2**-126, 2**-126),
    )
    for num in (0, 1):
        cases[f"load_matrices-{num}"] = Case("load_matrices", (32, 4), lambda: _rows(32), num=num)
    for num in (0, 1, 20, 32):
        cases[f"copy_async-{num}"] = Case("copy_async", (32, 4), lambda: _rows(32), num=num)
    for num in (0, 33, 96):
        cases[f"exchange-{num}"] = Case(
            "exchange", (5,), list, num=num, num_threads=96, num_blocks=3, zeroed=True
        )
    cases["copy_groups"] = Case("copy_groups", (64, 4), lambda: _rows(64), file=PRIMITIVES)
    cases["words"] = Case("words", (32, 8), lambda: _rows(32, 8), file=PRIMITIVES)
    votes = torch.arange(32, dtype=torch.int32) * 5 % 32
    for num in (-1, 11, 31):
        cases[f"votes-{num}"] = Case("votes", (32, 4), lambda: [votes], num=num, file=PRIMITIVES)
    return cases


CASES = _cases()

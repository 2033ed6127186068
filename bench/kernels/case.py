"""Cases of ``bench.kernels``: one is one kernel at one shape, with its peers.

A case makes its contestants when its turn comes, so that only one case's memory is held at a time.
All get the same inputs, and are checked against a reference in float64 before any is timed. A peer
that isn't installed is named as absent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from bench.kernels.roofline import Work
from bench.kernels.targets import Target
from bench.kernels.timing import Launch, buffer_sets
from gpu.kernels import KernelLoader

ONE_ROUNDING = 3e-3
"""The error of one rounding to bfloat16: 2**-9 at most, and half of that on average."""


class PeerAbsent(Exception):
    """A peer that isn't installed, or doesn't offer what the case computes; the text says which."""


@attrs.frozen(kw_only=True)
class Contestant:
    """One implementation of a case.

    ``launches`` do the same on different buffers. ``error`` runs the first of them and returns how
    far its result is from the reference, which may be ``tolerance`` at most.
    """

    launches: Sequence[Launch]
    error: Callable[[], float]
    tolerance: float

    @classmethod
    def over(
        cls,
        sets: Sequence[Sequence[Any]],
        run: Callable[..., Any],
        expected: Callable[[], torch.Tensor],
        *,
        found: Callable[[Any], torch.Tensor] | None = None,
        prepare: Callable[[], object] | None = None,
        tolerance: float = 2 * ONE_ROUNDING,
    ) -> Contestant:
        """Return launches of ``run`` with the buffers of each of ``sets``, the last one its output.

        ``expected`` returns the first output in float64; it is called before the launch. ``found``
        gets what the launch returned and returns the output, if that is no buffer. ``prepare``
        makes the output ready; it is poisoned if neither is given.
        """
        launches = [partial(run, *buffers) for buffers in sets]

        def error() -> float:
            wanted = expected()
            if prepare is not None:
                prepare()
            elif found is None:
                poison(sets[0][-1])
            returned = launches[0]()
            return relative_error(sets[0][-1] if found is None else found(returned), wanted)

        return cls(launches=launches, error=error, tolerance=tolerance)


Contestants = Mapping[str, Callable[[], Contestant]]
"""Implementations over the same inputs by name; a maker raises :class:`PeerAbsent` if it can't."""


@attrs.frozen(kw_only=True)
class Setting:
    """The device of a run. ``cache_bytes`` is the size of its second-level cache."""

    loader: KernelLoader
    generator: torch.Generator
    cache_bytes: int

    @property
    def device(self) -> torch.device:
        """The device that the kernels run on."""
        return self.loader.device

    def sets(self, bytes_per_set: float) -> int:
        """Return the number of sets of buffers that the launches go round."""
        return buffer_sets(bytes_per_set, self.cache_bytes)

    def random(
        self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> torch.Tensor:
        """Return normal random numbers on the device."""
        numbers = torch.randn(shape, generator=self.generator, device=self.device)
        return numbers.mul_(scale).to(dtype)

    def integers(self, below: int, *shape: int) -> torch.Tensor:
        """Return random int32 numbers from 0 on, on the device."""
        numbers = torch.randint(below, shape, generator=self.generator, device=self.device)
        return numbers.to(torch.int32)

    def permutation(self, below: int) -> torch.Tensor:
        """Return the numbers below ``below`` in random order, int32 on the device."""
        order = torch.randperm(below, generator=self.generator, device=self.device)
        return order.to(torch.int32)


@attrs.frozen(kw_only=True)
class Case:
    """One kernel at one shape. The most telling cases run ``first``, if time runs out."""

    kernel: str
    shape: str
    work: Work
    make: Callable[[Setting], Contestants]
    targets: Sequence[Target] = ()
    first: bool = False

    @property
    def title(self) -> str:
        """The case's name in tables and in other cases' targets."""
        return f"{self.kernel} {self.shape}"


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``|actual - reference| / |reference|`` in float64; NaN if any number is.

    Both are compared where they are: the largest are too large to be carried to the host.
    """
    if actual.shape != reference.shape:
        raise ValueError(f"shapes {list(actual.shape)} and {list(reference.shape)} are compared")
    difference = (actual.double() - reference.double()).norm()
    return float(difference / reference.double().norm())


def poison(*tensors: torch.Tensor) -> None:
    """Fill ``tensors`` with bytes that are NaN in every floating-point type."""
    for tensor in tensors:
        tensor.view(torch.uint8).fill_(0xFF)


def flashinfer_module() -> Any:
    """Return FlashInfer (https://github.com/flashinfer-ai/flashinfer), if it is here."""
    needs_cuda()
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise PeerAbsent(f"flashinfer: {error}") from None


def needs_cuda() -> None:
    """Raise :class:`PeerAbsent` where there is no GPU to run the peer on."""
    if not torch.cuda.is_available():
        raise PeerAbsent("needs a GPU")

"""Cases of ``bench.kernels``: one is one kernel at one shape, with its peers.

A case makes a trial when its turn comes, so that only one case's memory is held at a time. In a
trial every contestant gets the same inputs, and is checked against a reference in float64 before
any is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from bench.kernels.roofline import Work
from bench.kernels.targets import Target
from bench.kernels.timing import Launch, buffer_sets
from gpu.kernels import KernelLoader


class PeerAbsent(Exception):
    """A peer that isn't installed, or doesn't offer what the case computes; the text says which."""


@attrs.frozen(kw_only=True)
class Contestant:
    """One implementation of a case.

    ``launches`` do the same on different buffers. ``error`` runs the first of them on poisoned
    outputs and returns how far it is from the reference, which may be ``tolerance`` at most.
    """

    launches: Sequence[Launch]
    error: Callable[[], float]
    tolerance: float


@attrs.frozen(kw_only=True)
class Peer:
    """Another library's implementation; ``make`` raises :class:`PeerAbsent` where there is none."""

    name: str
    make: Callable[[], Contestant]


@attrs.frozen(kw_only=True)
class Trial:
    """Our kernel and the peers, over the same inputs."""

    ours: Contestant
    peers: Sequence[Peer] = ()


@attrs.frozen(kw_only=True)
class Setting:
    """The device of a trial. ``cache_bytes`` is the size of its second-level cache."""

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
        self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
    ) -> torch.Tensor:
        """Return normal random numbers on the device."""
        numbers = torch.randn(tuple(shape), generator=self.generator, device=self.device)
        return numbers.mul_(scale).to(dtype)

    def permutation(self, count: int) -> torch.Tensor:
        """Return the numbers below ``count`` in random order, int32 on the device."""
        order = torch.randperm(count, generator=self.generator, device=self.device)
        return order.to(torch.int32)


@attrs.frozen(kw_only=True)
class Case:
    """One kernel at one shape. ``quick`` cases come first, and are those of ``--quick``."""

    kernel: str
    shape: str
    work: Work
    make: Callable[[Setting], Trial]
    targets: Sequence[Target] = ()
    quick: bool = False

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

"""The interface between the runner, which keeps the slots, and a device that computes steps.

The runner may submit a step before the previous one is finished. A row's newest token may then not
be on the host, so an executor reads it on the device, where it was sampled. A mask that depends on
this token can't be made yet. Such a step is deferred: its forward pass is computed, and sampling
waits for the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.drawn import Drawn
from gpu.slots import Row, Slot

Copies: TypeAlias = npt.NDArray[np.int32]
"""[C, 2] int32: pairs of source and destination pages, copied one after the other.

Numbers from the KV cache's number of pages on are pages in host memory.
"""
Content: TypeAlias = npt.NDArray[np.uint8]
"""[B] uint8: the keys and values of a page in all layers, contiguous."""
NO_COPIES: Copies = np.zeros((0, 2), dtype=np.int32)


class Submission(Protocol):
    """A step that has been handed to the device."""

    @property
    def deferred(self) -> bool:
        """True until :meth:`sample` is called, if a mask needs a token of the previous step.

        No other step may be submitted meanwhile.
        """

    def sample(self) -> None:
        """Sample in a deferred step, once the slots have all earlier tokens."""

    def wait(self) -> Drawn:
        """Block until the step is finished. Call it once a step, in the order of submission."""


@attrs.frozen
class Finished:
    """The :class:`Submission` of an executor that computes each step synchronously."""

    _drawn: Drawn

    @property
    def deferred(self) -> bool:
        """See :attr:`Submission.deferred`."""
        return False

    def sample(self) -> None:
        """Raise: a finished step has nothing deferred."""
        raise AssertionError("a step was finished at once")

    def wait(self) -> Drawn:
        """See :meth:`Submission.wait`."""
        return self._drawn


class Executor(Protocol):
    """Computes steps in the order in which they are submitted."""

    @property
    def completions(self) -> int | None:
        """File descriptor that is readable while a finished step hasn't been waited for.

        None if a step is finished when :meth:`submit` returns.
        """

    def open(self, slot: Slot) -> None:
        """Set up the state of a slot just opened; its number may have been used before."""

    def close(self, number: int) -> None:
        """Drop the state of a slot. It may never have been opened here."""

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """Copy pages, then compute ``rows``, and sample for those that reach their end.

        Each row has at least one token, and the block tables have the plan's pages. A step without
        rows is finished at once.
        """


class PagedExecutor(Executor, Protocol):
    """An executor whose pages in host memory are written to files and read from them."""

    def begin_transfer(self, written: Sequence[int]) -> None:
        """Begin a transfer of pages, in the thread of the steps; it will write pages ``written``.

        Its pages are read and written by another thread, after what was submitted before this call.
        """

    def read_page(self, number: int) -> Content:
        """Return the content of page ``number``.

        Steps that don't write to this page may be computed meanwhile.
        """
        ...

    def write_page(self, number: int, content: Content) -> None:
        """Write what :meth:`read_page` has returned to page ``number`` in host memory; as there."""

"""The seam between the runner, which keeps the slots, and what computes on a device.

The runner may submit another step before it has waited for the last one, so a row's newest token
may not be on the host yet: an executor keeps it where it was drawn and takes it from there. Only a
mask that depends on that token can't be made without it. The step is then deferred: its forward
pass is computed, and the draw waits for the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.sampler_io import TopLogprobs
from gpu.slots import Row, Slot
from trioserve.protocol.wire import PooledPrompt, PromptPiece

Copies: TypeAlias = npt.NDArray[np.int32]
"""[C, 2]: pairs of source and destination pages, copied one after the other.

Numbers past those of the KV cache's pages are pages in the host's memory.
"""
NO_COPIES: Copies = np.zeros((0, 2), dtype=np.int32)


@attrs.frozen(kw_only=True)
class DeviceTimes:
    """The times of one step, in microseconds on the device's clock."""

    step_us: int = 0
    """Time in which kernels of the step were running."""
    gap_us: int = 0
    """Time within the step without a kernel: copies, waiting for a mask that the host makes."""
    idle_us: int = 0
    """Time from the end of the last step to the start of this one, with no work for the device."""
    launch_us: int = 0
    """Time in which the host queued the step's kernels, on the host's clock."""


@attrs.define(kw_only=True)
class Drawn:
    """The draws of one step for its S rows that sample, in the order of submission.

    ``top`` and ``named`` have S entries, empty where not asked for, or are None if no row asked.
    """

    tokens: npt.NDArray[np.int32]  # [S]; negative where there was no token to draw
    counts: npt.NDArray[np.int64] | None = None
    """[S], how many tokens each row drew, where some rows drafted tokens; None for one.

    ``tokens``, ``logprobs``, ``top`` and ``named`` then have one entry for each token.
    """
    logprobs: npt.NDArray[np.float32] | None = None
    """[S], NaN where not asked for; None if no row asked."""
    top: list[TopLogprobs] | None = None
    named: list[npt.NDArray[np.float32]] | None = None
    """Raw log-probabilities of each row's ``logprob_token_ids``."""
    prompts: list[PromptPiece] = attrs.field(factory=list)
    """Log-probabilities of the prompt tokens computed, for the rows that ask for them."""
    pooled: list[PooledPrompt] = attrs.field(factory=list)
    """Vectors of the prompts completed, for the rows that ask for one."""
    times: DeviceTimes = attrs.field(factory=DeviceTimes)


class Submission(Protocol):
    """A step that has been handed to the device."""

    @property
    def deferred(self) -> bool:
        """True if nothing is drawn before :meth:`sample` is called; no step may follow till then.

        The mask of one of its rows needs the row's last token, which the step before draws.
        """

    def sample(self) -> None:
        """Draw in a deferred step, now that all tokens before are known in the slots."""

    def wait(self) -> Drawn:
        """Wait for the step's end. Call it once for each step, in the order of submission."""


@attrs.frozen
class Finished:
    """The :class:`Submission` of an executor that is done with a step when it returns it."""

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
        """A file descriptor that is readable while a finished step hasn't been waited for.

        None means that a step is finished when :meth:`submit` returns.
        """

    def open(self, slot: Slot) -> None:
        """Take note of a slot just opened; its number may have been used before."""

    def close(self, number: int) -> None:
        """Forget the slot with that number. It may never have been opened here."""

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """Copy pages, then compute ``rows`` and draw for those that sample.

        Each row has at least one token. The slots' block tables are as the plan left them. A step
        without rows counts as finished at once.
        """

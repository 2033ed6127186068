"""The output of a step: the tokens sampled, their log-probabilities, and the times."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

from gpu.sampling.sampler_io import TopLogprobs
from trioserve.protocol.wire import PooledPrompt, PromptPiece, TensorPiece


@attrs.frozen(kw_only=True)
class DeviceTimes:
    """The times of one step in microseconds, by the device's clock."""

    step_us: int = 0
    """Time with a kernel of the step running."""
    gap_us: int = 0
    """Time within the step without a kernel: copies, or waiting for a mask from the host."""
    idle_us: int = 0
    """Time from the end of the previous step to the start of this one."""
    launch_us: int = 0
    """Time that the host took to queue the step's kernels, by the host's clock."""


@attrs.define(kw_only=True)
class Drawn:
    """The output of one step for its S rows that sample, in the order of submission.

    ``top`` and ``named`` have S entries, empty if not requested; None if no row requested them.
    """

    tokens: npt.NDArray[np.int32]  # [S]; negative where the mask allowed no token
    counts: npt.NDArray[np.int64] | None = None
    """[S], tokens of each row, if some rows had draft tokens; None if each row has one.

    ``tokens``, ``logprobs``, ``top`` and ``named`` then have one entry for each token.
    """
    drafted: npt.NDArray[np.int32] | None = None
    """[S], draft tokens that each row verified; None if none did."""
    logprobs: npt.NDArray[np.float32] | None = None
    """[S], NaN where not requested; None if no row requested any."""
    top: list[TopLogprobs] | None = None
    named: list[npt.NDArray[np.float32]] | None = None
    """Raw log-probabilities of each row's ``logprob_token_ids``."""
    prompts: list[PromptPiece] = attrs.field(factory=list)
    """Log-probabilities of the prompt tokens computed, where requested."""
    pooled: list[PooledPrompt] = attrs.field(factory=list)
    """Pooled vectors of the prompts completed, where requested."""
    tensors: list[TensorPiece] = attrs.field(factory=list)
    """Hidden states and logits, where requested."""
    times: DeviceTimes = attrs.field(factory=DeviceTimes)

"""A worker without a model: real slots, real plans, and tokens of a fixed text.

It is for measuring everything but the model. A step takes a set time, in which the process sleeps,
and gives each row the next token of a readable text. Only the model's configuration and tokenizer
are loaded, no tensor is touched, and requests that need logits are refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.executor import NO_COPIES, Copies, DeviceTimes, Drawn, Finished, Submission
from gpu.slots import PlanError, Row, Slot
from trioserve.model_files import ModelFiles
from trioserve.model_files.native import refused_by_tokenizers
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import MockSteps

TEXT = (
    " The lighthouse keeper wrote one line in the log for every ship that passed. Most of them"
    " carried timber, some carried salt, and one, in the spring, carried nothing but a piano and"
    " the man who was to play it. He waved. The keeper waved back, and wrote that down as well."
)
"""The text of every sequence, repeated."""
MOST_PAGES = 1 << 18
"""The most pages: each costs a few dozen bytes of the engine's bookkeeping."""


def mock_text(files: ModelFiles, stop_ids: Sequence[int] = ()) -> npt.NDArray[np.int32]:
    """Return the tokens of :data:`TEXT`, int32, without those that would end a sequence.

    Raises:
        ModelLoadError: the tokenizer has none for it.
    """
    with refused_by_tokenizers(files.path):
        ids = files.load_tokenizer().encode(TEXT, add_special_tokens=False).ids
    usable = [token for token in ids if token not in stop_ids and token < files.config.vocab_size]
    if not usable:
        raise ModelLoadError("the model's tokenizer has no tokens for the mock worker's text")
    return np.array(usable, dtype=np.int32)


def mock_num_pages(page_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Pages enough for the longest sequence in every slot, up to a bound on bookkeeping."""
    return min(max_num_seqs * -(-max_model_len // page_size), MOST_PAGES)


class MockExecutor:
    """:class:`gpu.executor.Executor` that waits instead of computing.

    Args:
        steps: how long each step takes.
        text: the tokens of every sequence's output, int32; after the last one comes the first.
    """

    def __init__(self, steps: MockSteps, text: npt.NDArray[np.int32]) -> None:
        self._steps = steps
        self._text = text
        self._step_ended_ns = time.perf_counter_ns()

    @property
    def completions(self) -> None:
        """See :attr:`gpu.executor.Executor.completions`."""
        return None

    def open(self, slot: Slot) -> None:
        """See :meth:`gpu.executor.Executor.open`.

        Raises:
            PlanError: the sequence wants what only logits can give.
        """
        refused = _wants_logits(slot.sampler)
        if refused:
            raise PlanError(f"a mock worker computes nothing, so it has no {refused}", slot.number)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""

    def submit(self, rows: Sequence[Row], copies: Copies = NO_COPIES) -> Submission:
        """See :meth:`gpu.executor.Executor.submit`."""
        began = time.perf_counter_ns()
        ends = np.array(
            [row.end - row.slot.prompt_length for row in rows if row.samples], dtype=np.int64
        )
        tokens = self._text[ends % len(self._text)]
        num_tokens = sum(row.count for row in rows)
        seconds = self._steps.step_seconds + num_tokens * self._steps.token_seconds
        left = seconds - (time.perf_counter_ns() - began) / 1e9
        if num_tokens and left > 0:
            time.sleep(left)
        ended = time.perf_counter_ns()
        drawn = Drawn(
            tokens=tokens,
            logprobs=None,
            top=None,
            times=DeviceTimes(
                step_us=(ended - began) // 1000, idle_us=(began - self._step_ended_ns) // 1000
            ),
        )
        self._step_ended_ns = ended
        return Finished(drawn)


def _wants_logits(sampler: SamplerParams) -> str:
    """Return what of ``sampler`` can't be had without logits, in words; empty if nothing."""
    if sampler.logprobs >= 0 or sampler.prompt_logprobs >= 0:
        return "log-probabilities"
    return "output that follows a grammar" if sampler.grammar is not None else ""

"""An executor without a model: real slots, real plans, and the tokens of a fixed text.

It measures everything but the model. A step sleeps for a set time and gives each row the next token
of the text. Only the model's configuration and tokenizer are loaded. Requests that need logits are
refused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gpu.executor import NO_COPIES, Content, Copies, Finished, Submission
from gpu.sampling.drawn import DeviceTimes, Drawn
from gpu.slots import PlanError, Row, Slot
from trioserve.model_files import ModelFiles
from trioserve.model_files.native import refused_by_tokenizers
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import MockSteps

TEXT = (
    " The lighthouse keeper wrote one line in the log for every ship that passed. Most of them"
    " carried timber, some carried salt, and one, in the spring, carried nothing but a piano and"
    " the man who was to play it. He waved. The keeper waved back, and wrote that down as well."
)
"""The text of every sequence, repeated."""
MOST_PAGES = 1 << 18
"""Most pages; each takes a few dozen bytes in the engine."""


def mock_text(files: ModelFiles, stop_ids: Sequence[int] = ()) -> npt.NDArray[np.int32]:
    """Return the tokens of :data:`TEXT`, [N] int32, without ``stop_ids``.

    Raises:
        ModelLoadError: no token is left, or the tokenizer can't be loaded.
    """
    with refused_by_tokenizers(files.path):
        ids = files.load_tokenizer().encode(TEXT, add_special_tokens=False).ids
    usable = [token for token in ids if token not in stop_ids and token < files.config.vocab_size]
    if not usable:
        raise ModelLoadError("the model's tokenizer has no tokens for the mock worker's text")
    return np.array(usable, dtype=np.int32)


def mock_num_pages(page_size: int, max_model_len: int, max_num_seqs: int) -> int:
    """Return pages for the longest sequence in every slot, at most :data:`MOST_PAGES`."""
    return min(max_num_seqs * -(-max_model_len // page_size), MOST_PAGES)


class MockExecutor:
    """A :class:`gpu.executor.Executor` that sleeps instead of computing.

    Args:
        steps: the duration of a step.
        text: the tokens of every output, [N] int32, repeated.
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
            PlanError: the request needs logits.
        """
        refused = _wants_logits(slot)
        if refused:
            raise PlanError(f"a mock worker computes nothing, so it has no {refused}", slot.number)

    def close(self, number: int) -> None:
        """See :meth:`gpu.executor.Executor.close`."""

    def begin_transfer(self, written: Sequence[int]) -> None:
        """Do nothing."""

    def read_page(self, number: int) -> Content:
        """Return no bytes: a page has no content here."""
        return np.zeros(0, dtype=np.uint8)

    def write_page(self, number: int, content: Content) -> None:
        """Do nothing."""

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


def _wants_logits(slot: Slot) -> str:
    """Return the name of an option that needs logits; empty if there is none."""
    sampler = slot.sampler
    if max(slot.states_from, slot.context_logits_from) >= 0 or sampler.generation_logits:
        return "hidden states and no logits"
    if sampler.logprobs >= 0 or sampler.prompt_logprobs >= 0:
        return "log-probabilities"
    return "output that follows a grammar" if sampler.grammar is not None else ""

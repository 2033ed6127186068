"""The sampler on the device: :mod:`gpu.sampling.sampler`'s draws, by the kernels of
``gpu/kernels``.

Nothing comes back to the host before the tokens do, and nothing is launched that depends on them:
a step's launches can be captured in a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from gpu._util.upload import staged, upload
from gpu.kernels import KernelLoader
from gpu.kernels.sampling import (
    MAX_HISTORY,
    ROW_REPORT,
    SLOT_RECORD,
    SamplingKernels,
    SamplingMemory,
    Tiling,
)
from gpu.sampling.sampler import LOWEST_TEMPERATURE
from gpu.sampling.sampler_io import TopLogprobs
from trioserve.protocol.sampling import SamplerParams
from trioserve.protocol.wire import ints

_NO_TOP: TopLogprobs = (np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
_MARKS_ALIGNMENT = 4


@attrs.frozen(kw_only=True)
class SamplerOutputs:
    """The draws of the last step, for up to ``max_rows`` rows; the same memory in each step."""

    tokens: torch.Tensor
    """[max_rows] int32; negative where the logits hold NaN or leave no token to draw."""
    logprobs: torch.Tensor
    """[max_rows] float32, the drawn token's; NaN where not asked for."""
    top_ids: torch.Tensor
    """[max_rows, max_logprobs] int32, the most probable first; -1 behind the last. Rows that didn't
    ask have any numbers."""
    top_values: torch.Tensor
    """[max_rows, max_logprobs] float32, the log-probabilities of ``top_ids``."""


class DeviceSampler:
    """Draws tokens for a model with ``vocab_size`` tokens, from logits that stay on the device.

    The order of operations is :mod:`trioserve.protocol.sampling`'s, the random numbers are those of
    :class:`gpu.sampling.sampler.Sampler`, and so are the tokens up to near ties of rounding. A
    row's result depends on nothing but its logits, history and parameters.

    Args:
        loader: where the kernels run.
        vocab_size: up to 294,912.
        num_slots: how many slots have parameters at a time.
        max_rows: most rows of a step.
        history: [num_slots, stride] int32, all tokens of each slot.
        appends: append what is drawn to the history. Otherwise a slot may have several rows.
        max_logprobs: most entries of a row's top log-probabilities.
        processed_logprobs: report the distribution that was drawn from, not the model's own.

    Raises:
        ValueError: a size that the kernels aren't made for, or a history of another form.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        vocab_size: int,
        num_slots: int,
        max_rows: int,
        history: torch.Tensor,
        max_logprobs: int,
        processed_logprobs: bool = False,
        appends: bool = True,
    ) -> None:
        tiling = Tiling.of(vocab_size)
        most = min(max_logprobs, vocab_size)
        if most > tiling.list_capacity:
            raise ValueError(
                f"up to {max_logprobs} log-probabilities for a token: on this device at most "
                f"{tiling.list_capacity} (--max-logprobs)"
            )
        _check_history(history, num_slots)
        self.vocab_size, self.appends = vocab_size, appends
        self._max_rows = max_rows
        self._device = loader.device
        self._processed_logprobs = processed_logprobs

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=loader.device)

        self.outputs = SamplerOutputs(
            tokens=empty(max_rows, dtype=torch.int32),
            logprobs=empty(max_rows, dtype=torch.float32),
            top_ids=empty(max_rows, most, dtype=torch.int32),
            top_values=empty(max_rows, most, dtype=torch.float32),
        )
        self.marks = torch.zeros(
            max_rows,
            _marks_stride(vocab_size),
            dtype=torch.int32,
            device=loader.device,
        )
        """[max_rows, vocab_size or a little more] int32: zero between steps."""
        self._records = empty(num_slots, SLOT_RECORD.itemsize, dtype=torch.uint8)
        # The biases and stop ids that the records point to, kept alive.
        self._lists: list[tuple[torch.Tensor, ...]] = [()] * num_slots
        self._kernels = SamplingKernels(
            loader,
            SamplingMemory(
                records=self._records,
                history=history,
                marks=self.marks,
                stats=empty(2, max_rows, tiling.num_blocks, 2, dtype=torch.float32),
                reports=empty(max_rows, ROW_REPORT.itemsize, dtype=torch.uint8),
                tokens=self.outputs.tokens,
                logprobs=self.outputs.logprobs,
                top_ids=self.outputs.top_ids,
                top_values=self.outputs.top_values,
            ),
            vocab_size=vocab_size,
            appends=appends,
        )

    def open(self, slot: int, params: SamplerParams, prompt_length: int) -> None:
        """Slot ``slot`` samples with ``params``; its first ``prompt_length`` tokens are the prompt.

        Ordered with the launches before and after, on the current stream. Ids past the vocabulary
        in ``params`` are passed over.
        """
        bias = sorted((id, value) for id, value in params.logit_bias.items() if self._knows(id))
        bias_ids = upload(np.array([id for id, _ in bias], dtype=np.int32), self._device)
        bias_values = upload(np.array([value for _, value in bias], dtype=np.float64), self._device)
        stop = ints(params.stop_ids)
        stop = stop[(stop >= 0) & (stop < self.vocab_size)]
        stop_ids = upload(stop, self._device)
        record = np.zeros(1, dtype=SLOT_RECORD)
        record["repetition_penalty"] = params.repetition_penalty
        record["inverse_repetition_penalty"] = 1 / params.repetition_penalty
        record["frequency_penalty"] = params.frequency_penalty
        record["presence_penalty"] = params.presence_penalty
        record["top_p"] = params.top_p
        record["seed"] = params.seed
        record["bias_ids"] = bias_ids.data_ptr()
        record["bias_values"] = bias_values.data_ptr()
        record["stop_ids"] = stop_ids.data_ptr()
        greedy = params.temperature == 0
        record["temperature"] = 0 if greedy else max(params.temperature, LOWEST_TEMPERATURE)
        record["min_p"] = params.min_p
        limited = 0 < params.top_k < self.vocab_size
        record["top_k"] = params.top_k if limited else self.vocab_size
        record["min_tokens"] = params.min_tokens
        record["prompt_length"] = prompt_length
        record["sequence_index"] = params.sequence_index
        record["logprobs"] = params.logprobs
        record["processed_logprobs"] = self._processed_logprobs or params.processed_logprobs
        record["num_bias"] = len(bias)
        record["num_stop"] = len(stop)
        record_bytes = staged(record.view(np.uint8), self._device)
        self._records[slot].copy_(record_bytes, non_blocking=True)
        self._lists[slot] = (bias_ids, bias_values, stop_ids)

    def launch(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        bitmask: torch.Tensor | None = None,
    ) -> None:
        """Draw one token for each row, into ``outputs`` and, if it appends, the history.

        The addresses of all arguments and the number of rows are fixed by a capture; what stands
        there is read in each replay.

        Args:
            logits: [R, vocab_size] float32, rows contiguous (their stride may be larger);
                overwritten.
            slots: [R] int32, an open slot each, or -1 for a row of padding, its outputs are left
                as they are.
            lengths: [R] int32, how many tokens the slot has so far.
            bias: [R, vocab_size] float32, contiguous, added in step 5.
            bitmask: [R, ceil(vocab_size / 32)] int32, contiguous, applied after ``bias``: token t
                may be drawn if bit t % 32 of word t // 32 is set.

        Raises:
            ValueError: a bias or a bitmask of another form.
        """
        assert logits.dtype == torch.float32
        assert logits.stride(1) == 1
        assert logits.shape[1] == self.vocab_size
        assert len(logits) <= self._max_rows
        assert len(logits) == len(slots) == len(lengths)
        _check("bias", bias, (len(logits), self.vocab_size), torch.float32)
        _check("bitmask", bitmask, (len(logits), -(-self.vocab_size // 32)), torch.int32)
        self._kernels.launch(logits, slots, lengths, bias=bias, bitmask=bitmask)

    def _knows(self, token: int) -> bool:
        return 0 <= token < self.vocab_size


def _check(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Check a mask before a kernel reads it: another module has made it."""
    if tensor is None:
        return
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"a {name} of {tuple(tensor.shape)} {tensor.dtype}: {shape} {dtype}, contiguous, is "
            "wanted"
        )


def _marks_stride(vocab_size: int) -> int:
    return -(-vocab_size // _MARKS_ALIGNMENT) * _MARKS_ALIGNMENT


def scratch_bytes(*, vocab_size: int, num_slots: int, max_rows: int, max_logprobs: int) -> int:
    """Device memory of a :class:`DeviceSampler` besides the history and the slots' lists.

    Nearly all of it are the marks, 4 bytes for each row and token of the vocabulary.
    """
    num_blocks = Tiling.of(vocab_size).num_blocks
    most = min(max_logprobs, vocab_size)
    row = 4 * _marks_stride(vocab_size) + 16 * num_blocks + ROW_REPORT.itemsize + 8 + 8 * most
    return max_rows * row + num_slots * SLOT_RECORD.itemsize


def top_lists(
    ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], asked: Sequence[int]
) -> list[TopLogprobs]:
    """Copies of ``outputs.top_ids`` and ``outputs.top_values`` as lists, one for each row.

    ``asked`` has each row's ``SamplerParams.logprobs``.
    """
    lists = [_NO_TOP] * len(asked)
    for row, count in enumerate(asked):
        if count > 0:
            found = int((ids[row] >= 0).sum())
            lists[row] = (ids[row, :found].copy(), values[row, :found].copy())
    return lists


def _check_history(history: torch.Tensor, num_slots: int) -> None:
    if history.dtype != torch.int32 or not history.is_contiguous() or history.ndim != 2:
        raise ValueError("the history must be a contiguous matrix of int32")
    if len(history) < num_slots or history.shape[1] > MAX_HISTORY:
        raise ValueError(
            f"a history of {tuple(history.shape)}: {num_slots} slots with up to {MAX_HISTORY} "
            f"tokens each are wanted"
        )

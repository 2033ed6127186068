"""The row of the table of cosines and sines by which each token of a step turns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from gpu._util.upload import upload
from gpu.attention import StepLayout
from gpu.cuda.step_buffer import StepBuffer


class RotaryRows:
    """Rows of the table ``cos_sin``, in the step buffer.

    They are the tokens' places in their sequences, or with M-RoPE what a layout says. A step with
    tokens whose three positions differ has rows of its own behind the first ``num_positions``.

    Args:
        buffer: The step buffer.
        cos_sin: The table of :func:`gpu.models.rope.cos_sin_table` on the device; with ``axes``, it
            has room for a row of each token of a step behind those of positions.
        axes: Which rotary position each column takes; None without M-RoPE.
        num_positions: Number of rows of positions.
    """

    def __init__(
        self,
        buffer: StepBuffer,
        cos_sin: torch.Tensor,
        axes: npt.NDArray[np.int64] | None,
        num_positions: int,
    ) -> None:
        self._buffer = buffer
        self._cos_sin = cos_sin
        self._axes = None if axes is None else torch.from_numpy(axes).to(cos_sin.device)
        self._num_positions = num_positions
        self.on_device = buffer["positions" if axes is None else "rotary_rows"]
        """[max_tokens] int32, in the first numbers those of the step."""

    def pack(self, layout: StepLayout, *, padded_to: int = 0) -> None:
        """Put the rows of a step into the step buffer. What it adds to the table is queued."""
        if self._axes is None:
            return
        rows, given = layout.positions, layout.rotary_positions
        if given is not None:
            rows = given[:, 0]
            if (given != rows[:, None]).any():
                first, stop = self._num_positions, self._num_positions + len(given)
                taken = upload(given, self._cos_sin.device)[:, self._axes]
                self._cos_sin[first:stop] = self._cos_sin[:first].gather(0, taken)
                rows = np.arange(first, stop)
        self._buffer.put("rotary_rows", rows, padded_to=padded_to)

"""Launches ``gather_tokens.cu``: the input tokens of a step, out of the device's history."""

from __future__ import annotations

import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, parameters

NUM_THREADS = 128

PARAMETERS = parameters(
    ("history", "u8"),
    ("slots_of_token", "u8"),
    ("positions", "u8"),
    ("tokens", "u8"),
    ("history_stride", "i4"),
    ("num_tokens", "i4"),
)


def gather_tokens_source() -> KernelSource:
    """Return the one kernel there is."""
    return KernelSource(name="gather_tokens", parameters=PARAMETERS, num_threads=NUM_THREADS)


VARIANTS = [gather_tokens_source()]


class GatherTokens:
    """tokens[t] = history[slots_of_token[t], positions[t]], and 0 where that is no token.

    ``history`` is int32 [num_slots, history_stride] with rows of contiguous numbers.

    Raises:
        ValueError: a history of another dtype or layout.
    """

    def __init__(self, loader: KernelLoader, *, history: torch.Tensor) -> None:
        if history.dtype != torch.int32 or history.dim() != 2 or history.stride(1) != 1:
            raise ValueError(f"the history must be int32 rows, not {history.dtype}")
        self._kernel = loader.load(gather_tokens_source())
        self._history = history  # kept alive: the kernel has only its address
        self._parameters = np.zeros(1, dtype=PARAMETERS)
        self._parameters["history"] = history.data_ptr()
        self._parameters["history_stride"] = history.stride(0)

    def launch(
        self, slots_of_token: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Fill ``tokens`` [T] int64.

        ``slots_of_token`` and ``positions`` are int32 with T numbers or more, read when the kernel
        runs. A negative slot (padding) and a negative token in the history (a draw that failed)
        give token 0.
        """
        num_tokens = tokens.shape[0]
        filled = self._parameters
        filled["slots_of_token"] = slots_of_token.data_ptr()
        filled["positions"] = positions.data_ptr()
        filled["tokens"] = tokens.data_ptr()
        filled["num_tokens"] = num_tokens
        self._kernel.launch((-(-num_tokens // NUM_THREADS), 1, 1), filled)

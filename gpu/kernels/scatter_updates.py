"""Launches ``scatter_updates.cu``: a plan's changes to the device's block tables and history."""

from __future__ import annotations

import numpy as np
import torch

from gpu.kernels import KernelLoader, KernelSource, parameters

NUM_THREADS = 256

PARAMETERS = parameters(("arena", "u8"), ("updates", "u8"), ("num_updates", "u8"))


def scatter_updates_source() -> KernelSource:
    """Return the one kernel there is."""
    return KernelSource(name="scatter_updates", parameters=PARAMETERS, num_threads=NUM_THREADS)


VARIANTS = [scatter_updates_source()]


class ScatterUpdates:
    """arena[index] = value for the first ``num_updates`` pairs (index, value) of ``updates``.

    Everything is int32 on the device and read when the kernel runs: ``arena`` of any shape,
    contiguous, indexed flat; ``updates`` of 2 * max_updates numbers, each index followed by its
    value, no index twice; ``num_updates`` one number.

    Raises:
        ValueError: another dtype or layout.
    """

    def __init__(
        self,
        loader: KernelLoader,
        *,
        arena: torch.Tensor,
        updates: torch.Tensor,
        num_updates: torch.Tensor,
    ) -> None:
        tensors = {"arena": arena, "updates": updates, "num_updates": num_updates}
        for name, tensor in tensors.items():
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32")
        if updates.data_ptr() % 8 or updates.numel() % 2:
            raise ValueError("updates must be pairs, aligned to 8 bytes")
        self._kernel = loader.load(scatter_updates_source())
        self._tensors = tensors  # kept alive: the kernel has only their addresses
        # A plan that opens slots brings whole prompts: enough threads to keep memory busy.
        needed = -(-updates.numel() // 2 // NUM_THREADS)
        self._grid = (max(1, min(needed, 2 * loader.num_multiprocessors)), 1, 1)
        self._parameters = np.zeros(1, dtype=PARAMETERS)
        for name, tensor in tensors.items():
            self._parameters[name] = tensor.data_ptr()

    def launch(self) -> None:
        """Apply the updates."""
        self._kernel.launch(self._grid, self._parameters)

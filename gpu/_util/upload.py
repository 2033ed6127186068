"""Copies of arrays from the host to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``host`` in pinned memory if ``device`` is a GPU.

    A copy from other memory blocks the host until everything queued before it is done.
    """
    return host.pin_memory() if device.type == "cuda" else host


def staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return ``array`` as a tensor, in pinned memory if ``device`` is a GPU.

    Torch keeps that memory until a copy from it is done.
    """
    return pinned(torch.from_numpy(array), device)


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Queue a copy of ``array`` to ``device`` on the current stream; return it."""
    return staged(array, device).to(device, non_blocking=True)

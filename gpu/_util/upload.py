"""Numbers of the host on their way to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``host`` in memory from which a GPU copies by itself.

    From other memory a copy waits on the host until everything that is queued before it is done.
    """
    return host.pin_memory() if device.type == "cuda" else host


def staged(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """``array`` where a copy to ``device`` may start without waiting for the step in its stream.

    That is pinned memory, which torch keeps until the copy is done.
    """
    return pinned(torch.from_numpy(array), device)


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return a copy of ``array`` on ``device``, in the order of the current stream."""
    return staged(array, device).to(device, non_blocking=True)

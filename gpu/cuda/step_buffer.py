"""One step's integers, in one copy to the device.

Every int32 that a step's kernels read and that the host decides (slots, positions, work items) has
a region in one device buffer at a fixed address, so a captured launch finds the next
step's numbers where it found the last one's. The host writes the regions into pinned memory, and
one asynchronous copy takes them over, cut behind the last region written.

The host's buffers are used in turn: the next step may be packed while the last one's copy is still
waiting in the stream for the step before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import numpy.typing as npt
import torch

NUM_HOST_BUFFERS = 3
# Regions begin at multiples of this many numbers: 128 bytes, a line of the device's cache.
ALIGNMENT = 32


@attrs.define
class _HostBuffer:
    tensor: torch.Tensor
    numbers: npt.NDArray[np.int32]  # a view of the same memory
    copied: torch.cuda.Event | None = None
    """Passed once the device has read what was written here last."""


class StepBuffer:
    """Named regions of int32 on ``device``.

    Args:
        device: where the kernels run; the host's memory is pinned if that is a GPU.
        regions: how many numbers each region holds. The short ones are laid out first: what lies
            behind the last region that a step writes is not copied.
    """

    def __init__(self, device: torch.device, regions: Mapping[str, int]) -> None:
        self._bounds: dict[str, tuple[int, int]] = {}
        end = 0
        for name, length in sorted(regions.items(), key=lambda region: region[1]):
            self._bounds[name] = (end, end + length)
            end += -(-length // ALIGNMENT) * ALIGNMENT
        self._device = torch.zeros(end, dtype=torch.int32, device=device)
        self._views = {name: self._device[a:b] for name, (a, b) in self._bounds.items()}
        self._on_gpu = device.type == "cuda"
        self._hosts = [self._host_buffer(end) for _ in range(NUM_HOST_BUFFERS)]
        self._current = 0
        self._used = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the region ``name`` on the device: [length] int32, always at the same address."""
        return self._views[name]

    def put(self, name: str, values: npt.ArrayLike, *, padded_to: int = 0, fill: int = 0) -> None:
        """Write ``values`` to the start of a region, for the next :meth:`upload`.

        ``fill`` follows up to ``padded_to`` numbers. What stands behind that is from an earlier
        step, or 0.

        Raises:
            ValueError: the region is shorter.
        """
        flat = np.ravel(values)
        start, stop = self._bounds[name]
        end = start + max(len(flat), padded_to)
        if end > stop:
            raise ValueError(f"{end - start} numbers for {name}, which holds {stop - start}")
        numbers = self._hosts[self._current].numbers
        numbers[start : start + len(flat)] = flat
        numbers[start + len(flat) : end] = fill
        self._used = max(self._used, end)

    def packed(self) -> bytes:
        """Return what is put for the next upload, for :meth:`fill` of another rank's buffer."""
        return self._hosts[self._current].numbers[: self._used].tobytes()

    def fill(self, packed: bytes) -> None:
        """Put what a buffer with the same regions has packed."""
        numbers = np.frombuffer(packed, np.int32)
        self._hosts[self._current].numbers[: len(numbers)] = numbers
        self._used = len(numbers)

    def upload(self) -> None:
        """Copy what was put since the last upload, in the order of the current stream."""
        host = self._hosts[self._current]
        self._device[: self._used].copy_(host.tensor[: self._used], non_blocking=True)
        if self._on_gpu:
            host.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            host.copied.record()
        self._current = (self._current + 1) % NUM_HOST_BUFFERS
        self._used = 0
        following = self._hosts[self._current]
        if following.copied is not None:
            following.copied.synchronize()
            following.copied = None

    def _host_buffer(self, length: int) -> _HostBuffer:
        tensor = torch.zeros(length, dtype=torch.int32, pin_memory=self._on_gpu)
        return _HostBuffer(tensor, tensor.numpy())

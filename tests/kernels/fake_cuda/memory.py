"""A device's memory and the host's page-locked memory, in the memory of the CPU.

What is queued reaches memory through an alias, so that memory which the program has let go of is
noticed: it is filled with poison behind the work of the stream that it was allocated in, as the
caching allocator would give it to that stream's next work.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.kernels.fake_cuda.queue import Queue, Stream

__all__ = ["Memory", "plain_torch"]

ALIGNMENT = 256
POISON = 0xFF  # NaN in every format, and -1


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run torch as it is, on the CPU."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
        with torch.no_grad():
            yield


@attrs.frozen(eq=False)
class _Block:
    bytes: npt.NDArray[np.uint8]
    stream: Stream | None
    """The stream that it was allocated in; None of page-locked memory."""


class Memory:
    """Blocks of memory by their address."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._blocks: dict[int, _Block] = {}
        self._freed: deque[_Block] = deque()
        self._locked: list[range] = []

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        block = self._blocks.get(_address(tensor))
        return block is not None and block.stream is not None

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in page-locked memory of the host."""
        address = _address(tensor)
        block = self._blocks.get(address)
        if block is None:
            return any(address in addresses for addresses in self._locked)
        return block.stream is None

    def lock(self, address: int, size: int) -> None:
        """Lock pages of the host."""
        self._queue.refuse_in_capture("cudaHostRegister")
        self._locked.append(range(address, address + size))

    def empty(self, like: torch.Tensor, *, pinned: bool = False) -> torch.Tensor:
        """Allocate poisoned memory for a tensor of the shape and strides of ``like``."""
        self.sweep()
        stream = None if pinned else self._queue.current
        if stream is not None and self._queue.captures and stream.graph is None:
            self._queue.refuse_in_capture("cudaMalloc outside of the graph's pool")
        last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
        size = like.element_size() * (last + 1) if like.numel() else 1
        with plain_torch():
            room = np.empty((-(-size // ALIGNMENT) + 1) * ALIGNMENT, np.uint8)
            start = -room.ctypes.data % ALIGNMENT
            whole = room[start : start + len(room) - ALIGNMENT]
            whole.fill(POISON)
            block = _Block(whole, stream)
            handle = whole[:]  # lives as long as the program's tensors
            self._blocks[whole.ctypes.data] = block
            weakref.finalize(handle, self._freed.append, block).atexit = False
            flat = torch.from_numpy(handle).view(like.dtype)
            return flat.as_strided(like.shape, like.stride())

    def alias(self, value: Any) -> Any:
        """Return the same memory for work that is queued, if ``value`` is such a tensor."""
        block = self._blocks.get(_address(value)) if isinstance(value, torch.Tensor) else None
        if block is None:
            return value
        with plain_torch():
            flat = torch.from_numpy(block.bytes).view(value.dtype)
            return flat.as_strided(value.shape, value.stride(), value.storage_offset())

    def sweep(self) -> None:
        """Queue the poison for what the program let go of."""
        while self._freed:
            block = self._freed.popleft()
            self._blocks.pop(block.bytes.ctypes.data, None)
            if block.stream is not None:
                self._queue.queue(
                    block.stream, "free", lambda block=block: block.bytes.fill(POISON)
                )


def _address(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():
        if tensor.layout != torch.strided:  # a weight in a library's own layout, on the CPU
            return 0
        return tensor.untyped_storage().data_ptr()

"""The calls of torch that name a device, as if there were one."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests.kernels.fake_cuda.memory import Memory, plain_torch
from tests.kernels.fake_cuda.operations import QueuedOperations
from tests.kernels.fake_cuda.queue import Queue

__all__ = ["DEVICE", "DeviceCalls"]

DEVICE = torch.device("cuda", 0)
_GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_GET_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_TO_HOST = ("cpu", "tolist")


class DeviceCalls(TorchFunctionMode):
    """Makes tensors on the device, moves them there and back, and says where they are."""

    def __init__(self, queue: Queue, memory: Memory, operations: QueuedOperations) -> None:
        super().__init__()
        self._queue = queue
        self._memory = memory
        self._operations = operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        name = getattr(func, "__name__", "")
        if isinstance(first, torch.Tensor):
            here = self._memory.on_device(first)
            if func == _GET_DEVICE:
                return DEVICE if here else func(*args)
            if func == _GET_IS_CUDA:
                return here
            if name == "to":
                return self._to(func, args, kwargs)
            if here and name == "numpy":
                raise TypeError("can't convert a tensor on the device to NumPy")
            if here and name in _TO_HOST:
                return func(self._to_host(first), *args[1:], **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
            if name in ("tensor", "as_tensor"):
                return self._to_device(func(*args, **kwargs), non_blocking=False)
            with self._operations.placing("device"):
                return func(*args, **kwargs)
        if kwargs.pop("pin_memory", False):
            with self._operations.placing("pinned"):
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def pinned_copy(self, host: torch.Tensor) -> torch.Tensor:
        """Return a page-locked copy of a tensor of the host."""
        with plain_torch():
            pinned = self._memory.empty(host.contiguous(), pinned=True)
            return pinned.copy_(host)

    def _to(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = args[0]
        devices = [each for each in (*args[1:], kwargs.get("device")) if _is_device(each)]
        if not devices:
            moved: torch.Tensor = func(*args, **kwargs)
            return moved
        kwargs.pop("device", None)
        non_blocking = kwargs.pop("non_blocking", False)
        rest = [each for each in args[1:] if not _is_device(each)]
        if rest or kwargs:
            tensor = func(tensor, *rest, **kwargs)
        here = self._memory.on_device(tensor)
        if _is_cuda(devices[0]):
            return tensor if here else self._to_device(tensor, non_blocking)
        return self._to_host(tensor) if here else tensor

    def _to_device(self, tensor: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        return self._operations.copy(self._memory.empty(tensor), tensor, non_blocking)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        with plain_torch():
            host = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._operations.copy(host, tensor)
        return host


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda"))


def _is_cuda(value: Any) -> bool:
    return value is not None and torch.device(value).type == "cuda"

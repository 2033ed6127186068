"""Torch's operations on the device, queued: shapes are known at once, numbers later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.kernels.fake_cuda.memory import Memory, plain_torch
from tests.kernels.fake_cuda.queue import CudaError, Queue

__all__ = ["QueuedOperations"]

aten = torch.ops.aten
READS = ("_local_scalar_dense", "nonzero", "equal")
VIEWS = ("_unsafe_view", "_reshape_alias")


class QueuedOperations(TorchDispatchMode):
    """Queues all that is computed from tensors of the device, in the current stream."""

    def __init__(self, queue: Queue, memory: Memory) -> None:
        super().__init__()
        self._queue = queue
        self._memory = memory
        self._places = ""

    @contextmanager
    def placing(self, place: str) -> Iterator[None]:
        """Have tensors that are made of nothing lie on the "device", or "pinned"."""
        before, self._places = self._places, place
        try:
            yield
        finally:
            self._places = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = [self._memory.on_device(tensor) for tensor in tensors]
        if not (any(on_device) or (self._places and not tensors)):
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        if func is aten.copy_.default:
            return self.copy(*args, **kwargs)
        if name in READS:
            self._queue.drain_stream(self._queue.current, f"cudaStreamSynchronize ({name})")
            return func(*args, **kwargs)
        if name in VIEWS or (_is_alias(func) and not func._schema.is_mutable):
            return func(*args, **kwargs)
        if not tensors and self._places == "pinned":
            return self._pinned(func, args, kwargs)
        for tensor, here in zip(tensors, on_device, strict=True):
            if not here and tensor.ndim:
                raise CudaError(f"{name} of tensors on the CPU and on the device")
        return self._compute(func, args, kwargs)

    def copy(
        self, into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy between two tensors, of which one at least is on the device."""
        memory, queue = self._memory, self._queue
        pageable = [
            each
            for each in (into, source)
            if not (memory.on_device(each) or memory.is_pinned(each))
        ]
        across = not (memory.on_device(into) and memory.on_device(source))
        call = "cudaMemcpyAsync"
        if pageable:
            call = "cudaMemcpyAsync of memory that isn't page-locked"
            queue.refuse_in_capture(call)
        with plain_torch():
            taken = (
                source.clone() if any(each is source for each in pageable) else memory.alias(source)
            )
        queue.queue(queue.current, call, partial(_copy, memory.alias(into), taken))
        if pageable or (across and not non_blocking):
            queue.drain_stream(queue.current, call)
        return into

    def _pinned(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        with plain_torch():
            made: torch.Tensor = func(*args, **kwargs)
        tensor = self._memory.empty(made, pinned=True)
        if not func.overloadpacket.__name__.startswith("empty"):
            _copy(tensor, made)
        return tensor

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        memory, queue = self._memory, self._queue
        name = func.overloadpacket.__name__
        memory.sweep()
        work = partial(
            _on_cpu(func), *tree_map(memory.alias, args), **tree_map(memory.alias, kwargs)
        )
        if func._schema.is_mutable:
            queue.queue(queue.current, name, partial(_run, work))
            return _written(func, args, kwargs)
        with plain_torch():
            shapes = func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **_on_meta(kwargs)})
        result = tree_map(memory.empty, shapes)
        if not name.startswith(("empty", "new_empty")):
            targets = tree_leaves(tree_map(memory.alias, result))
            queue.queue(queue.current, name, partial(_compute_into, targets, work))
        return result


def _is_alias(func: Any) -> bool:
    return any(each.alias_info is not None for each in func._schema.returns)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments that an operation wrote to, as it returns them itself."""
    written = [
        kwargs[argument.name] if argument.name in kwargs else args[index]
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(written) == 1 else tuple(written)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value if not isinstance(value, torch.Tensor) else value.to("meta")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _on_meta(kwargs: Any) -> dict[str, Any]:
    return {"device": torch.device("meta"), "pin_memory": False} if "device" in kwargs else {}


def _on_cpu(func: Any) -> Callable[..., Any]:
    """Return what computes ``func`` on the CPU, which has no product with sums in float32."""
    return _product if func in (aten.mm.dtype, aten.mm.dtype_out) else func


def _product(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Round once more than a GPU does, for the tokens to be those of a model on the CPU."""
    product = torch.mm(x, weight)
    return product.to(dtype) if out is None else out.copy_(product)


def _run(work: Callable[[], Any]) -> None:
    with plain_torch():
        work()


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    with plain_torch():
        into.copy_(source)


def _compute_into(targets: list[torch.Tensor], work: Callable[[], Any]) -> None:
    with plain_torch():
        for target, value in zip(targets, tree_leaves(work()), strict=True):
            target.copy_(value)

"""CUDA graphs for the emulation: work is recorded launch by launch, with what it was launched with.

A replay runs the same kernels with the same parameters and the same torch operations on the same
tensors, writing to the same memory. Nothing of the Python code runs again, so what it reads from
anywhere but device memory is what it was at the capture, as in a real graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpu.cuda.graphs import Graph
from gpu.kernels import Kernel, KernelLoader, KernelSource
from gpu.models.parallel.ranks import Ranks

__all__ = ["TapeCapturer", "TapedLoader", "TapedRanks"]

T = TypeVar("T")
Launch = Callable[[], None]
REFUSED = ("item", "is_nonzero", "_local_scalar_dense", "nonzero", "lift_fresh")


class TapedLoader:
    """:class:`gpu.kernels.KernelLoader` that records its launches while a tape is in it."""

    def __init__(self, inner: KernelLoader) -> None:
        self.inner = inner
        self.tape: list[Launch] | None = None
        self.launches: Counter[str] = Counter()
        """Kernel -> how often it was launched, replays not counted."""
        self.loaded: set[KernelSource] = set()

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    @property
    def device(self) -> torch.device:
        return self.inner.device

    @property
    def num_multiprocessors(self) -> int:
        return self.inner.num_multiprocessors

    def load(self, source: KernelSource) -> Kernel:
        self.loaded.add(source)
        return _TapedKernel(self, source.name, self.inner.load(source))


class _TapedKernel:
    def __init__(self, loader: TapedLoader, name: str, inner: Kernel) -> None:
        self._loader = loader
        self._name = name
        self._inner = inner

    def launch(self, grid: tuple[int, int, int], parameters: npt.NDArray[Any]) -> None:
        self._loader.launches[self._name] += 1
        self._inner.launch(grid, parameters)
        if self._loader.tape is not None:
            self._loader.tape.append(partial(self._inner.launch, grid, np.copy(parameters)))


class TapedRanks:
    """:class:`gpu.models.parallel.ranks.Ranks` that records each exchange as one launch."""

    def __init__(self, inner: Ranks, loader: TapedLoader) -> None:
        self._inner = inner
        self._loader = loader

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("all_reduce", x, x)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("broadcast", x, x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._exchange("all_gather", x, None)

    def _exchange(self, name: str, x: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        exchange, loader = getattr(self._inner, name), self._loader
        loader.launches[name] += 1
        with _disable_current_modes():
            found: torch.Tensor = exchange(x)
            target = found if into is None else into.copy_(found)
        if loader.tape is not None:
            loader.tape.append(lambda: target.copy_(exchange(x)))
        return target


class TapeCapturer:
    """:class:`gpu.cuda.graphs.Capturer` of what runs through ``loader`` and torch on the CPU."""

    def __init__(self, loader: TapedLoader) -> None:
        self._loader = loader

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        work()
        tape: list[Launch] = []
        self._loader.tape = tape
        try:
            with torch.inference_mode(), _Recorder(tape):
                result = work()
        finally:
            self._loader.tape = None
        return _Tape(tape), result


class _Tape:
    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches

    def replay(self) -> None:
        with torch.inference_mode():
            for launch in self._launches:
                launch()


class _Recorder(TorchDispatchMode):
    """Notes every torch operation that does work, refusing those that a graph can't hold."""

    def __init__(self, tape: list[Launch]) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in REFUSED:
            raise RuntimeError(f"{name} while capturing: the device's numbers aren't known yet")
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self._tape.append(partial(func, *args, **kwargs))
        elif not name.startswith("empty") and not _storages(result) & _storages(args):
            self._tape.append(partial(_again, result, func, args, kwargs))
        return result


def _storages(values: Any) -> set[int]:
    """Return the memory of every tensor among ``values``; an operation that adds none is a view."""
    if isinstance(values, torch.Tensor):
        if values.layout != torch.strided:  # a weight in a library's own layout
            return set()
        return {values.untyped_storage().data_ptr()}
    if isinstance(values, (tuple, list)):
        return set().union(*(_storages(value) for value in values))
    return set()


def _again(result: Any, func: Any, args: Any, kwargs: Any) -> None:
    """Compute once more and put the result where the first one was."""
    targets = result if isinstance(result, (tuple, list)) else [result]
    values = func(*args, **kwargs)
    values = values if isinstance(values, (tuple, list)) else [values]
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)

"""Loading and launching of kernels on a GPU, against a driver that only records calls."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from gpu.kernels import KernelSource, parameters
from gpu.kernels.cubins import CubinCache
from gpu.kernels.device import DeviceKernel, DeviceLoader, KernelLaunchError, _driver
from gpu.kernels.nvrtc import KernelBuildError

STREAM = 0x5EED
KERNEL = """\
struct Parameters { unsigned long long x; int n; };
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);
extern "C" __global__ void mark(const Parameters p) { if (p.n) *(int*)p.x = p.n; }
"""


class Driver:
    """The part of :mod:`cupy_backends.cuda.api.driver` that kernels need."""

    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9

    def __init__(self) -> None:
        self.modules: list[bytes] = []
        self.names: list[str] = []
        self.attributes: list[tuple[int, int, int]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.failure: RuntimeError | None = None

    def moduleLoadData(self, image: bytes) -> int:
        self.modules.append(image)
        return 100 + len(self.modules)

    def moduleGetFunction(self, module: int, name: str) -> int:
        assert module == 100 + len(self.modules)
        self.names.append(name)
        return 200 + len(self.names)

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        assert attribute == self.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        return 256

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.attributes.append((function, attribute, value))

    def launchKernel(self, *arguments: int) -> None:
        if self.failure is not None:
            raise self.failure
        *numbers, pointers, extra = arguments
        (address,) = (ctypes.c_void_p * 1).from_address(pointers)
        self.launches.append((*numbers, ctypes.string_at(address or 0, 16), extra))


@pytest.fixture
def source(tmp_path: Path) -> KernelSource:
    (tmp_path / "mark.cu").write_text(KERNEL)
    return KernelSource(
        name="mark",
        parameters=parameters(("x", "u8"), ("n", "i4")),
        num_threads=64,
        shared_bytes=96,
        file=str(tmp_path / "mark.cu"),
    )


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def loader(driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeviceLoader:
    """On a GPU that isn't there: the second of an H200's."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    streams = {1: STREAM}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", streams.__getitem__, raising=False)
    monkeypatch.setattr("gpu.kernels.device._driver", lambda: driver)
    return DeviceLoader(cache=CubinCache(tmp_path / "cache"))


def arguments(source: KernelSource, x: int, n: int) -> np.ndarray[Any, Any]:
    return np.array([(x, n)], dtype=source.parameters)


def test_the_gpu_decides_the_target(loader: DeviceLoader) -> None:
    assert loader.target == "sm_90a"
    assert loader.device == torch.device("cuda", 1)
    assert loader.num_multiprocessors == 132


def test_a_kernel_is_loaded_once(
    loader: DeviceLoader, driver: Driver, source: KernelSource
) -> None:
    kernel = loader.load(source)
    assert loader.load(source) is kernel
    (image,) = driver.modules
    assert image.startswith(b"\x7fELF")
    assert driver.names == ["mark"]
    assert driver.attributes == [
        (201, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 96),
        (201, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),
    ]


def test_many_are_prepared_at_once(
    loader: DeviceLoader, driver: Driver, source: KernelSource
) -> None:
    variants = [attrs.evolve(source, defines=(("N", n),)) for n in range(3)]
    heard: list[tuple[int, int]] = []
    loader.prepare([*variants, variants[0]], lambda done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    for variant in variants:
        loader.load(variant)
    assert len(driver.modules) == 3


def test_a_launch_passes_grid_stream_and_the_bytes_of_the_parameters(
    loader: DeviceLoader, driver: Driver, source: KernelSource
) -> None:
    kernel = loader.load(source)
    first, second = arguments(source, 0x1234, 5), arguments(source, 0x77, -1)
    kernel.launch((7, 2, 3), first)
    first["n"] = 6
    kernel.launch((7, 2, 3), first)
    kernel.launch((1, 1, 1), second)
    start = (64, 1, 1, 96, STREAM)
    passed = [
        bytes(arguments(source, *each).data) for each in ((0x1234, 5), (0x1234, 6), (0x77, -1))
    ]
    assert [(launch[-2][:12], launch[:-2], launch[-1]) for launch in driver.launches] == [
        (passed[0][:12], (201, 7, 2, 3, *start), 0),
        (passed[1][:12], (201, 7, 2, 3, *start), 0),
        (passed[2][:12], (201, 1, 1, 1, *start), 0),
    ]


def test_a_grid_with_a_zero_launches_nothing(
    loader: DeviceLoader, driver: Driver, source: KernelSource
) -> None:
    kernel = loader.load(source)
    for grid in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        kernel.launch(grid, arguments(source, 0, 0))
    assert driver.launches == []


def test_parameters_of_another_layout_are_refused(
    loader: DeviceLoader, source: KernelSource
) -> None:
    kernel = loader.load(source)
    with pytest.raises(AssertionError):
        kernel.launch((1, 1, 1), np.zeros(1, dtype=parameters(("x", "u8"))))
    with pytest.raises(AssertionError):
        kernel.launch((1, 1, 1), np.zeros(2, dtype=source.parameters))


def test_a_refused_launch_names_the_kernel(
    loader: DeviceLoader, driver: Driver, source: KernelSource
) -> None:
    kernel = loader.load(source)
    driver.failure = RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
    with pytest.raises(KernelLaunchError, match=r"^mark over \(1, 2, 3\) blocks: CUDA_ERROR_INV"):
        kernel.launch((1, 2, 3), arguments(source, 0, 0))


def test_more_than_the_gpu_has_is_refused(loader: DeviceLoader, source: KernelSource) -> None:
    limit = 227 << 10
    loader.load(attrs.evolve(source, shared_bytes=limit))
    with pytest.raises(KernelBuildError, match="needs 232449 bytes of shared memory a block, this"):
        loader.load(attrs.evolve(source, shared_bytes=limit + 1))
    with pytest.raises(KernelBuildError, match="blocks of 512 threads, its registers allow 256"):
        loader.load(attrs.evolve(source, num_threads=512))


def test_a_kernel_that_cannot_be_built_or_loaded_is_named(
    loader: DeviceLoader, driver: Driver, source: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KernelBuildError, match=r"^mark for sm_90a: mark\.cu\(2\): error"):
        loader.load(attrs.evolve(source, parameters=parameters(("x", "u8"))))

    def refuse(image: bytes) -> int:
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(driver, "moduleLoadData", refuse)
    with pytest.raises(KernelBuildError, match="mark can't be loaded: CUDA_ERROR_NO_BINARY"):
        DeviceKernel(source, b"", driver, lambda: 0)


def test_cupys_driver_has_what_is_called() -> None:
    driver = _driver()
    called = [name for name in dir(Driver) if name.startswith(("CU_", "module", "func", "launch"))]
    assert len(called) == 8
    assert all(hasattr(driver, name) for name in called)

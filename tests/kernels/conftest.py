"""Where the kernels under test run: ``--kernels-on`` and ``--kernels-sanitizer``."""

from __future__ import annotations

import zlib

import pytest

from gpu.emulation import FORWARD, RANDOM, REVERSE, EmulatedLoader
from gpu.kernels import FOLDER, KernelLoader


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error::gpu.emulation.BuildWarning")


@pytest.fixture(scope="session")
def device_loader() -> KernelLoader:
    """The GPU's loader, one for all tests: it compiles and keeps the kernels."""
    import torch

    from gpu.kernels.device import DeviceLoader

    return DeviceLoader(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def loader(request: pytest.FixtureRequest) -> KernelLoader:
    """Runs kernels in the emulation, in an order drawn from the test's name, or on the GPU."""
    if request.config.getoption("--kernels-on") == "gpu":
        loader: KernelLoader = request.getfixturevalue("device_loader")
        return loader
    return EmulatedLoader(
        order=RANDOM,
        seed=zlib.crc32(request.node.name.encode()),
        sanitizer=request.config.getoption("--kernels-sanitizer"),
        folder=request.config.getoption("--kernels-folder") or FOLDER,
    )


@pytest.fixture
def loaders(request: pytest.FixtureRequest, loader: KernelLoader) -> list[KernelLoader]:
    """Loaders under which a kernel must give the same bits, whatever order its threads run in.

    In the emulation they differ in order and seed. On a GPU, which picks an order of its own each
    time, they are one loader several times.
    """
    if not isinstance(loader, EmulatedLoader):
        return [loader] * 4
    orders = [(FORWARD, 0), (REVERSE, 1), (RANDOM, 2), (RANDOM, 3)]
    return [
        EmulatedLoader(
            order=order,
            seed=loader.seed + seed,
            sanitizer=loader.sanitizer,
            folder=loader.folder,
        )
        for order, seed in orders
    ]

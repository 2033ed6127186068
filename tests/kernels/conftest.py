"""The options ``--kernels-on`` and ``--kernels-sanitizer``: where kernels under test run."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from gpu.kernels import FOLDER, KernelLoader
from gpu.kernels.emulation import ARITHMETICS, FORWARD, PLAIN, RANDOM, REVERSE, EmulatedLoader

if TYPE_CHECKING:
    from tests.kernels.fake_cuda.gpu import FakeGpu


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error::gpu.kernels.emulation.build.BuildWarning")
    config.addinivalue_line(
        "markers",
        "every_arithmetic: a test of kernels that runs in each arithmetic of the emulation",
    )


def _has_one_arithmetic(config: pytest.Config) -> bool:
    """Return whether a run is about something else: a GPU, a sanitizer, a planted defect."""
    others = ("sanitizer", "folder", "arithmetic")
    option = config.getoption
    return option("--kernels-on") == "gpu" or any(option(f"--kernels-{name}") for name in others)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave the tests of single kernels to the thorough run, but where the run is about them."""
    if item.get_closest_marker("every_arithmetic") and not _has_one_arithmetic(item.config):
        item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run two cases of each test, its first and its last, in other arithmetics than PLAIN.

    A tolerance belongs to a test, and a fused kernel is a build of its own.
    """
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            arithmetic = item.callspec.params.get("arithmetic", PLAIN)
            if arithmetic != PLAIN:
                test = item.nodeid.partition("[")[0]
                cases.setdefault((test, arithmetic), []).append(item)
    left_out = {item for each in cases.values() for item in each[1:-1]}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that are marked so in each arithmetic, but those of the order of threads."""
    one = _has_one_arithmetic(metafunc.config)
    marked = metafunc.definition.get_closest_marker("every_arithmetic") is not None
    fixtures = metafunc.fixturenames
    if marked and not one and "arithmetic" in fixtures and "loaders" not in fixtures:
        metafunc.parametrize("arithmetic", ARITHMETICS, indirect=True)


@pytest.fixture(scope="session")
def device_loader() -> KernelLoader:
    """The GPU's loader, one for all tests: it compiles and keeps the kernels."""
    import torch

    from gpu.kernels.device import DeviceLoader

    return DeviceLoader(torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def arithmetic(request: pytest.FixtureRequest) -> str:
    """The rounding of the emulation."""
    chosen: str = getattr(request, "param", request.config.getoption("--kernels-arithmetic"))
    return chosen or PLAIN


@pytest.fixture
def loader(request: pytest.FixtureRequest, arithmetic: str) -> KernelLoader:
    """Runs kernels in the emulation, in an order drawn from the test's name, or on the GPU."""
    if request.config.getoption("--kernels-on") == "gpu":
        loader: KernelLoader = request.getfixturevalue("device_loader")
        return loader
    return EmulatedLoader(
        order=RANDOM,
        seed=zlib.crc32(request.node.name.encode()),
        sanitizer=request.config.getoption("--kernels-sanitizer"),
        arithmetic=arithmetic,
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
            arithmetic=loader.arithmetic,
            folder=loader.folder,
        )
        for order, seed in orders
    ]


@pytest.fixture
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """An emulated GPU with queued work."""
    if request.config.getoption("--kernels-on") == "gpu":
        pytest.skip("there is a real one")
    from tests.kernels.fake_cuda.gpu import fake_gpu  # leans on torch's insides: not on a card

    with fake_gpu(monkeypatch) as gpu:
        yield gpu

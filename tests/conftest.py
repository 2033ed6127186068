"""Runs async tests under trio, each with a time limit, so that a hang is a failure with a trace.

No verdict may hang on how fast a machine is, or on what else it does: limits of time are there for
what would never come.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio
import trio.testing

from tests.support.model_server import Server, serving
from trioserve.protocol.gc_tuning import without_gc

TEST_TIMEOUT = 180.0
SLOW_MODULES = {
    "tests/attacks/test_tenants.py",
    "tests/clients/test_clients.py",
    "tests/docs/test_docs.py",
    "tests/engine/test_adapters.py",
    "tests/engine/test_other_hosts.py",
    "tests/engine/test_parity.py",
    "tests/engine/test_pause.py",
    "tests/engine/test_real_engine.py",
    "tests/engine/test_worker_death.py",
    "tests/exactness/test_matrix.py",
    "tests/faults/test_faults_in_short.py",
    "tests/front_ends/test_server.py",
    "tests/gpu/weights/test_weights.py",
    "tests/http/test_schemathesis.py",
    "tests/kernels/test_draft_model.py",
    "tests/kernels/test_whole_model.py",
    "tests/pooling/test_server.py",
    "tests/testing/test_simulated_clusters.py",
    "tests/testing/test_simulated_engine.py",
    "tests/testing/test_simulated_faults.py",
    "tests/workers/ray/test_cluster.py",
    "tests/workers/remote/test_two_hosts.py",
}
"""Modules that take from half a minute to three minutes."""

# The same examples every time and everywhere; and none fails because it took long once.
# Others are found by the fuzzer and by the simulation.
hypothesis.settings.register_profile(
    "everywhere",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("everywhere")


@pytest.fixture
def autojump_clock() -> trio.testing.MockClock:
    """Virtual time that jumps ahead whenever every task waits."""
    return trio.testing.MockClock(autojump_threshold=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The real server with the default model, for as long as a module's tests run."""
    with serving() as server:
        yield server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--thorough",
        action="store_true",
        help="run the tests marked as thorough, and no others (python -m nox -s thorough)",
    )
    kernels = parser.getgroup("kernels", "the worker's CUDA kernels")
    kernels.addoption(
        "--kernels-on",
        choices=("cpu", "gpu"),
        default="cpu",
        help="run the kernel tests in the emulation (cpu) or on the GPU",
    )
    kernels.addoption(
        "--kernels-sanitizer",
        choices=("", "address", "thread"),
        default="",
        help="build the emulated kernels with a sanitizer, whose library must be in LD_PRELOAD",
    )
    kernels.addoption(
        "--kernels-arithmetic",
        choices=("plain", "fused", "rough"),
        help="the one arithmetic of the emulation, instead of all where a test asks for them",
    )
    kernels.addoption(
        "--kernels-folder",
        type=Path,
        help="where the emulation takes the kernels' sources, instead of gpu/kernels",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "time_limit(seconds): a test that may take longer than the others"
    )
    config.addinivalue_line(
        "markers", "thorough: a test that only a change of kernels can break; see tests/thorough.py"
    )


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude what the test modules make and import from garbage collections, which become rare.

    Each full collection would look at millions of objects that live as long as the process.
    """
    with without_gc():
        yield
    gc.set_threshold(10_000, 10, 10)


def _run_under_trio(function: Callable[..., Any], limit: float) -> Callable[..., None]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        clocks = [value for value in kwargs.values() if isinstance(value, trio.abc.Clock)]

        async def main() -> None:
            # A virtual clock jumps past any deadline, so only real time is limited.
            with trio.fail_after(limit) if not clocks else trio.CancelScope():
                await function(*args, **kwargs)

        trio.run(main, clock=clocks[0] if clocks else None)

    return wrapper


def _is_quick(item: pytest.Item) -> bool:
    """Return whether a test's module may run after those that take minutes.

    Begun last, such a module would leave all processes but its own without work.
    """
    return item.path.relative_to(item.config.rootpath).as_posix() not in SLOW_MODULES


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        is_thorough = item.get_closest_marker("thorough") is not None
        chosen[is_thorough == config.getoption("thorough")].append(item)
    items[:] = sorted(chosen[True], key=_is_quick)
    if chosen[False]:
        config.hook.pytest_deselected(items=chosen[False])
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            marker = item.get_closest_marker("time_limit")
            limit = marker.args[0] if marker else TEST_TIMEOUT
            item.obj = _run_under_trio(item.obj, limit)

"""Each instruction set of the compiled kernels, for tests to compute with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import computing_with, isas, kernels_of_each_isa


@pytest.fixture(scope="module", params=kernels_of_each_isa(isas()))
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each instruction set that this machine can run."""
    with computing_with(request.param):
        yield request.param


@pytest.fixture(scope="module", params=kernels_of_each_isa(isas(twins=True)))
def each_way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each instruction set, with and without extensions, and with their twins."""
    with computing_with(request.param):
        yield request.param


@pytest.fixture(
    scope="module",
    params=kernels_of_each_isa([way for way in isas(twins=True) if not way.startswith("avx2_")]),
)
def each_attention(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute with each instruction set, and with the twin of the one whose attention has one."""
    with computing_with(request.param):
        yield request.param

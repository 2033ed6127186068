"""Leaves tests of single kernels to the thorough run, but for the best instruction set."""

from __future__ import annotations

import pytest

from tests.support.kernels import isas

FIXTURES = ("each_isa", "each_way", "each_attention")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "single_kernels: tests of kernels that only a change of kernels can break"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test of single kernels as thorough, but for the machine's best instruction set."""
    if item.get_closest_marker("single_kernels") and isinstance(item, pytest.Function):
        params = item.callspec.params if hasattr(item, "callspec") else {}
        names = {params[fixture] for fixture in FIXTURES if fixture in params}
        if names - set(isas()[-1:]):
            item.add_marker(pytest.mark.thorough)

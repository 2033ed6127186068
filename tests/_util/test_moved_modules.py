"""Public modules answer to their old names, with a warning."""

from __future__ import annotations

import importlib

import pytest

from trioserve.observability.live import schema
from trioserve.protocol import errors


@pytest.mark.parametrize(
    ("old", "module"), [("trioserve.errors", errors), ("trioserve.live.schema", schema)]
)
def test_an_old_name_is_the_same_module(old: str, module: object) -> None:
    spec = schema.__spec__
    with pytest.warns(DeprecationWarning, match="the old name ends with 1.0"):
        assert importlib.import_module(old) is module
    assert schema.__spec__ is spec


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("trioserve.errorss")

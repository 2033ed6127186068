"""A server for the attacks of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.siege import Victim, besieged


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A server whose worker computes nothing, for as long as a module's tests run."""
    with besieged("--mock-worker", "5ms") as victim:
        yield victim

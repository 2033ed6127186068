"""A server for the attacks of all modules that need no options of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.attacks.siege import Victim, besieged


@pytest.fixture(scope="session")
def common_victim() -> Iterator[Callable[[], Victim]]:
    """A function that returns a server with a mock worker: the same one for as long as it runs."""
    with contextlib.ExitStack() as stack:
        running: list[Victim] = []

        def get() -> Victim:
            if not running or running[-1].process.poll() is not None:
                running.append(stack.enter_context(besieged("--mock-worker", "5ms")))
            return running[-1]

        yield get


@pytest.fixture
def victim(common_victim: Callable[[], Victim]) -> Victim:
    """A server that other attacks may have been tried on; none that has ended."""
    return common_victim()

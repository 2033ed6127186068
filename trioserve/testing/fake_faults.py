"""Faults of a fake worker, which a script raises."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.protocol import wire

Script = Callable[[int, wire.Plan], None]
"""Function that is called with the number of steps done and the next plan; may raise the errors
below.
"""


class WorkerDies(Exception):
    """A script raises this to end the worker here, without an answer."""


class StepFails(Exception):
    """A script raises this to fail the plan. ``slot`` caused it, unless it is -1."""

    def __init__(self, message: str, *, slot: int = -1, fatal: bool = False) -> None:
        super().__init__(message)
        self.slot = slot
        self.fatal = fatal

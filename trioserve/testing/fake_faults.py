"""Faults of a fake worker, raised by a script."""

from __future__ import annotations

from collections.abc import Callable

from trioserve.protocol import wire

Script = Callable[[int, wire.Plan], None]
"""Function that takes the number of completed steps and the next plan; may raise the errors below.
"""


class WorkerDies(Exception):
    """Raised by a script to end the worker without an answer."""


class StepFails(Exception):
    """Raised by a script to fail the plan. ``slot`` is the cause; -1 for none."""

    def __init__(self, message: str, *, slot: int = -1, fatal: bool = False) -> None:
        super().__init__(message)
        self.slot = slot
        self.fatal = fatal

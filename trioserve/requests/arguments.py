"""Arguments that every kind of request takes, checked before a task depends on them."""

from __future__ import annotations

import math

from trioserve.protocol.errors import InvalidRequest


def check_arguments(
    priority: int, timeout: float | None, arrived: float | None, **texts: str
) -> None:
    """Refuse arguments that would fail in a task, where they would end every request.

    Raises:
        InvalidRequest: one has a wrong type or is out of range; ``param`` names it.
    """
    for name, value in texts.items():
        if not isinstance(value, str):
            raise InvalidRequest(f"{name} must be a string, got {value!r}", param=name)
    if not isinstance(priority, int):
        raise InvalidRequest(f"priority must be an integer, got {priority!r}", param="priority")
    if arrived is not None and not (isinstance(arrived, (int, float)) and math.isfinite(arrived)):
        raise InvalidRequest(f"arrived must be a time, got {arrived!r}", param="arrived")
    if timeout is not None and not (isinstance(timeout, (int, float)) and timeout >= 0):
        raise InvalidRequest(
            f"timeout must be a number of seconds from 0 up, got {timeout!r}", param="timeout"
        )

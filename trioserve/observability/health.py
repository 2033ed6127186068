"""How an engine is, in one word."""

from __future__ import annotations

from typing import Protocol


class Patient(Protocol):
    """What is asked of an engine."""

    @property
    def healthy(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def stalled(self) -> bool: ...


def health_word(engine: Patient) -> str:
    """How ``engine`` is: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""
    if engine.healthy:
        return "ok"
    if engine.draining:
        return "draining"
    return "stalled" if engine.stalled else "no_worker"

"""The health of an engine, in one word."""

from __future__ import annotations

from typing import Protocol


class Patient(Protocol):
    """The properties of an engine that its health depends on."""

    @property
    def healthy(self) -> bool: ...

    @property
    def draining(self) -> bool: ...

    @property
    def stalled(self) -> bool: ...


def health_word(engine: Patient) -> str:
    """Return the health of ``engine``: ``ok``, ``draining``, ``no_worker`` or ``stalled``."""
    if engine.healthy:
        return "ok"
    if engine.draining:
        return "draining"
    return "stalled" if engine.stalled else "no_worker"

"""Properties of an engine as functions, to be called in its thread."""

from __future__ import annotations

from trioserve.engine.engine import Engine
from trioserve.requests.adapters import Adapter


def list_adapters(engine: Engine) -> tuple[Adapter, ...]:
    """Return the adapters that requests may name, in the order in which they were loaded."""
    return engine.adapters


def weight_version(engine: Engine) -> str:
    """Return the name of the weights that serve: ``default`` for those that were loaded first."""
    return engine.weight_version


def is_paused(engine: Engine) -> bool:
    """Return whether :meth:`pause` holds."""
    return engine.paused

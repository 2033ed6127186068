"""Texts of a front end that are computed as a whole: it tokenizes them, and does nothing else.

The queue is in the engine process, one for all front ends: their texts share the worker's calls.
"""

from __future__ import annotations

from trioserve.engine.loaded_model import LoadedModel
from trioserve.front_ends.calls import EngineCalls
from trioserve.pooling.columns import Columns, Floats, vectors_of
from trioserve.pooling.requests import Encoding


def remote_encoding(model: LoadedModel, calls: EngineCalls) -> Encoding | None:
    """Return the way in which a front end has texts computed; None if its model is no encoder.

    Args:
        model: what the front end serves.
        calls: made of the engine process.
    """
    if model.encoder is None:
        return None

    async def compute(columns: Columns, tenant: str) -> Floats:
        return vectors_of(await calls.encode(columns.message(), tenant), len(columns))

    return Encoding(encoder=model.encoder, compute=compute)

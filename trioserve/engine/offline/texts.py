"""Lists of texts as a whole (embeddings, scores, labels), computed in the engine's thread.

Lists may be of any length: each is computed in parts that the engine's queue has room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trioserve.engine.engine import Engine
from trioserve.pooling.inputs import Inputs, Item, as_items
from trioserve.pooling.results import Classifications, Embeddings, Scores
from trioserve.requests.generation import Usage


async def embed_all(engine: Engine, inputs: Inputs, options: dict[str, Any]) -> Embeddings:
    """Embed texts; arguments and errors are those of :meth:`Engine.embed`."""
    room = max(engine.config.max_num_queued_reqs, 1)
    parts = [await engine.embed(part, **options) for part in _parts(inputs, room)]
    return Embeddings(
        np.concatenate([part.vectors for part in parts]),
        _usage_of(parts),
        tuple(count for part in parts for count in part.num_tokens),
    )


async def score_all(
    engine: Engine,
    queries: str | Sequence[str],
    documents: str | Sequence[str],
    options: dict[str, Any],
) -> Scores:
    """Score pairs of texts; arguments and errors are those of :meth:`Engine.score`."""
    # A model that embeds reads the queries, too, of which there may be as many.
    room = max(engine.config.max_num_queued_reqs // 2, 1)
    parts = [
        await engine.score(firsts, seconds, **options)
        for firsts, seconds in _parts_of_pairs(queries, documents, room)
    ]
    return Scores(np.concatenate([part.values for part in parts]), _usage_of(parts))


async def classify_all(engine: Engine, inputs: Inputs, options: dict[str, Any]) -> Classifications:
    """Classify texts; arguments and errors are those of :meth:`Engine.classify`."""
    room = max(engine.config.max_num_queued_reqs, 1)
    parts = [await engine.classify(part, **options) for part in _parts(inputs, room)]
    return Classifications(
        parts[0].labels,
        np.concatenate([part.logits for part in parts]),
        np.concatenate([part.probabilities for part in parts]),
        _usage_of(parts),
    )


def _parts(inputs: Inputs, most: int) -> Iterator[list[Item]]:
    """Yield the items of ``inputs``, at most ``most`` at a time."""
    items = as_items(inputs)
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _parts_of_pairs(
    queries: str | Sequence[str], documents: str | Sequence[str], most: int
) -> list[tuple[Any, Any]]:
    """Return queries and documents, at most ``most`` documents in each part.

    Lists that don't fit each other stay as they are, for the engine to refuse.
    """
    both = isinstance(documents, Sequence) and isinstance(queries, Sequence)
    if not both or isinstance(documents, str) or len(documents) <= most:
        return [(queries, documents)]
    starts = range(0, len(documents), most)
    if isinstance(queries, str) or len(queries) == 1:
        return [(queries, documents[start : start + most]) for start in starts]
    if len(queries) != len(documents):
        return [(queries, documents)]
    ends = [slice(start, start + most) for start in starts]
    return [(queries[part], documents[part]) for part in ends]


def _usage_of(parts: Sequence[Embeddings | Scores | Classifications]) -> Usage:
    """Add up the usage of all parts."""
    nothing = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    return sum((part.usage for part in parts), start=nothing)

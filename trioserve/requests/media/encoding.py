"""Processed media on their way to an encoder."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import trio

from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import CallFailed, EngineError, InvalidRequest
from trioserve.requests.media.encoder import MediaEncoder
from trioserve.requests.media.pool import Array
from trioserve.requests.media.reader import ProcessedMedia

INLINE_BYTES = 1 << 20
"""Most bytes of arrays that are copied on the event loop, in less than a millisecond."""


async def embeddings_of(
    processed: ProcessedMedia, encoder: MediaEncoder, name: str
) -> EmbeddingRows:
    """Return the embeddings of a part; ``name`` is its name in the request.

    Raises:
        InvalidRequest: The model can't read it; ``param`` is the name.
        EngineError: The engine is closed, or can't compute them.
    """
    kept = await encoder.kept_media(processed.digest)
    if kept is not None:
        return kept
    try:
        return await encoder.encode_media(processed.digest, await _encoded(processed.arrays))
    except CallFailed as error:
        raise InvalidRequest(
            f"{name}: the model can't read this {processed.kind}: {error}", param=name
        ) from None
    except EngineError as error:
        raise EngineError(f"{name}: {error}") from error


async def _encoded(arrays: Mapping[str, Array]) -> bytes:
    """Return :func:`encoded_arrays`, which may take a thread."""
    if sum(array.nbytes for array in arrays.values()) <= INLINE_BYTES:
        return encoded_arrays(arrays)
    return await trio.to_thread.run_sync(encoded_arrays, arrays)


def encoded_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return the argument of the worker's call: names, dtypes, shapes and bytes of ``arrays``."""

    def bytes_of(array: Array) -> memoryview:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    rows = [(name, array.dtype.str, array.shape, bytes_of(array)) for name, array in arrays.items()]
    return msgspec.msgpack.encode({"arrays": rows})

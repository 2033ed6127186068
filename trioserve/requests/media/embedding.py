"""The embeddings of a prompt's media: read in processes, and computed by an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import trio

from trioserve._util.together import all_together
from trioserve.observability.metrics import Metrics
from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import CallFailed, EngineError, InvalidRequest
from trioserve.requests.embedded import EmbeddedMedia
from trioserve.requests.media.content import as_media_part
from trioserve.requests.media.encoder import MediaEncoder
from trioserve.requests.media.pool import Array
from trioserve.requests.media.reader import MediaReader, ProcessedMedia

INLINE_BYTES = 1 << 20
"""Most bytes of arrays that are copied on the event loop, in less than a millisecond."""


@attrs.frozen(eq=False, kw_only=True)
class MediaEmbedder:
    """Makes embeddings of the media in prompts.

    Args:
        reader: Reads and processes each part.
        encoder: Computes its embeddings.
        metrics: Counts.
        placeholder: Token at the positions of an image's embeddings.
        width: Width of an embedding.
    """

    reader: MediaReader
    encoder: MediaEncoder
    metrics: Metrics
    placeholder: int
    width: int

    async def embed(self, parts: Sequence[tuple[str, Any]]) -> list[EmbeddedMedia]:
        """Return the embeddings of a prompt's media, in order.

        Args:
            parts: The name in the request of each part, and the part as the request has it.

        Raises:
            InvalidRequest: A part is refused; ``param`` is its name.
            EngineError: The engine is closed, or can't compute them.
        """
        given = [(name, as_media_part(part, name)) for name, part in parts]
        processed = await self.reader.read_all(given)
        for each in processed:
            self.metrics.media_bytes[each.kind] += each.num_bytes

        async def compute(index: int, each: ProcessedMedia) -> EmbeddedMedia:
            return await self._embedded(each, given[index][0])

        return await all_together(compute, processed)

    async def _embedded(self, processed: ProcessedMedia, name: str) -> EmbeddedMedia:
        rows = await self.encoder.kept_media(processed.digest)
        if rows is None:
            rows = await self._computed(processed, name)
        found, wanted = len(rows.numbers(self.width)), processed.num_placeholder_tokens
        if found != wanted:
            raise InvalidRequest(
                f"{name}: the model's tower gives {found} embeddings for {wanted} tokens, so its "
                "processor is of another model",
                param=name,
            )
        return EmbeddedMedia(
            kind=processed.kind,
            token_ids=processed.token_ids,
            placeholder=self.placeholder,
            digest=processed.digest,
            rows=rows,
        )

    async def _computed(self, processed: ProcessedMedia, name: str) -> EmbeddingRows:
        try:
            arrays = await _encoded(processed.arrays)
            return await self.encoder.encode_media(processed.digest, arrays)
        except CallFailed as error:
            raise InvalidRequest(
                f"{name}: the model can't read this {processed.kind}: {error}", param=name
            ) from None
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error


async def _encoded(arrays: Mapping[str, Array]) -> bytes:
    """Return :func:`encoded_arrays`, which takes a thread for more than a few milliseconds."""
    if sum(array.nbytes for array in arrays.values()) <= INLINE_BYTES:
        return encoded_arrays(arrays)
    return await trio.to_thread.run_sync(encoded_arrays, arrays)


def encoded_arrays(arrays: Mapping[str, Array]) -> bytes:
    """Return the argument of the worker's call: names, dtypes, shapes and bytes of ``arrays``."""

    def bytes_of(array: Array) -> memoryview:
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data

    rows = [(name, array.dtype.str, array.shape, bytes_of(array)) for name, array in arrays.items()]
    return msgspec.msgpack.encode({"arrays": rows})

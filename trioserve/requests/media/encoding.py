"""Processed media on their way to an encoder."""

from __future__ import annotations

import contextlib

import attrs
import trio

from trioserve._util.host_memory import host_memory
from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import CallFailed, EngineError, InvalidRequest
from trioserve.protocol.media_arrays import encoded_arrays, write_arrays
from trioserve.requests.media.encoder import MediaEncoder
from trioserve.requests.media.reader import ProcessedMedia

INLINE_BYTES = 1 << 20
"""Most bytes of arrays that are copied on the event loop, in less than a millisecond."""
MAX_MEMORIES = 64
"""Most memories at a time, each of which is an open file. Further arrays wait, as they do for the
encoder."""


@attrs.frozen(eq=False)
class EncoderClient:
    """An encoder, and the way to it."""

    encoder: MediaEncoder
    shares_memory: bool = True
    """True if it is on this host, so that large arrays go through memory."""
    _memories: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(MAX_MEMORIES)
    )

    async def embeddings_of(self, processed: ProcessedMedia, name: str) -> EmbeddingRows:
        """Return the embeddings of a part; ``name`` is its name in the request.

        Raises:
            InvalidRequest: The model can't read it; ``param`` is the name.
            EngineError: The engine is closed, or can't compute them.
        """
        kept = await self.encoder.kept_media(processed.digest)
        if kept is not None:
            return kept
        try:
            return await self._encode(processed)
        except CallFailed as error:
            raise InvalidRequest(
                f"{name}: the model can't read this {processed.kind}: {error}", param=name
            ) from None
        except EngineError as error:
            raise EngineError(f"{name}: {error}") from error

    async def _encode(self, processed: ProcessedMedia) -> EmbeddingRows:
        digest, arrays = processed.digest, processed.arrays
        if sum(array.nbytes for array in arrays.values()) <= INLINE_BYTES:
            return await self.encoder.encode_media(digest, encoded_arrays(arrays))
        if self.shares_memory:
            async with self._memories:
                # Without room, or descriptors, the arrays go the other way.
                with contextlib.suppress(OSError), host_memory("trioserve-media") as path:
                    argument = await trio.to_thread.run_sync(write_arrays, arrays, digest, path)
                    return await self.encoder.encode_media(digest, argument)
        argument = await trio.to_thread.run_sync(encoded_arrays, arrays)
        return await self.encoder.encode_media(digest, argument)

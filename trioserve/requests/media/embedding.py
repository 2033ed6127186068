"""The embeddings of a prompt's media: read in processes, computed by a worker, and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import CallFailed, EngineError, InvalidRequest, WorkerLost
from trioserve.requests.embedded import EmbeddedMedia
from trioserve.requests.media.content import as_media_part
from trioserve.requests.media.reader import MediaReader, ProcessedMedia

CALL = "encode_media"
MAX_TRIES = 3
"""Workers that may be lost while they compute a part, before it is refused."""
PATIENCE = 300.0
"""Seconds that a worker has for one part."""


@attrs.define(eq=False, kw_only=True)
class MediaEmbedder:
    """Makes embeddings of the media in prompts.

    Args:
        reader: Reads and processes each part.
        call: Calls a worker by name.
        wait_attached: Blocks until there is a worker.
        placeholder: Token at the positions of an image's embeddings.
        width: Width of an embedding.
        max_bytes: Most bytes of embeddings that are kept for parts to come.
    """

    reader: MediaReader
    call: Callable[..., Awaitable[Any]]
    wait_attached: Callable[[], Awaitable[None]]
    placeholder: int
    width: int
    max_bytes: int
    _kept: OrderedDict[bytes, EmbeddedMedia] = attrs.field(init=False, factory=OrderedDict)
    """Embeddings by the digest of their content, that of longest ago first."""
    _kept_bytes: int = attrs.field(init=False, default=0)
    _coming: dict[bytes, trio.Event] = attrs.field(init=False, factory=dict)
    """Contents that are being computed; the events are set when they no longer are."""

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

        async def compute(index: int, each: ProcessedMedia) -> EmbeddedMedia:
            return await self._embedded(each, given[index][0])

        return await all_together(compute, processed)

    async def _embedded(self, processed: ProcessedMedia, name: str) -> EmbeddedMedia:
        digest = processed.digest
        while (coming := self._coming.get(digest)) is not None:
            await coming.wait()
        kept = self._kept.get(digest)
        if kept is not None:
            self._kept.move_to_end(digest)
            return kept
        self._coming[digest] = trio.Event()
        try:
            found = await self._compute(processed, name)
        finally:
            self._coming.pop(digest).set()
        self._keep(digest, found)
        return found

    async def _compute(self, processed: ProcessedMedia, name: str) -> EmbeddedMedia:
        arrays = [
            (label, array.dtype.str, list(array.shape), array.tobytes())
            for label, array in processed.arrays.items()
        ]
        for _ in range(MAX_TRIES):
            await self.wait_attached()
            try:
                with trio.fail_after(PATIENCE):
                    reply = await self.call(CALL, {"arrays": arrays}, one=True)
            except WorkerLost:
                continue
            except CallFailed as error:
                raise InvalidRequest(
                    f"{name}: the model can't read this {processed.kind}: {error}", param=name
                ) from None
            except trio.TooSlowError:
                raise EngineError(f"{name}: a worker took more than {PATIENCE:g} s") from None
            return self._checked(processed, reply, name)
        raise EngineError(f"{name}: {MAX_TRIES} workers were lost while they computed it")

    def _checked(self, processed: ProcessedMedia, reply: Any, name: str) -> EmbeddedMedia:
        rows = EmbeddingRows(start=0, rows=reply["rows"], number_format=reply["number_format"])
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

    def _keep(self, digest: bytes, found: EmbeddedMedia) -> None:
        size = len(found.rows.rows)
        if size > self.max_bytes:
            return
        self._kept[digest] = found
        self._kept_bytes += size
        while self._kept_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.rows.rows)

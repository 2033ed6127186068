"""The embeddings of a prompt's media: read in processes, and computed by an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import trio

from trioserve._util.together import all_together
from trioserve.observability.metrics import Metrics
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.wire import MAX_MESSAGE_BYTES
from trioserve.requests.embedded import EmbeddedMedia
from trioserve.requests.embedded_parts import PLURALS
from trioserve.requests.media.content import as_media_part
from trioserve.requests.media.encoding import EncoderClient
from trioserve.requests.media.reader import MediaReader, ProcessedMedia

MAX_EMBEDDING_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of embeddings in a prompt, in float32."""
MAX_PROMPTS = 64
"""Most prompts whose media are read and encoded at a time; what was read is in memory meanwhile."""


@attrs.frozen(eq=False, kw_only=True)
class MediaEmbedder:
    """Makes embeddings of the media in prompts.

    Args:
        reader: Reads and processes each part.
        client: Has its embeddings computed.
        metrics: Counts.
        placeholders: Token at the positions of embeddings, by the kinds that the model reads.
        texts: Texts that stand for media in prompts, by their kinds, where they aren't those of the
            placeholders.
        width: Width of an embedding.
        merge_size: Patches, down and across, that become one embedding of an image, if the decoder
            has to know how its embeddings lie; 0 if not.
        tokens_per_second: Rotary positions for each second of a video; 0 if a frame takes one.
        tokens_together: Tokens of an image, if each of them sees all others; 0 if not.
    """

    reader: MediaReader
    client: EncoderClient
    metrics: Metrics
    placeholders: Mapping[str, int]
    texts: Mapping[str, str] = attrs.field(factory=dict)
    width: int
    merge_size: int = 0
    tokens_per_second: int = 0
    tokens_together: int = 0
    _prompts: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(MAX_PROMPTS)
    )

    async def embed(self, parts: Sequence[tuple[str, Any]]) -> list[EmbeddedMedia]:
        """Return the embeddings of a prompt's media, in order.

        Args:
            parts: The name in the request of each part, and the part as the request has it.

        Raises:
            InvalidRequest: A part is refused; ``param`` is its name.
            EngineError: The engine is closed, or can't compute them.
        """
        given = [(name, as_media_part(value, name)) for name, value in parts]
        for name, part in given:
            if part.kind not in self.placeholders:
                raise InvalidRequest(f"{name}: the model reads no {PLURALS[part.kind]}", param=name)

        async def compute(index: int, each: ProcessedMedia) -> EmbeddedMedia:
            return await self._embedded(each, given[index][0])

        async with self._prompts:
            processed = await self.reader.read_all(given)
            for each in processed:
                self.metrics.media_bytes[each.kind] += each.num_bytes
            self._refuse_many_tokens(processed, [name for name, _ in given])
            return await all_together(compute, processed)

    def _refuse_many_tokens(
        self, processed: Sequence[ProcessedMedia], names: Sequence[str]
    ) -> None:
        """Refuse media whose embeddings don't fit into a message.

        Raises:
            InvalidRequest: ``param`` is the first part that doesn't.
        """
        most, num_tokens = MAX_EMBEDDING_BYTES // (4 * self.width), 0
        for each, name in zip(processed, names, strict=True):
            num_tokens += each.num_placeholder_tokens
            if num_tokens > most:
                raise InvalidRequest(
                    f"{name}: the prompt's media have {num_tokens} tokens so far, and {most} of "
                    "this model can be sent: smaller media, or fewer frames, have fewer",
                    param=name,
                )

    async def _embedded(self, processed: ProcessedMedia, name: str) -> EmbeddedMedia:
        rows = await self.client.embeddings_of(processed, name)
        found, wanted = len(rows.numbers(self.width)), processed.num_placeholder_tokens
        grid = self._grid_of(processed)
        if found != wanted or (self.merge_size and grid is not None and grid.stop != wanted):
            raise InvalidRequest(
                f"{name}: the model's tower gives {found} embeddings for {wanted} tokens, so its "
                "processor is of another model",
                param=name,
            )
        if grid is not None and grid.num_positions > wanted:
            raise InvalidRequest(
                f"{name}: the video's {wanted} tokens are too few for the {grid.num_positions} "
                "positions that its seconds take: --media-io-kwargs can have more frames taken",
                param=name,
            )
        return EmbeddedMedia(
            kind=processed.kind,
            token_ids=processed.token_ids,
            placeholder=self.placeholders[processed.kind],
            digest=processed.digest,
            rows=rows,
            grid=grid,
            is_together=self.tokens_together > 0,
            token=self.texts.get(processed.kind, ""),
            text=processed.text,
        )

    def _grid_of(self, processed: ProcessedMedia) -> ImageGrid | None:
        """Return the grid of a part's embeddings; an empty one if it isn't known, None without."""
        if self.tokens_together:
            return ImageGrid(start=0, rows=1, columns=self.tokens_together)
        if not self.merge_size:
            return None
        patches = processed.arrays.get("image_grid_thw")
        if patches is None or patches.shape != (1, 3):
            return ImageGrid(start=0, rows=0, columns=0)
        frames, height, width = patches[0].tolist()
        interval = 1.0
        if processed.kind == "video" and self.tokens_per_second:
            interval = float(self.tokens_per_second * processed.arrays["second_per_grid_ts"][0])
        return ImageGrid(
            start=0,
            rows=height // self.merge_size,
            columns=width // self.merge_size,
            frames=frames,
            interval=interval,
        )

"""The embeddings of a prompt's media: read in processes, and computed by an encoder."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import trio

from trioserve._util.together import all_together
from trioserve.observability.metrics import Metrics
from trioserve.protocol.embeddings import ImageGrid
from trioserve.protocol.errors import ContextTooLong, InvalidRequest
from trioserve.protocol.wire import MAX_MESSAGE_BYTES
from trioserve.requests.embedded import EmbeddedMedia
from trioserve.requests.embedded_parts import PLURALS
from trioserve.requests.media.content import as_media_part
from trioserve.requests.media.encoding import EncoderClient
from trioserve.requests.media.reader import MediaReader, ProcessedMedia
from trioserve.requests.media_arguments import NO_ARGUMENTS, MediaArguments

MAX_EMBEDDING_BYTES = MAX_MESSAGE_BYTES // 2
"""Most bytes of embeddings in a prompt, in float32."""
MAX_PROMPTS = 64
"""Most prompts whose media are read and encoded at a time; what was read is in memory meanwhile."""
MAX_PROMPTS_WITH_ARGUMENTS = 8
"""Most of them whose requests have arguments, by which a small file can take much memory."""


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
        audio_depends_on_images: True if audio has other embeddings in a prompt with images.
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
    audio_depends_on_images: bool = False
    _prompts: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(MAX_PROMPTS)
    )
    _prompts_with_arguments: trio.CapacityLimiter = attrs.field(
        init=False, factory=lambda: trio.CapacityLimiter(MAX_PROMPTS_WITH_ARGUMENTS)
    )

    def check(self, arguments: MediaArguments) -> None:
        """Refuse a request's arguments of names that the model's processor doesn't take.

        Raises:
            InvalidRequest: There is one; ``param`` is the request's field.
        """
        self.reader.check_arguments(arguments)

    async def embed(
        self,
        parts: Sequence[tuple[str, Any]],
        arguments: MediaArguments = NO_ARGUMENTS,
        max_tokens: int | None = None,
    ) -> list[EmbeddedMedia]:
        """Return the embeddings of a prompt's media, in order.

        Args:
            parts: The name in the request of each part, and the part as the request has it.
            arguments: The request's arguments for them.
            max_tokens: Most tokens of a prompt; None for any number.

        Raises:
            InvalidRequest: A part is refused; ``param`` is its name, or the field of the arguments
                if they are the reason.
            EngineError: The engine is closed, or can't compute them.
        """
        given = [(name, as_media_part(value, name)) for name, value in parts]
        for name, part in given:
            if part.kind not in self.placeholders:
                raise InvalidRequest(f"{name}: the model reads no {PLURALS[part.kind]}", param=name)

        async def compute(index: int, each: ProcessedMedia) -> EmbeddedMedia:
            try:
                return await self._embedded(each, given[index][0])
            except InvalidRequest as error:
                about = arguments.for_kind(each.kind)
                if not about:
                    raise
                raise InvalidRequest(f"{error}, with {about}", param=about.param) from None

        async with self._permits_of(arguments), self._prompts:
            processed = await self.reader.read_all(given, arguments)
            if self.audio_depends_on_images and any(each.kind == "image" for each in processed):
                processed = [_beside_images(each) for each in processed]
            for each in processed:
                self.metrics.media_bytes[each.kind] += each.num_bytes
            self._refuse_many_tokens(processed, [name for name, _ in given], max_tokens)
            return await all_together(compute, processed)

    def _permits_of(
        self, arguments: MediaArguments
    ) -> contextlib.AbstractAsyncContextManager[object]:
        return self._prompts_with_arguments if arguments else contextlib.nullcontext()

    def _refuse_many_tokens(
        self, processed: Sequence[ProcessedMedia], names: Sequence[str], max_tokens: int | None
    ) -> None:
        """Refuse media that are longer than a prompt, or whose embeddings don't fit into a message.

        Raises:
            ContextTooLong: They are too long; ``param`` is the first part with which they are.
            InvalidRequest: They don't fit.
        """
        most, num_tokens, num_embeddings = MAX_EMBEDDING_BYTES // (4 * self.width), 0, 0
        for each, name in zip(processed, names, strict=True):
            num_embeddings += each.num_placeholder_tokens
            num_tokens += len(each.token_ids)
            if max_tokens is not None and num_tokens > max_tokens:
                raise ContextTooLong(
                    f"{name}: the prompt's media have {num_tokens} tokens so far: this model's "
                    f"maximum context length is {max_tokens} tokens",
                    param=name,
                )
            if num_embeddings > most:
                raise InvalidRequest(
                    f"{name}: the prompt's media have {num_embeddings} tokens so far, and {most} "
                    "of this model can be sent: smaller media, or fewer frames, have fewer",
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
                "positions that its seconds take: media_io_kwargs can have more frames taken",
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


def _beside_images(processed: ProcessedMedia) -> ProcessedMedia:
    """Return a part as it is in a prompt with images: a clip has a digest of its own there."""
    if processed.kind != "audio":
        return processed
    digest = hashlib.blake2b(processed.digest, digest_size=len(processed.digest), person=b"images")
    arrays = {**processed.arrays, "is_beside_images": np.ones(1, np.int64)}
    return attrs.evolve(processed, digest=digest.digest(), arrays=arrays)

"""The reader of a prompt's media: parts in, tokens and arrays out."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import attrs
import trio

from trioserve._util.job_processes import JobLost
from trioserve._util.together import all_together
from trioserve.config.media import MediaOptions
from trioserve.protocol.errors import EngineError, InvalidRequest, ModelLoadError
from trioserve.requests.media.child import MAX_SECONDS, memory_of
from trioserve.requests.media.fetching import MediaFetcher
from trioserve.requests.media.messages import MediaJob, MediaSetup
from trioserve.requests.media.parts import URL_BEGINNINGS, MediaPart
from trioserve.requests.media.pool import Array, MediaProcesses
from trioserve.requests.media.sources import Payload, payload_of

MAX_READS = 16
"""Most parts that are fetched or read at a time; further ones wait."""


@attrs.frozen(eq=False)
class ProcessedMedia:
    """A part as the model takes it.

    Attributes:
        kind: ``image``, ``audio`` or ``video``.
        digest: Hash of the content, the kind and the processor's arguments, 16 bytes. Parts with
            equal digests have equal arrays.
        token_ids: Tokens that stand for the part in a prompt, without the prompt's first one. Empty
            without a processor.
        arrays: Arrays by name, as the model's processor names them. Without a processor,
            ``pixels`` (uint8 [height, width, 3]) or ``samples`` (float32 [samples], 16 kHz). A
            video has ``pixels`` (uint8 [frames, height, width, 3]) and ``seconds`` (float64
            [frames]).
        num_placeholder_tokens: Number of the tokens whose embeddings come from the arrays.
        num_bytes: Bytes of the part as it was read.
        text: Text that the tokens are of, if what stands beside it in a prompt changes them.
    """

    kind: str
    digest: bytes
    token_ids: list[int]
    arrays: dict[str, Array] = attrs.field(repr=False)
    num_placeholder_tokens: int
    num_bytes: int = 0
    text: str = ""


class MediaReader:
    """Reader of images, audio and videos. :func:`open_media_reader` makes it.

    Args:
        processes: Processes that decode.
        fetcher: Client for URLs.
        options: Limits.
        setup: Limits and processor, as the processes have them.
    """

    def __init__(
        self,
        processes: MediaProcesses,
        fetcher: MediaFetcher,
        options: MediaOptions,
        setup: MediaSetup,
    ) -> None:
        self._processes = processes
        self._fetcher = fetcher
        self._most = options.most_media()
        self._setup = setup
        self._reads = trio.CapacityLimiter(MAX_READS)

    async def read(
        self, part: MediaPart, *, name: str, is_processed: bool = True
    ) -> ProcessedMedia:
        """Return ``part`` as the model takes it. Cancelling ends the process that reads it.

        Args:
            part: Image, audio or video.
            is_processed: False to return what is decoded, as without a processor.
            name: Its place in the request, such as ``messages[0].content[1]``; errors begin with
                it, and it is their ``param``.

        Raises:
            InvalidRequest: The part can't be fetched or decoded, or is beyond a limit.
            EngineError: The reader is closed, or no process can be started.
        """
        async with self._reads:
            payload = await self._payload(part, name)
            pixels = payload.pixels
            job = MediaJob(
                kind=part.kind,
                encoding=payload.encoding,
                is_processed=is_processed,
                size=payload.size,
                mode="" if pixels is None else pixels.mode,
                width=0 if pixels is None else pixels.width,
                height=0 if pixels is None else pixels.height,
            )
            try:
                found = await self._processes.read(job, payload)
            except JobLost:
                raise InvalidRequest(
                    f"{name}: the {part.kind} takes more than {MAX_SECONDS} s or "
                    f"{memory_of(self._setup) >> 20} MiB to read",
                    param=name,
                ) from None
        answer = found.answer
        if answer.failure:
            raise EngineError(answer.failure)
        if answer.error:
            raise InvalidRequest(f"{name}: {answer.error}", param=name)
        return ProcessedMedia(
            part.kind,
            answer.digest,
            answer.token_ids,
            found.arrays,
            answer.num_placeholder_tokens,
            payload.size,
            answer.text,
        )

    async def read_all(self, parts: Sequence[tuple[str, MediaPart]]) -> list[ProcessedMedia]:
        """Return the parts of a prompt, in order; several are read at a time.

        Args:
            parts: The name and the part of each; see :meth:`read`.

        Raises:
            InvalidRequest: There are too many, or one is refused. The others are cancelled.
            EngineError: As in :meth:`read`.
        """
        counts: Counter[str] = Counter()
        for name, part in parts:
            counts[part.kind] += 1
            most = self._most[part.kind]
            if counts[part.kind] > most:
                raise InvalidRequest(
                    f"{name}: more parts of the kind {part.kind} than --limit-mm-per-prompt "
                    f"({most}) allows",
                    param=name,
                )

        async def read(index: int, item: tuple[str, MediaPart]) -> ProcessedMedia:
            return await self.read(item[1], name=item[0])

        return await all_together(read, parts)

    async def check(self) -> None:
        """Start a process, and check that it can read media.

        Raises:
            ModelLoadError: A library isn't installed, or the model's processor can't be used.
        """
        try:
            found = await self._processes.read(MediaJob(kind=""), None)
        except JobLost as error:
            raise ModelLoadError("the process that reads media ended at its start") from error
        if found.answer.failure:
            raise ModelLoadError(found.answer.failure)

    async def _payload(self, part: MediaPart, name: str) -> Payload:
        source = part.source
        if isinstance(source, str) and source[:8].lower().startswith(URL_BEGINNINGS):
            source = await self._fetcher.fetch(source, part.kind, name)
        return payload_of(source, part.kind, name, self._setup.max_bytes)


def setup_of(options: MediaOptions, processor_folder: Path | None = None) -> MediaSetup:
    """Return the limits and the processor as the processes get them."""
    sampling = options.frame_sampling()
    return MediaSetup(
        max_bytes=options.limit_mm_bytes,
        max_pixels=options.limit_mm_pixels,
        max_seconds=options.limit_mm_seconds,
        fps=sampling.fps,
        num_frames=sampling.num_frames,
        processor_folder="" if processor_folder is None else str(processor_folder),
        processor_arguments=options.processor_arguments(),
    )


@contextlib.asynccontextmanager
async def open_media_reader(
    options: MediaOptions,
    *,
    processor_folder: Path | None = None,
    fetcher: MediaFetcher | None = None,
) -> AsyncIterator[MediaReader]:
    """Yield a reader of media, whose processes end with the block.

    Args:
        options: Limits, hosts and arguments; :class:`~trioserve.config.EngineConfig` has them.
        processor_folder: Folder of the model whose processor makes tokens and arrays of each part;
            without one the decoded content is returned. With one, the first process is started and
            checked at once.
        fetcher: Client for URLs in place of one made from ``options``.

    Raises:
        ModelLoadError: The model's processor can't be used.
    """
    setup = setup_of(options, processor_folder)
    if fetcher is None:
        fetcher = MediaFetcher(options.allowed_media_domains, options.limit_mm_bytes)
    processes = MediaProcesses(setup)
    reader = MediaReader(processes, fetcher, options, setup)
    try:
        if processor_folder is not None:
            await reader.check()
        yield reader
    finally:
        await processes.aclose()

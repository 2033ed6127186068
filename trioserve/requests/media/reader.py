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
from trioserve.requests.media.pool import Array, MediaProcesses, num_processes
from trioserve.requests.media.processor_arguments import unknown_arguments
from trioserve.requests.media.sources import Payload, payload_of
from trioserve.requests.media_arguments import NO_ARGUMENTS, MediaArguments

MAX_READS = 16
"""Most parts that are fetched or read at a time; further ones wait."""
MAX_ARRAY_BYTES = 512 << 20
"""Most bytes of the arrays of a prompt's media that are made with the request's arguments."""


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
        self._sampling = options.frame_sampling()
        self._argument_names: frozenset[str] = frozenset()
        """Names of the arguments that the processor takes."""
        self._setup = setup
        self._reads = trio.CapacityLimiter(MAX_READS)
        # Others have a process left: a part may take all of its seconds because of an argument.
        self._reads_with_arguments = trio.CapacityLimiter(max(num_processes() - 1, 1))

    def check_arguments(self, arguments: MediaArguments) -> None:
        """Refuse a request's arguments of names that the processor doesn't take.

        Raises:
            InvalidRequest: There is one; ``param`` is the request's field.
        """
        error = unknown_arguments(arguments.processor, self._argument_names)
        if error:
            raise InvalidRequest(error, param=arguments.param)

    async def read(
        self,
        part: MediaPart,
        *,
        name: str,
        is_processed: bool = True,
        arguments: MediaArguments = NO_ARGUMENTS,
        max_array_bytes: int = 0,
    ) -> ProcessedMedia:
        """Return ``part`` as the model takes it. Cancelling ends the process that reads it.

        Args:
            part: Image, audio or video.
            name: Its place in the request, such as ``messages[0].content[1]``; errors begin with
                it, and it is their ``param``.
            is_processed: False to return what is decoded, as without a processor.
            arguments: The request's arguments for its media.
            max_array_bytes: Most bytes of arrays that are made with them.

        Raises:
            InvalidRequest: The part can't be fetched or decoded, or is beyond a limit. ``param`` is
                the field of the arguments if they are the reason.
            EngineError: The reader is closed, or no process can be started.
        """
        arguments = arguments.for_kind(part.kind)
        async with self._reads:
            payload = await self._payload(part, name)
            job = self._job(part.kind, payload, is_processed, arguments, max_array_bytes)
            try:
                found = await self._processes.read(job, payload)
            except JobLost:
                raise InvalidRequest(
                    f"{name}: the {part.kind} takes more than {MAX_SECONDS} s or "
                    f"{memory_of(self._setup) >> 20} MiB to read"
                    f"{f' with {arguments}' if arguments else ''}",
                    param=arguments.param if arguments else name,
                ) from None
        answer = found.answer
        if answer.failure:
            raise EngineError(answer.failure)
        if answer.error:
            param = arguments.param if answer.is_about_arguments else name
            raise InvalidRequest(f"{name}: {answer.error}", param=param)
        return ProcessedMedia(
            part.kind,
            answer.digest,
            answer.token_ids,
            found.arrays,
            answer.num_placeholder_tokens,
            payload.size,
            answer.text,
        )

    def _job(
        self,
        kind: str,
        payload: Payload,
        is_processed: bool,
        arguments: MediaArguments,
        max_array_bytes: int,
    ) -> MediaJob:
        pixels = payload.pixels
        sampling = self._sampling.with_arguments(arguments.reading)
        return MediaJob(
            kind=kind,
            encoding=payload.encoding,
            is_processed=is_processed,
            size=payload.size,
            arguments=dict(arguments.processor),
            max_array_bytes=max_array_bytes,
            fps=sampling.fps,
            num_frames=sampling.num_frames,
            mode="" if pixels is None else pixels.mode,
            width=0 if pixels is None else pixels.width,
            height=0 if pixels is None else pixels.height,
        )

    async def read_all(
        self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments = NO_ARGUMENTS
    ) -> list[ProcessedMedia]:
        """Return the parts of a prompt, in order; several are read at a time.

        Args:
            parts: The name and the part of each; see :meth:`read`.
            arguments: The request's arguments for all of them.

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

        if self._may_enlarge(arguments):
            return await self._read_in_turn(parts, arguments)

        async def read(_: int, item: tuple[str, MediaPart]) -> ProcessedMedia:
            return await self.read(item[1], name=item[0], arguments=arguments)

        return await all_together(read, parts)

    def _may_enlarge(self, arguments: MediaArguments) -> bool:
        """Return True if arrays may become larger by a request's arguments.

        An operator knows how large they are without.
        """
        asked = self._sampling.with_arguments(arguments.reading)
        more = asked.fps > self._sampling.fps or asked.num_frames > self._sampling.num_frames
        return more or bool(arguments.processor)

    async def _read_in_turn(
        self, parts: Sequence[tuple[str, MediaPart]], arguments: MediaArguments
    ) -> list[ProcessedMedia]:
        """Return the parts of a prompt, of which each may have the bytes that are left."""
        found: list[ProcessedMedia] = []
        left = MAX_ARRAY_BYTES
        async with self._reads_with_arguments:
            for name, part in parts:
                processed = await self.read(
                    part, name=name, arguments=arguments, max_array_bytes=max(left, 1)
                )
                left -= sum(each.nbytes for each in processed.arrays.values())
                found.append(processed)
        return found

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
        self._argument_names = frozenset(found.answer.argument_names)

    async def _payload(self, part: MediaPart, name: str) -> Payload:
        source = part.source
        if isinstance(source, str) and source[:8].lower().startswith(URL_BEGINNINGS):
            source = await self._fetcher.fetch(source, part.kind, name)
        return payload_of(source, part.kind, name, self._setup.max_bytes)


def setup_of(options: MediaOptions, processor_folder: Path | None = None) -> MediaSetup:
    """Return the limits and the processor as the processes get them."""
    return MediaSetup(
        max_bytes=options.limit_mm_bytes,
        max_pixels=options.limit_mm_pixels,
        max_seconds=options.limit_mm_seconds,
        num_frames=options.frame_sampling().num_frames,
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

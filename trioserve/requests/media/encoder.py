"""The embeddings of media by their content: computed by a worker once, and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
import trio

from trioserve.observability.metrics import Metrics
from trioserve.protocol.embeddings import EmbeddingRows
from trioserve.protocol.errors import EngineError, WorkerLost

MAX_TRIES = 3
"""Workers that may be lost while they compute a part, before it is refused."""
CALLS_PER_WORKER = 2
"""Calls of a worker at a time: one that it computes, and the next one. A worker computes all calls
that it has, so others wait here, where those of clients that leave are gone at once."""
PATIENCE = 300.0
"""Seconds that a worker has for one part."""


class MediaEncoder(Protocol):
    """The encoder of this process, or that of the engine process for a front end."""

    async def kept_media(self, digest: bytes) -> EmbeddingRows | None:
        """Return the embeddings of the content of that digest; None if they have to be computed."""

    async def encode_media(self, digest: bytes, arrays: bytes) -> EmbeddingRows:
        """Return the embeddings of a content, which are computed if they aren't kept.

        Args:
            digest: Digest of the content.
            arrays: Its arrays (:mod:`trioserve.protocol.media_arrays`).

        Raises:
            CallFailed: The model can't read it.
            EngineError: The engine is closed, or can't compute it.
        """

    async def align_speech(
        self, tokens: list[int], num_before: int, num_frames: int, states: EmbeddingRows
    ) -> list[int]:
        """Return the frames of audio at which tokens of a transcript begin.

        Args:
            tokens: Tokens in front of the text, those of the text, and that of the end.
            num_before: Number of those in front, without the last one.
            num_frames: Number of frames that have audio, from the first on.
            states: Encoder states of the audio, one for each frame.

        Returns:
            The frames of the text's tokens and of its end, in order.

        Raises:
            EngineError: The engine is closed, or can't compute it.
        """


@attrs.define(eq=False, kw_only=True)
class WorkerMediaEncoder:
    """The encoder of the process that has the workers: a :class:`MediaEncoder`.

    Args:
        call: Calls one of the workers by name.
        wait_attached: Blocks until there is a worker.
        count_workers: Returns the number of workers that are there.
        max_bytes: Most bytes of embeddings that are kept for parts to come.
        metrics: Counts.
    """

    call: Callable[..., Awaitable[Any]]
    wait_attached: Callable[[], Awaitable[None]]
    count_workers: Callable[[], int]
    max_bytes: int
    metrics: Metrics
    _kept: OrderedDict[bytes, EmbeddingRows] = attrs.field(init=False, factory=OrderedDict)
    """Embeddings by the digest of their content, that of longest ago first."""
    _kept_bytes: int = attrs.field(init=False, default=0)
    _coming: dict[bytes, trio.Event] = attrs.field(init=False, factory=dict)
    """Contents that are being computed; the events are set when they no longer are."""
    _calls: trio.CapacityLimiter = attrs.field(init=False, factory=lambda: trio.CapacityLimiter(1))

    async def kept_media(self, digest: bytes) -> EmbeddingRows | None:
        """See :meth:`MediaEncoder.kept_media`. This waits for embeddings that are on their way."""
        while (coming := self._coming.get(digest)) is not None:
            await coming.wait()
        found = self._kept.get(digest)
        if found is not None:
            self._kept.move_to_end(digest)
        self.metrics.media_lookups += 1
        self.metrics.media_hits += found is not None
        return found

    async def encode_media(self, digest: bytes, arrays: bytes) -> EmbeddingRows:
        """See :meth:`MediaEncoder.encode_media`."""
        while (coming := self._coming.get(digest)) is not None:
            await coming.wait()
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        self._coming[digest] = trio.Event()
        begun = trio.current_time()
        try:
            reply = await self._ask("encode_media", arrays)
        finally:
            self._coming.pop(digest).set()
        found = EmbeddingRows(start=0, rows=reply["rows"], number_format=reply["number_format"])
        self.metrics.media_encode_seconds.observe(trio.current_time() - begun)
        self._keep(digest, found)
        return found

    async def align_speech(
        self, tokens: list[int], num_before: int, num_frames: int, states: EmbeddingRows
    ) -> list[int]:
        """See :meth:`MediaEncoder.align_speech`."""
        arguments = {
            "tokens": tokens,
            "num_before": num_before,
            "num_frames": num_frames,
            "rows": states.rows,
            "number_format": states.number_format,
        }
        frames: list[int] = await self._ask("align_speech", arguments)
        return frames

    async def _ask(self, name: str, arguments: object) -> Any:
        """Call a worker, or another one if it is lost."""
        for _ in range(MAX_TRIES):
            await self.wait_attached()
            self._calls.total_tokens = CALLS_PER_WORKER * max(self.count_workers(), 1)
            try:
                async with self._calls:
                    with trio.fail_after(PATIENCE):
                        return await self.call(name, arguments)
            except WorkerLost:
                continue
            except trio.TooSlowError:
                raise EngineError(f"a worker took more than {PATIENCE:g} s for it") from None
        raise EngineError(f"{MAX_TRIES} workers were lost while they computed it")

    def _keep(self, digest: bytes, found: EmbeddingRows) -> None:
        size = len(found.rows)
        if size > self.max_bytes:
            return
        self._kept[digest] = found
        self._kept_bytes += size
        while self._kept_bytes > self.max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= len(oldest.rows)

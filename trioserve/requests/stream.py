"""The stream of one request: its producer never blocks, its reader may be slow, its bytes bounded.

The producer (the detokenizer) pushes chunks. The reader takes everything since its last read,
merged into one chunk per sequence. So a reader that keeps up sees every step, and one that lags
sees fewer, larger chunks. Unread output is counted in bytes, per stream and for all streams of an
engine together (:class:`StreamBudget`). Past the first bound ``push`` raises, and the producer ends
the request. Past the second, one of the streams that lag the most is cut off, be it the stream
being pushed to or another. A reader that waits when a chunk comes keeps up; it is never ended for
the unread output of others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import msgspec
import trio

from trioserve.protocol.errors import SlowReader

_CHUNK_OVERHEAD_BYTES = 64
_TOKEN_BYTES = 8
_LOGPROB_BYTES = 48


@attrs.frozen
class TokenLogprob:
    """One token's natural log-probability, with the most probable alternatives.

    ``top`` holds (token id, log-probability, text) triples, most probable first; ``asked`` those of
    the request's ``logprob_token_ids``, in their order. ``rank`` is 1 for the most probable token;
    it is known of prompt tokens only, else 0.
    """

    token_id: int
    logprob: float
    text: str
    top: tuple[tuple[int, float, str], ...] = ()
    asked: tuple[tuple[int, float, str], ...] = ()
    rank: int = 0


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """A piece of one sequence's output. Exactly one chunk of a sequence has a finish reason."""

    # There is one for every token, so it is made in C, and the garbage collector doesn't look at
    # it: it holds nothing that could point back at it.

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    """``stop``, ``length`` or ``abort`` on the last chunk, else None."""
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it, None for the model's own end of sequence."""
    beam_logprob: float | None = None
    """The sum of all its tokens' log-probabilities, on the last chunk of a beam."""

    @property
    def size(self) -> int:
        """Roughly the bytes that this chunk holds while it waits."""
        text = self.text
        size = _CHUNK_OVERHEAD_BYTES + _TOKEN_BYTES * len(self.token_ids)
        size += len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if self.logprobs:
            entries = sum(1 + len(entry.top) + len(entry.asked) for entry in self.logprobs)
            size += _LOGPROB_BYTES * entries
        return size


def merge(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return one chunk for each sequence, in the order in which they first come."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.index, []).append(chunk)
    return [_join(own) for own in by_index.values()]


def _join(run: list[Chunk]) -> Chunk:
    if len(run) == 1:
        return run[0]
    last = run[-1]
    with_logprobs = any(chunk.logprobs is not None for chunk in run)
    return Chunk(
        text="".join(chunk.text for chunk in run),
        token_ids=tuple(token for chunk in run for token in chunk.token_ids),
        index=last.index,
        logprobs=tuple(entry for chunk in run for entry in chunk.logprobs or ())
        if with_logprobs
        else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        beam_logprob=last.beam_logprob,
    )


@attrs.define(eq=False)
class StreamBudget:
    """Bytes of output that may wait unread: of one stream, and of all of an engine's together.

    Streams that lag are kept by the order of magnitude of what waits in them, so that one of the
    largest is found in constant time, always the same.
    """

    per_stream: int
    total: int
    waiting: int = 0
    _lagging: list[dict[Stream, None]] = attrs.field(factory=list)
    """By the number of bits of their bytes."""

    def move(self, stream: Stream, before: int, after: int) -> None:
        """Note that the unread bytes of ``stream``, which lags, changed to ``after``."""
        old, new = before.bit_length(), after.bit_length()
        if old != new and before:
            del self._lagging[old][stream]
        if old != new and after:
            while len(self._lagging) <= new:
                self._lagging.append({})
            self._lagging[new][stream] = None

    def largest(self) -> Stream | None:
        """Return a stream with at least half as many bytes as any that lags; None if none does."""
        return next((next(iter(each)) for each in reversed(self._lagging) if each), None)


@attrs.define(eq=False)
class Stream:
    """A channel from the detokenizer to one reader. One task reads; nothing else blocks."""

    budget: StreamBudget
    on_evicted: Callable[[SlowReader], None] | None = None
    """Called when the stream was cut off for the sake of others; its request is to end."""
    sink: Callable[[Chunk], bool] | None = attrs.field(default=None, init=False)
    """Offered each chunk but the last that comes while the reader waits. It returns True if it has
    taken the chunk; then the reader isn't woken."""
    _pending: list[Chunk] = attrs.field(factory=list, init=False)
    _pending_bytes: int = attrs.field(default=0, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _error: BaseException | None = attrs.field(default=None, init=False)
    _reader: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    _woken: bool = attrs.field(default=False, init=False)
    """True if the reader waited when the first unread chunk came."""

    @property
    def closed(self) -> bool:
        """True if nothing more will be pushed."""
        return self._closed

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait for the reader."""
        return self._pending_bytes

    @property
    def _lags(self) -> bool:
        """True if the reader has left something unread, and not because it hasn't run yet."""
        return bool(self._pending) and not self._woken

    def push(self, chunk: Chunk) -> None:
        """Hand over a chunk without blocking. Does nothing on a closed stream.

        Other streams may be cut off for it. That calls their ``on_evicted``.

        Raises:
            SlowReader: the reader lags, the bytes that wait, this chunk's included, are past the
                budget, and too many of them wait here. The chunk isn't taken; the caller is to end
                the request and close the stream with the error. What one step brings may be more
                than the budget of a stream.
        """
        if self._closed:
            return
        # A reader that waits has seen all that came before.
        offered = self._reader is not None and chunk.finish_reason is None
        if offered and self.sink is not None and self._offer(chunk, self.sink):
            return
        size = chunk.size
        if self._lags and self._pending_bytes + size > self.budget.per_stream:
            raise SlowReader(
                f"the reader left {self._pending_bytes} bytes unread; "
                f"max_stream_bytes is {self.budget.per_stream}"
            )
        if self.budget.waiting + size > self.budget.total:
            self._make_room(size)
        before, self._pending_bytes = self._pending_bytes, self._pending_bytes + size
        self._pending.append(chunk)
        self.budget.waiting += size
        self._wake()
        if not self._woken:
            self.budget.move(self, before, self._pending_bytes)

    def _offer(self, chunk: Chunk, sink: Callable[[Chunk], bool]) -> bool:
        """Return True if ``sink`` has taken the chunk. Its failure is its reader's error alone."""
        try:
            return sink(chunk)
        except Exception as error:
            self.sink = None
            self.close(error)
            return True

    def _make_room(self, size: int) -> None:
        budget = self.budget
        while budget.waiting + size > budget.total:
            victim = budget.largest()
            if victim is None:
                return
            if self._lags and self._pending_bytes >= victim.pending_bytes:
                victim = self
            error = SlowReader(
                f"slow readers together left {budget.waiting} bytes unread, this one "
                f"{victim.pending_bytes} of them; max_total_stream_bytes is {budget.total}"
            )
            if victim is self:
                raise error
            victim._evict(error)

    def _evict(self, error: SlowReader) -> None:
        """Drop unread output, and end the stream with ``error``."""
        self._drop_pending()
        self._closed = True
        self._error = error
        if self.on_evicted is not None:
            self.on_evicted(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the stream: unread output is still read, then ``error`` or the end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._error = error
        self._wake()

    def discard(self) -> None:
        """Drop unread output and close, because the reader is gone. Idempotent.

        A later read raises ``trio.ClosedResourceError`` unless all had been read: output that was
        cut off must not look like output that ended.
        """
        if self._drop_pending() or not self._closed:
            self._closed = True
            self._error = trio.ClosedResourceError("the generation's block was left")
            self._wake()

    async def take(self) -> list[Chunk]:
        """Return everything pushed since the last call, merged; wait for at least one chunk.

        A checkpoint always happens. If cancelled, no chunk is lost.

        Raises:
            trio.EndOfChannel: the stream was closed and everything has been taken.
            BaseException: the error that it was closed with, once everything has been taken.
        """
        if not self._pending and not self._closed:
            if self._reader is not None:
                raise trio.BusyResourceError("another task is already reading this stream")
            self._reader = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._stop_waiting)
        else:
            await trio.lowlevel.checkpoint()
        if self._pending:
            pending = self._drop_pending()
            return pending if len(pending) == 1 else merge(pending)
        if self._error is not None:
            # Streams that failed together share it, and each raise would add to one traceback.
            raise self._error.with_traceback(None)
        raise trio.EndOfChannel

    def _stop_waiting(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _drop_pending(self) -> list[Chunk]:
        pending, self._pending = self._pending, []
        self.budget.waiting -= self._pending_bytes
        if pending and not self._woken:
            self.budget.move(self, self._pending_bytes, 0)
        self._pending_bytes = 0
        self._woken = False
        return pending

    def _wake(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None
            self._woken = True

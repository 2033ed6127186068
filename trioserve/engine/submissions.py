"""An executor: requests that are handed in at once and waited for later.

A request of :meth:`trioserve.Engine.generate` lives in a block of its own. Here, many live in one.
Each has a task that reads its stream and keeps the chunks. Through the handle it is waited for,
read or ended. They all end with the block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any, Protocol

import attrs
import trio

from trioserve._util.exception_groups import holds_cancellation, sole_exception
from trioserve.protocol.errors import RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, GenerationStream, PromptLike, completion_of
from trioserve.requests.stream import Chunk

Generation = contextlib.AbstractAsyncContextManager[GenerationStream]


class OpenGeneration(Protocol):
    """:meth:`trioserve.Engine.generate`."""

    def __call__(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Generation: ...


@attrs.define(eq=False)
class Handle:
    """One request that was submitted. Any number of tasks may wait for it or read along.

    All chunks are kept until the handle is forgotten; nothing holds up the engine.
    """

    _chunks: list[Chunk] = attrs.field(init=False, factory=list)
    _stream: GenerationStream | None = attrs.field(init=False, default=None)
    _error: Exception | None = attrs.field(init=False, default=None)
    _is_done: bool = attrs.field(init=False, default=False)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _more: trio.Event = attrs.field(init=False, factory=trio.Event)
    """Set when there is another chunk, or the end."""

    def done(self) -> bool:
        """Return True if it has ended: with all of its output, with an error, or aborted."""
        return self._is_done

    def abort(self) -> None:
        """End it now, and drop what is still to be computed. Never blocks; idempotent.

        Tasks that wait for its result get :exc:`~trioserve.RequestAborted`.
        """
        self._scope.cancel()
        if not self._is_done:
            self._end(RequestAborted("the request was aborted"))

    async def result(self, timeout: float | None = None) -> Completion:
        """Return the whole output. May be called several times.

        Args:
            timeout: seconds to wait; the request goes on when they are over. None for no limit.

        Raises:
            TimeoutError: the time was over first.
            RequestAborted: it was aborted.
            TrioserveError: it failed.
        """
        with trio.move_on_after(math.inf if timeout is None else timeout):
            while not self._is_done:
                await self._more.wait()
        await trio.lowlevel.checkpoint()
        if not self._is_done:
            raise TimeoutError(f"the request has not ended after {timeout:g} seconds")
        if self._error is not None:
            raise self._error
        assert self._stream is not None
        return completion_of(self._stream, self._chunks)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Chunks(self)

    async def _next(self, index: int) -> Chunk:
        await trio.lowlevel.checkpoint()
        while index == len(self._chunks):
            if self._error is not None:
                raise self._error
            if self._is_done:
                raise StopAsyncIteration
            await self._more.wait()
        return self._chunks[index]

    def _wake(self) -> None:
        self._more.set()
        self._more = trio.Event()

    def _end(self, error: Exception | None = None) -> None:
        if not self._is_done:
            self._is_done, self._error = True, error
            self._wake()

    async def _run(self, generation: Generation) -> None:
        """Read all chunks. This is a task; it raises nothing."""
        if self._is_done:  # Aborted before it began.
            return
        error: Exception | None = RequestAborted("the block that it was submitted in was left")
        try:
            with self._scope:
                async with generation as self._stream:
                    async for chunk in self._stream:
                        self._chunks.append(chunk)
                        self._wake()
                error = None
        except Exception as failure:
            error = failure
        finally:
            self._end(error)


@attrs.define(eq=False)
class _Chunks(AsyncIterator[Chunk]):
    """One reader of a handle's chunks, from the first one on."""

    _handle: Handle
    _index: int = attrs.field(init=False, default=0)

    async def __anext__(self) -> Chunk:
        chunk = await self._handle._next(self._index)
        self._index += 1
        return chunk


@attrs.define(eq=False)
class Submissions:
    """An executor that takes requests while its block lasts."""

    _generate: OpenGeneration
    _nursery: trio.Nursery
    _open: bool = attrs.field(init=False, default=True)

    def submit(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Handle:
        """Hand a request in; arguments are those of :meth:`trioserve.Engine.generate`.

        Never blocks. A wrong argument is raised at once. Any other error, such as a full queue, is
        raised by the handle.

        Raises:
            InvalidRequest: an argument that can't be served; ``param`` names it.
            trio.ClosedResourceError: the block has been left.
        """
        if not self._open:
            raise trio.ClosedResourceError("the block of the submissions has been left")
        handle = Handle()
        self._nursery.start_soon(handle._run, self._generate(prompt, params, **options))
        return handle

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        self._open = False


@contextlib.asynccontextmanager
async def open_submissions(generate: OpenGeneration) -> AsyncIterator[Submissions]:
    """Open an executor for :meth:`trioserve.Engine.submissions`."""
    block_error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            submissions = Submissions(generate, nursery)
            try:
                yield submissions
            except BaseException as error:
                # Kept out of the nursery, which would wrap it, and copy it if it is a group.
                if holds_cancellation(error):
                    raise
                block_error = error
            finally:
                submissions.close()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The tasks raise nothing: it is the cancellation of all of them, from outside.
        block_error = sole_exception(group)
    if block_error is not None:
        raise block_error

"""The life of a request: from its caller's scope being entered until it has been left.

A request isn't a task. It is in the engine for as long as the block that asks for it lasts, and
leaving that block, for whatever reason, is its abort.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import attrs
import trio

from trioserve.engine.backend import Backend
from trioserve.protocol.errors import EngineError, RequestAborted, SlowReader
from trioserve.requests.admission import Admission
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import GenerationStream
from trioserve.requests.request import Finish, FinishReason, Request, Sequence, State


def abort_by_name(
    backend: Backend, requests: Iterable[Request], request_id: str, *, prefix: bool
) -> int:
    """End those of ``requests`` that are named so; return how many were ended. Never blocks.

    Args:
        backend: computes them.
        requests: all that may be ended.
        request_id: the name.
        prefix: end all requests with names that begin so.
    """
    finish = Finish(FinishReason.ABORT)
    named = [
        request
        for request in requests
        if (request.id.startswith(request_id) if prefix else request.id == request_id)
    ]
    num_aborted = 0
    for request in named:
        alive = [each for each in request.sequences if each.state is not State.FINISHED]
        # The last sequence first, so that no other one takes over the prompt.
        for sequence in reversed(alive):
            backend.abort(sequence, finish)
        num_aborted += bool(alive)
    return num_aborted


@attrs.define(eq=False, kw_only=True)
class OpenGenerations:
    """The open requests of one engine, in the order of their arrival.

    A request is open until its caller has left the block.

    Args:
        backend: is told of aborts.
        admission: counts waiting requests.
        to_tokenizer: the first task's inbox.
        check_open: raises while no request is to be admitted.
        on_finished: called with each sequence once all of it has been delivered.
        on_left: called with each request when its caller has left the block.
    """

    _backend: Backend
    _admission: Admission
    _to_tokenizer: trio.MemorySendChannel[Request]
    _check_open: Callable[[], None]
    _on_finished: Callable[[Sequence, Finish], None]
    _on_left: Callable[[Request], None]
    _requests: dict[Request, None] = attrs.field(init=False, factory=dict)
    _closed: EngineError | None = attrs.field(init=False, default=None)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @contextlib.asynccontextmanager
    async def opened(
        self, request: Request, deadline: Deadline, *, is_new: bool = True
    ) -> AsyncIterator[GenerationStream]:
        """Open ``request`` for as long as the block lasts; entering waits until it is admitted.

        Args:
            request: The request.
            deadline: Its end.
            is_new: False if it goes on with something that is open.

        Raises:
            QueueFull: too much waits.
            DeadlineExceeded: the deadline has passed.
        """
        if is_new:
            self._check_open()
        self._admission.enter(request, trio.current_time())
        self._requests[request] = None
        request.stream.on_evicted = functools.partial(self._abort, request)
        try:
            with deadline.enforced():
                self._to_tokenizer.send_nowait(request)
                await request.admitted.wait()
                if request.rejection is not None:
                    raise request.rejection
                yield GenerationStream(request)
        finally:
            self._abandon(request)

    def end(self, request: Request, error: RequestAborted) -> None:
        """End one with ``error``, whatever its stage. Never blocks."""
        self._abort(request, error)
        # The detokenizer does the same, but may have been cancelled with the engine's scope.
        request.stream.close(error)

    def close(self, error: EngineError) -> None:
        """End all with ``error``, of the engine. Idempotent."""
        self._closed = self._closed or error
        for request in self._requests:
            request.reject(error)
            request.stream.close(error)

    def _abort(self, request: Request, error: RequestAborted | SlowReader) -> None:
        """Abort all sequences of a request. Never blocks."""
        finish = Finish(FinishReason.ABORT, error=error)
        for sequence in reversed(request.sequences):
            if not sequence.delivered:
                self._backend.abort(sequence, finish)

    def _abandon(self, request: Request) -> None:
        """Drop a request when its caller has left the block. Never blocks."""
        if self._closed is None:
            finish = Finish(FinishReason.ABORT)
        else:
            finish = Finish(FinishReason.ERROR, error=self._closed)
        # The last sequence first, so that no other one takes over the prompt.
        for sequence in reversed(request.sequences):
            if not sequence.delivered:
                self._backend.abort(sequence, finish)
                self._on_finished(sequence, sequence.finish or finish)
        request.stream.discard()
        self._admission.forget(request)
        del self._requests[request]
        self._on_left(request)

"""Generations of one HTTP request: one prompt or several, read as one sequence of chunks.

Entering blocks until every prompt is admitted, or raises the first error. Leaving aborts what isn't
finished. Both happen in the task that reads. A client that leaves cancels that task, and so leaves
the generations' scopes at any stage.
"""

from __future__ import annotations

import abc
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType

import trio

from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.sessions.continuation import Generate
from trioserve.http.api.bounds import check_output_tensors, check_prompt_logprobs
from trioserve.http.api.jobs import PromptJob
from trioserve.protocol.errors import AdapterNotFound, InvalidRequest
from trioserve.requests.generation import GenerationStream, Usage
from trioserve.requests.stream import Chunk


class Generations(abc.ABC):
    """One or several generations: an async context manager, and an async iterator while entered.

    Once entered, ``streams`` has one entry per prompt, in their order. They give usage and prompts
    and aren't to be read.
    """

    def __init__(self) -> None:
        self.streams: list[GenerationStream] = []

    @property
    def usage(self) -> Usage:
        """Return the usage of all prompts together, so far."""
        return total_usage(stream.usage for stream in self.streams)

    @abc.abstractmethod
    async def __aenter__(self) -> Generations: ...

    @abc.abstractmethod
    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    @abc.abstractmethod
    async def receive(self) -> tuple[int, Chunk]:
        """Return the next chunk, with the number of its prompt; the chunk tells its output.

        Raises:
            trio.EndOfChannel: all generations have ended.
            TrioserveError: one of them failed.
        """

    @abc.abstractmethod
    def offer_to(self, sink: Callable[[Chunk], bool]) -> None:
        """Offer chunks of a single prompt to ``sink``, as :meth:`GenerationStream.offer_to` does.

        Chunks of several prompts aren't offered.
        """

    def __aiter__(self) -> Generations:
        return self

    async def __anext__(self) -> tuple[int, Chunk]:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


def open_generations(engine: RequestEngine, jobs: Sequence[PromptJob]) -> Generations:
    """Return the generations of ``jobs``, to be entered."""
    if len(jobs) == 1:
        return _One(engine, jobs[0])
    return _Several(engine, list(jobs))


def total_usage(usages: Iterable[Usage]) -> Usage:
    """Return the usage of several prompts together."""
    return sum(usages, start=Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0))


def renamed(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """Return ``error`` with an endpoint's names of fields in place of the engine's."""
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    if isinstance(error, AdapterNotFound):  # its text speaks of adapters, not of the field
        return AdapterNotFound(str(error), param=name)
    message = re.sub(rf"\b{error.param}\b", lambda _: name, str(error), count=1)
    return InvalidRequest(message, param=name, code=error.code)


def _generate(
    engine: RequestEngine, job: PromptJob
) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
    generate: Generate = engine.generate if job.turn is None else job.turn
    return generate(
        job.prompt,
        job.params,
        request_id=job.request_id,
        priority=job.priority,
        timeout=job.timeout,
        arrived=job.arrived,
        cache_salt=job.cache_salt,
        tenant=job.tenant,
        retention=job.retention,
        adapter=job.adapter,
        traceparent=job.traceparent,
        tracestate=job.tracestate,
    )


class _One(Generations):
    """A single generation, read directly from its stream."""

    def __init__(self, engine: RequestEngine, job: PromptJob) -> None:
        super().__init__()
        self._engine = engine
        self._job = job
        self._scope: contextlib.AbstractAsyncContextManager[GenerationStream] | None = None

    async def __aenter__(self) -> _One:
        try:
            scope = _generate(self._engine, self._job)
            self.streams.append(await scope.__aenter__())
        except InvalidRequest as error:
            raise renamed(error, self._job.renames) from error
        self._scope = scope
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._scope is not None
        await self._scope.__aexit__(exc_type, exc_value, traceback)

    def offer_to(self, sink: Callable[[Chunk], bool]) -> None:
        self.streams[0].offer_to(sink)

    async def receive(self) -> tuple[int, Chunk]:
        try:
            return 0, await self.streams[0].receive()
        except InvalidRequest as error:
            raise renamed(error, self._job.renames) from error


class _Several(Generations):
    """Several generations, each in a task of its own, which hand their chunks to the reader.

    The tasks raise nothing: the first error is kept in ``_error``, and the reader raises it. A task
    holds at most one chunk that the reader hasn't taken; later chunks wait, bounded, in its stream.
    """

    def __init__(self, engine: RequestEngine, jobs: list[PromptJob]) -> None:
        super().__init__()
        self._engine = engine
        self._jobs = jobs
        self._entered: dict[int, GenerationStream] = {}
        self._opened = trio.Event()
        self._error: Exception | None = None
        self._exits = contextlib.AsyncExitStack()
        self._to_reader, self._chunks = trio.open_memory_channel[tuple[int, Chunk]](0)

    async def __aenter__(self) -> _Several:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._chunks)
            nursery = await stack.enter_async_context(trio.open_nursery())
            stack.callback(nursery.cancel_scope.cancel)
            with self._to_reader:
                for index, job in enumerate(self._jobs):
                    # One after the other, so that they come to the queue in their order.
                    await nursery.start(self._run, index, job, self._to_reader.clone())
            await self._opened.wait()
            if self._error is None:
                self.streams = [self._entered[index] for index in range(len(self._jobs))]
                self._error = self._refusal()
            if self._error is None:
                self._exits = stack.pop_all()
        if self._error is not None:
            raise self._error
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The nursery must not see the reader's exception, which it would wrap in a group.
        await self._exits.aclose()

    def offer_to(self, sink: Callable[[Chunk], bool]) -> None:
        pass

    async def receive(self) -> tuple[int, Chunk]:
        try:
            return await self._chunks.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if self._error is not None:
                raise self._error from None
            raise

    async def _run(
        self,
        index: int,
        job: PromptJob,
        to_reader: trio.MemorySendChannel[tuple[int, Chunk]],
        *,
        task_status: trio.TaskStatus[None],
    ) -> None:
        with to_reader:
            task_status.started()
            try:
                async with _generate(self._engine, job) as stream:
                    self._entered[index] = stream
                    if len(self._entered) == len(self._jobs):
                        self._opened.set()
                    await self._opened.wait()
                    async for chunk in stream:
                        await to_reader.send((index, chunk))
            except InvalidRequest as error:
                self._fail(renamed(error, job.renames))
            except Exception as error:
                self._fail(error)

    def _refusal(self) -> InvalidRequest | None:
        """Return the error if all prompts together are too much, now that they are known."""
        try:
            check_prompt_logprobs(self._jobs, self.streams)
            check_output_tensors(self.streams, self._engine)
        except InvalidRequest as error:
            return renamed(error, self._jobs[0].renames)
        return None

    def _fail(self, error: Exception) -> None:
        """Keep the first error and wake the task that enters or reads, which raises it."""
        if self._error is None:
            self._error = error
        self._opened.set()
        self._chunks.close()

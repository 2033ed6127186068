"""The calls of an engine that generate: a stream, a whole output, an executor."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from typing import Any

from trioserve.config import EngineConfig
from trioserve.engine.backend import Backend
from trioserve.engine.lifecycle import OpenGenerations
from trioserve.engine.request_factory import RequestMaker
from trioserve.engine.submissions import Submissions, open_submissions
from trioserve.model_files.encoder_files import ModelTask
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.pooling.requests import Pooling
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.adapters import THE_MODEL, Adapter
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import (
    Completion,
    GenerationStream,
    PromptLike,
    as_prompt,
    completion_of,
    sampling_params,
)
from trioserve.requests.options import RequestOptions
from trioserve.requests.retention import Retention
from trioserve.requests.stream import Chunk


class GeneratingEngine:
    """The part of :class:`trioserve.engine.request_engine.RequestEngine` that generates."""

    __slots__ = ()

    config: EngineConfig
    generation: GenerationConfig
    task: ModelTask
    pooling: Pooling
    _requests: RequestMaker
    _open: OpenGenerations
    _backend: Backend

    @property
    def generation_defaults(self) -> dict[str, float | int]:
        """Sampling parameters of requests that name none."""
        return self.generation.sampling

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrived: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        retention: Retention | None = None,
        adapter: str = "",
        prefix_ids: Seq[int] = (),
        traceparent: str = "",
        tracestate: str = "",
        **sampling: Any,
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        """Generate from a prompt: ``async with engine.generate(...) as stream``.

        Entering waits until the request is admitted to the queue; leaving the block, for whatever
        reason, aborts whatever is still to be computed.

        Args:
            prompt: text, token ids, messages of a chat, or one of the prompt classes.
            params: how to sample; or give its fields as keyword arguments.

        :class:`~trioserve.requests.options.RequestOptions` describes the other arguments.

        Raises:
            InvalidRequest: an argument that can't be served, or the model is for something else;
                ``param`` names it.
            AdapterNotFound: no adapter of that name is loaded.
            ContextTooLong: prompt and output don't fit the model or the page pool.
            QueueFull: too many requests wait, or too many tokens in their prompts.
            Draining: the engine is shutting down.
            Paused: it is paused, and refuses what comes.
            DeadlineExceeded: the timeout ran out.
        """
        options = RequestOptions(
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            arrived=arrived,
            cache_salt=cache_salt,
            tenant=tenant,
            retention=retention,
            adapter=adapter,
            prefix_ids=prefix_ids,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        return self._generation(prompt, params, options, sampling)

    async def complete(
        self,
        prompt: PromptLike,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        arrived: float | None = None,
        cache_salt: str = "",
        tenant: str = "",
        retention: Retention | None = None,
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
        **sampling: Any,
    ) -> Completion:
        """Generate as :meth:`generate`, and return the whole output at once."""
        options = RequestOptions(
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            arrived=arrived,
            cache_salt=cache_salt,
            tenant=tenant,
            retention=retention,
            adapter=adapter,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        chunks: list[Chunk] = []
        generation = self._generation(prompt, params, options, sampling)
        async with generation as stream:
            async for chunk in stream:
                chunks.append(chunk)
        return completion_of(stream, chunks)

    def submissions(self) -> contextlib.AbstractAsyncContextManager[Submissions]:
        """Open an executor: ``async with engine.submissions() as executor``, then ``submit``.

        It is for requests that are handed in at once and waited for later. Leaving the block aborts
        those that haven't ended; its own exceptions come out as they are.
        """
        return open_submissions(self.generate)

    def _generation(
        self,
        prompt: PromptLike,
        params: SamplingParams | None,
        options: RequestOptions,
        sampling: dict[str, Any],
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        """Return the block of a request; ``params`` or its fields, ``sampling``, are given."""
        if self.task != "generate":
            raise self.pooling.refusal("generate")
        if params is None:
            params = sampling_params({**self.generation_defaults, **sampling})
        elif sampling:
            raise InvalidRequest("give either params or its fields, not both", param="params")
        options.check()
        adapter = self._find_adapter(options.adapter)
        options.check_retention()
        request = self._requests.make(as_prompt(prompt), params, options, adapter=adapter)
        return self._open.opened(
            request, Deadline.of(options.timeout, options.arrived, self.config)
        )

    def _find_adapter(self, name: str) -> Adapter:
        """Return a loaded adapter, or the stand-in for an empty name."""
        return self._backend.catalogue.find(name) if name else THE_MODEL

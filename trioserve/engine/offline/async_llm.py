"""``AsyncLLM``: the engine for programs on asyncio.

The engine runs in a thread of its own, on trio; the program's event loop never waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.offline import properties
from trioserve.engine.offline.async_generation import AsyncGeneration
from trioserve.engine.offline.batch import Params, PromptBatch, as_chats, complete_all
from trioserve.engine.offline.engine_thread import EngineThread
from trioserve.engine.offline.recording import PartialOutput
from trioserve.engine.offline.texts import classify_all, embed_all, score_all
from trioserve.pooling.inputs import Inputs
from trioserve.pooling.results import Classifications, Embeddings, Scores
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.generation import Completion, PromptLike

P = ParamSpec("P")
T = TypeVar("T")


@overload
def _in_thread(
    method: Callable[Concatenate[Engine, P], Awaitable[T]],
) -> Callable[Concatenate[AsyncLLM, P], Awaitable[T]]: ...


@overload
def _in_thread(
    method: Callable[Concatenate[Engine, P], T],
) -> Callable[Concatenate[AsyncLLM, P], Awaitable[T]]: ...


def _in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of ``AsyncLLM`` that calls an engine's method in its thread."""

    @functools.wraps(method)
    async def call(self: AsyncLLM, *args: Any, **kwargs: Any) -> Any:
        return await self._call(lambda engine: method(engine, *args, **kwargs))

    return call


class AsyncLLM:
    """A model loaded for use from asyncio::

        async with trioserve.AsyncLLM("smollm2-135m") as llm:
            async for part in llm.stream("Once upon a time", max_tokens=32):
                print(part.text_diff, end="", flush=True)

    The block loads the model and unloads it. Methods are those of :class:`~trioserve.LLM`; one that
    waits there is awaited here, and cancelling the task that awaits it aborts what it asked for.

    Args:
        model: a known name, a folder, a GGUF file, a Hub id, or a whole configuration.
        options: fields of :class:`~trioserve.EngineConfig`, over those of a configuration.

    Raises:
        InvalidRequest: an option's value isn't allowed.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        self._thread = EngineThread(EngineConfig.of(model, options))

    async def __aenter__(self) -> AsyncLLM:
        """Load the model.

        Raises:
            ModelLoadError: The model can't be loaded.
        """
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._thread.stop)
        try:
            await asyncio.wrap_future(self._thread.started)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Unload the model and end all requests. Idempotent.

        Cancelling this only ends the wait.
        """
        self._thread.request_stop()
        await asyncio.shield(asyncio.wrap_future(self._thread.ended))
        self._finalizer.detach()

    async def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: Params = None,
        *,
        progress: bool = False,
        **options: Any,
    ) -> list[Completion]:
        """Complete one prompt or many, as :meth:`trioserve.LLM.generate`."""
        batch = PromptBatch.of(prompts, params, options)
        completions: list[Completion] = await self._call(
            complete_all, self._thread.room, batch, progress
        )
        return completions

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation or many, as :meth:`trioserve.LLM.chat`."""
        chats = as_chats(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            mm_processor_kwargs=mm_processor_kwargs,
            media_io_kwargs=media_io_kwargs,
        )
        return await self.generate(chats, params, progress=progress, **options)

    def generate_async(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGeneration:
        """Hand in one request and return at once, as :meth:`trioserve.LLM.generate_async`.

        To be called in the event loop of the tasks that will wait for it.
        """
        return AsyncGeneration(self, self._thread, prompt, params, options)

    async def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> AsyncIterator[PartialOutput]:
        """Generate while a loop runs: ``async for part in llm.stream("Once upon a time")``.

        Leaving the loop aborts the request, and so does cancelling the task that it runs in.
        Arguments are those of :meth:`generate_async`.

        Raises:
            InvalidRequest: The prompt or a parameter can't be served.
            EngineError: The engine failed or is closed.
        """
        async with self.generate_async(prompt, params, **options) as generation:
            async for part in generation:
                yield part

    async def embed(self, inputs: Inputs, **options: Any) -> Embeddings:
        """Return the embeddings of texts, as :meth:`trioserve.LLM.embed`."""
        embeddings: Embeddings = await self._call(embed_all, inputs, options)
        return embeddings

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Scores:
        """Return how well texts go together, as :meth:`trioserve.LLM.score`."""
        scores: Scores = await self._call(score_all, queries, documents, options)
        return scores

    async def classify(self, inputs: Inputs, **options: Any) -> Classifications:
        """Return the labels of texts, as :meth:`trioserve.LLM.classify`."""
        classifications: Classifications = await self._call(classify_all, inputs, options)
        return classifications

    score_labels = _in_thread(Engine.score_labels)
    abort = _in_thread(Engine.abort)
    pause = _in_thread(Engine.pause)
    resume = _in_thread(Engine.resume)
    statistics = _in_thread(Engine.statistics)
    update_weights = _in_thread(Engine.update_weights)
    release_memory = _in_thread(Engine.release_memory)
    resume_memory = _in_thread(Engine.resume_memory)
    flush_cache = _in_thread(Engine.flush_cache)
    load_adapter = _in_thread(Engine.load_adapter)
    unload_adapter = _in_thread(Engine.unload_adapter)
    list_adapters = _in_thread(properties.list_adapters)
    weight_version = _in_thread(properties.weight_version)
    is_paused = _in_thread(properties.is_paused)

    async def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(engine, *args)`` in the engine's thread; a cancellation ends it."""
        return await asyncio.wrap_future(self._thread.submit(function, *args))

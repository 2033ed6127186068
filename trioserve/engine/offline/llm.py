"""``LLM``: the engine for scripts and programs of plain threads.

The engine runs in a thread of its own; every call hands one function to it and waits.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.offline import properties
from trioserve.engine.offline.batch import Params, PromptBatch, as_chats, complete_all
from trioserve.engine.offline.engine_thread import EngineThread
from trioserve.engine.offline.generation import Generation
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
) -> Callable[Concatenate[LLM, P], T]: ...


@overload
def _in_thread(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[LLM, P], T]: ...


def _in_thread(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method of ``LLM`` that calls an engine's method in its thread."""

    @functools.wraps(method)
    def call(self: LLM, *args: Any, **kwargs: Any) -> Any:
        return self._call(lambda engine: method(engine, *args, **kwargs))

    return call


class LLM:
    """A model loaded for use from ordinary code::

        with trioserve.LLM("smollm2-135m") as llm:
            for completion in llm.generate(["Once upon a time", "The sea"], max_tokens=32):
                print(completion.text)

    Every method may be called from any thread. Without the ``with`` block, :meth:`close` or the end
    of the program closes it.

    Args:
        model: a known name, a folder, a GGUF file, a Hub id, or a whole configuration.
        options: fields of :class:`~trioserve.EngineConfig`, over those of a configuration.

    Raises:
        InvalidRequest: an option's value isn't allowed.
        ModelLoadError: the model can't be loaded.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        thread = self._thread = EngineThread(EngineConfig.of(model, options))
        thread.start()
        self._finalizer = weakref.finalize(self, thread.stop)
        try:
            thread.started.result()
        except BaseException:  # An error, or Ctrl-C while the model is loaded.
            self.close()
            raise

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model and end all requests. Idempotent."""
        self._finalizer()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: Params = None,
        *,
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """Complete one prompt or many, all together, and return them in the order given.

        A completion has as many ``outputs`` as its ``n`` asks for.

        Args:
            prompts: Text, token ids or messages, or a list of such.
            params: Sampling parameters for all, or one for each prompt.
            progress: Draw a progress bar on stderr, if that is a terminal.
            options: The fields of ``params`` instead of ``params``, and further arguments of
                :meth:`trioserve.Engine.generate`.

        Raises:
            InvalidRequest: A prompt or a parameter can't be served.
            EngineError: The engine failed or is closed.
        """
        batch = PromptBatch.of(prompts, params, options)
        completions: list[Completion] = self._call(complete_all, self._thread.room, batch, progress)
        return completions

    def chat(
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
        progress: bool = True,
        **options: Any,
    ) -> list[Completion]:
        """Answer one conversation or many, all together, and return answers in the order given.

        Args:
            messages: A conversation in the form of OpenAI's API, or a list of such.
            params: As for :meth:`generate`, as are ``progress`` and ``options``.
            tools: Tools that the chat template shows to the model. Calls come back as text.
            chat_template_kwargs: Further arguments of the chat template.
            add_generation_prompt: Let the template begin the assistant's message.
            continue_final_message: Go on with the last message instead.
            mm_processor_kwargs: Arguments of the model's processor of media, over the option's.
            media_io_kwargs: Frames that are taken of videos, over those of the option.

        Raises:
            InvalidRequest: A message or a parameter can't be served.
            EngineError: The engine failed or is closed.
        """
        chats = as_chats(
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            mm_processor_kwargs=mm_processor_kwargs,
            media_io_kwargs=media_io_kwargs,
        )
        return self.generate(chats, params, progress=progress, **options)

    def generate_async(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Generation:
        """Hand in one request and return at once; the handle has its output.

        Any number may be handed in: those that the engine's queue has no room for wait outside.

        Args:
            prompt: Text, token ids or the messages of a chat.
            params: How to sample; or give its fields as keyword arguments.
            options: Further arguments of :meth:`trioserve.Engine.generate`.

        Raises:
            EngineError: The engine failed or is closed. All other errors come from the handle.
        """
        return Generation(self, self._thread, prompt, params, options)

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Any
    ) -> Iterator[PartialOutput]:
        """Generate while a loop runs: ``for part in llm.stream("Once upon a time")``.

        Leaving the loop aborts the request. Arguments are those of :meth:`generate_async`.

        Raises:
            InvalidRequest: The prompt or a parameter can't be served.
            EngineError: The engine failed or is closed.
        """
        with self.generate_async(prompt, params, **options) as generation:
            yield from generation

    def embed(self, inputs: Inputs, **options: Any) -> Embeddings:
        """Return the embeddings of texts; arguments and errors are those of :meth:`Engine.embed`.

        There may be any number of them: those that the queue has no room for are computed later.
        """
        embeddings: Embeddings = self._call(embed_all, inputs, options)
        return embeddings

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Scores:
        """Return how well texts go together; arguments are those of :meth:`Engine.score`.

        There may be any number of documents, as in :meth:`embed`.
        """
        scores: Scores = self._call(score_all, queries, documents, options)
        return scores

    def classify(self, inputs: Inputs, **options: Any) -> Classifications:
        """Return the labels of texts; arguments and errors are those of :meth:`Engine.classify`.

        There may be any number of them, as in :meth:`embed`.
        """
        classifications: Classifications = self._call(classify_all, inputs, options)
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

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Block until ``function(engine, *args)`` has returned in the engine's thread."""
        future = self._thread.submit(function, *args)
        try:
            return future.result()
        finally:
            future.cancel()  # A Ctrl-C that ends the wait ends the call.

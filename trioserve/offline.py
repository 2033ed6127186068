"""``LLM``: the engine for scripts that know nothing of trio.

The engine runs in a thread of its own; every call hands one coroutine to it and waits.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import rich.console
import rich.progress
import trio

from trioserve.config import EngineConfig
from trioserve.engine import Engine
from trioserve.errors import EngineError, QueueFull
from trioserve.generation import Completion, PromptLike, Usage
from trioserve.nursery import open_engine
from trioserve.pooling.inputs import Inputs, Item, as_items
from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
from trioserve.sampling import SamplingParams

__all__ = ["LLM"]


@attrs.define(eq=False)
class _EngineThread:
    """A thread that runs trio and holds one engine open until it is told to stop."""

    config: EngineConfig
    _started: queue.SimpleQueue[Exception | None] = attrs.field(factory=queue.SimpleQueue)
    _thread: threading.Thread = attrs.field(init=False)
    engine: Engine | None = None
    token: trio.lowlevel.TrioToken | None = None
    failure: Exception | None = None
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _stopping: bool = False

    def start(self) -> None:
        """Load the model; raises what :func:`~trioserve.open_engine` raises."""
        self._thread = threading.Thread(target=self._run, name="trioserve-llm", daemon=True)
        self._thread.start()
        try:
            error = self._started.get()
        except BaseException:  # Ctrl-C while the model is loaded
            self.stop()
            raise
        if error is not None:
            self._thread.join()
            raise error

    def stop(self) -> None:
        """Close the engine and wait for the thread to end. Idempotent."""
        self._stopping = True
        self.cancel(self._scope)
        self._thread.join()

    def cancel(self, scope: trio.CancelScope) -> None:
        """Cancel a scope of the thread's, from any thread."""
        if self.token is not None:
            # The loop may have ended by itself, with the engine's failure.
            with contextlib.suppress(trio.RunFinishedError):
                self.token.run_sync_soon(scope.cancel)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            self.failure = error
            self._started.put(error)

    async def _main(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        if self._stopping:  # Before there was a token: whoever stops now sees it.
            return
        with self._scope:
            async with open_engine(self.config) as engine:
                self.engine = engine
                self._started.put(None)
                await trio.sleep_forever()


class LLM:
    """A model loaded for use from ordinary code::

        with trioserve.LLM("smollm2-135m") as llm:
            for completion in llm.generate(["Once upon a time", "The sea"], max_tokens=32):
                print(completion.text)

    Without the ``with`` block, :meth:`close` or the end of the program closes it.

    Args:
        model: a known name, a folder, a GGUF file, a Hub id, or a whole configuration.
        options: fields of :class:`~trioserve.EngineConfig`, over those of a configuration.

    Raises:
        InvalidRequest: an option's value isn't allowed.
        ModelLoadError: the model can't be loaded.
    """

    def __init__(self, model: str | EngineConfig, **options: Any) -> None:
        self._engine_thread = _EngineThread(EngineConfig.of(model, options))
        self._engine_thread.start()
        self._finalizer = weakref.finalize(self, self._engine_thread.stop)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unload the model. Idempotent."""
        self._finalizer()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **sampling: Any,
    ) -> list[Completion]:
        """Complete one prompt or many, all together, and return them in the order given.

        A completion has as many ``outputs`` as its ``n`` asks for.

        Args:
            prompts: text, token ids or messages, or a list of such.
            params: sampling parameters for all, or one for each prompt.
            progress: draw a progress bar on stderr, if that is a terminal.
            sampling: the fields of ``params`` instead of ``params``.

        Raises:
            InvalidRequest: a prompt or a parameter can't be served.
            EngineError: the engine failed or is closed.
        """
        batch = _as_batch(prompts)
        if params is None or isinstance(params, SamplingParams):
            each: list[SamplingParams | None] = [params] * len(batch)
        else:
            each = list(params)
            if len(each) != len(batch):
                raise ValueError(f"{len(each)} sampling parameters for {len(batch)} prompts")
        console = rich.console.Console(stderr=True)
        with rich.progress.Progress(
            rich.progress.TextColumn("[progress.description]{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[speed]}"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not (progress and console.is_terminal),
        ) as bar:
            completions: list[Completion] = self._call(_complete_all, batch, each, sampling, bar)
        return completions

    def embed(self, inputs: Inputs, **options: Any) -> Embeddings:
        """The embeddings of texts; arguments and errors are those of :meth:`Engine.embed`.

        There may be any number of them: what the queue has no room for is computed later.
        """
        parts: list[Embeddings] = [
            self._call(functools.partial(Engine.embed, inputs=part, **options))
            for part in _parts(inputs, self._engine_thread.config.max_num_queued_reqs)
        ]
        return Embeddings(
            np.concatenate([part.vectors for part in parts]),
            _usage_of(parts),
            tuple(count for part in parts for count in part.num_tokens),
        )

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Scores:
        """How well texts go together; arguments and errors are those of :meth:`Engine.score`.

        There may be any number of documents, as in :meth:`embed`.
        """
        ask = functools.partial(Engine.score, **options)
        # A model that embeds reads the queries, too, of which there may be as many.
        room = max(self._engine_thread.config.max_num_queued_reqs // 2, 1)
        parts: list[Scores] = [
            self._call(functools.partial(ask, queries=firsts, documents=seconds))
            for firsts, seconds in _parts_of_pairs(queries, documents, room)
        ]
        return Scores(np.concatenate([part.values for part in parts]), _usage_of(parts))

    def score_labels(
        self,
        query: str | Sequence[int],
        items: str | Sequence[str | Sequence[int]],
        label_token_ids: Sequence[int],
        **options: Any,
    ) -> LabelScores:
        """How probable tokens are after a query and items; see :meth:`Engine.score_labels`."""
        ask = functools.partial(
            Engine.score_labels,
            query=query,
            items=items,
            label_token_ids=label_token_ids,
            **options,
        )
        scores: LabelScores = self._call(ask)
        return scores

    def classify(self, inputs: Inputs, **options: Any) -> Classifications:
        """The labels of texts; arguments and errors are those of :meth:`Engine.classify`.

        There may be any number of them, as in :meth:`embed`.
        """
        parts: list[Classifications] = [
            self._call(functools.partial(Engine.classify, inputs=part, **options))
            for part in _parts(inputs, self._engine_thread.config.max_num_queued_reqs)
        ]
        return Classifications(
            parts[0].labels,
            np.concatenate([part.logits for part in parts]),
            np.concatenate([part.probabilities for part in parts]),
            _usage_of(parts),
        )

    def _call(self, function: Any, *args: Any) -> Any:
        thread = self._engine_thread
        if not self._finalizer.alive:
            raise EngineError("this LLM is closed")
        scope = trio.CancelScope()

        async def scoped() -> Any:
            with scope:
                return await function(thread.engine, *args)

        try:
            return trio.from_thread.run(scoped, trio_token=thread.token)
        except (trio.RunFinishedError, trio.Cancelled) as error:
            raise thread.failure or EngineError("this LLM is closed") from error
        finally:
            # A Ctrl-C ends the wait alone: what was asked for is not to be computed for nobody.
            thread.cancel(scope)


def _as_batch(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """A single prompt is text, a prompt class, a list of ids or a list of messages."""
    if isinstance(prompts, (list, tuple)):
        first = prompts[0] if prompts else None
        if not isinstance(first, (int, Mapping)):
            return list(prompts)
    return [prompts]  # type: ignore[list-item]


def _parts(inputs: Inputs, most: int) -> list[list[Item]]:
    """The items of ``inputs``, at most so many in each part."""
    items = as_items(inputs)
    return [items[start : start + most] for start in range(0, len(items), most)]


def _parts_of_pairs(
    queries: str | Sequence[str], documents: str | Sequence[str], most: int
) -> list[tuple[Any, Any]]:
    """Queries and documents, at most so many documents in each part.

    What doesn't go together stays as it is, for the engine to refuse.
    """
    both = isinstance(documents, Sequence) and isinstance(queries, Sequence)
    if not both or isinstance(documents, str) or len(documents) <= most:
        return [(queries, documents)]
    starts = range(0, len(documents), most)
    if isinstance(queries, str) or len(queries) == 1:
        return [(queries, documents[start : start + most]) for start in starts]
    if len(queries) != len(documents):
        return [(queries, documents)]
    ends = [slice(start, start + most) for start in starts]
    return [(queries[part], documents[part]) for part in ends]


def _usage_of(parts: Sequence[Embeddings | Scores | Classifications]) -> Usage:
    """What all of them used together."""
    return Usage(
        prompt_tokens=sum(part.usage.prompt_tokens for part in parts),
        completion_tokens=0,
        cached_tokens=sum(part.usage.cached_tokens for part in parts),
    )


async def _complete_all(
    engine: Engine,
    batch: list[PromptLike],
    params: list[SamplingParams | None],
    sampling: dict[str, Any],
    bar: rich.progress.Progress,
) -> list[Completion]:
    completions: list[Completion | None] = [None] * len(batch)
    task = bar.add_task("Generating", total=len(batch), speed="")
    started = trio.current_time()
    produced = 0
    # More than the engine's queue takes would be refused, and fewer would leave it idle.
    common = SamplingParams(n=sampling.get("n", 1))
    largest = max(((each or common).n for each in params), default=1)
    room = trio.CapacityLimiter(max(engine.config.max_num_queued_reqs // largest, 1))
    failure: Exception | None = None
    num_open = 0
    refused = trio.lowlevel.ParkingLot()

    async def complete_once_there_is_room(index: int) -> Completion:
        """The queue's other bounds are known when it refuses: come again when others have left."""
        nonlocal num_open
        while True:
            num_open += 1
            try:
                return await engine.complete(batch[index], params[index], **sampling)
            except QueueFull as full:
                seconds = full.retry_after
            finally:
                num_open -= 1
            if num_open:
                await refused.park()
            else:  # it is another thread's batch that waits there
                await trio.sleep(seconds)

    async def complete(index: int) -> None:
        nonlocal produced, failure
        async with room:
            try:
                completion = await complete_once_there_is_room(index)
            except Exception as error:
                failure = failure or error
                nursery.cancel_scope.cancel()
                return
            # Two for one: so there are soon as many again as the queue takes.
            refused.unpark(count=2)
        completions[index] = completion
        produced += completion.usage.completion_tokens
        elapsed = max(trio.current_time() - started, 1e-9)
        bar.update(task, advance=1, speed=f"{produced / elapsed:.1f} tokens/s")

    async with trio.open_nursery() as nursery:
        for index in range(len(batch)):
            nursery.start_soon(complete, index)
    if failure is not None:
        raise failure
    return [completion for completion in completions if completion is not None]

"""The engine as its callers see it: generate, complete, statistics, drain.

A request isn't a task: it belongs to the scope of the ``async with engine.generate(...)`` block,
and leaving that block, for whatever reason, is its abort. The tasks behind it are
:mod:`trioserve.nursery`'s.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from os import PathLike
from typing import Any

import attrs
import trio

from trioserve import wire
from trioserve.adapters import NO_ADAPTER, Adapter, absolute, check_name
from trioserve.admission import (
    check_arguments,
    check_params,
    check_prompt,
    max_prompt_tokens,
    sampler_params,
)
from trioserve.backend import Backend
from trioserve.config import EngineConfig
from trioserve.control import Control
from trioserve.deadline import Deadline
from trioserve.entrance import DEFAULT_MAX_TOKENS, Entrance
from trioserve.errors import (
    Draining,
    EngineError,
    InvalidRequest,
    Paused,
    RequestAborted,
    SlowReader,
)
from trioserve.feed import DEFAULT_MAX_RECORDS, Subscription
from trioserve.generation import (
    Completion,
    GenerationStream,
    PromptLike,
    as_prompt,
    completion_of,
    sampling_params,
)
from trioserve.metrics import Metrics
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.model_files.encoder_files import ModelTask
from trioserve.pooling.decoders import AskedPrompt
from trioserve.pooling.inputs import Inputs
from trioserve.pooling.open_requests import OpenRequests
from trioserve.pooling.requests import Encoding, Pooling
from trioserve.pooling.results import Classifications, Embeddings, LabelScores, Scores
from trioserve.pooling.sender import Sender
from trioserve.request import (
    Finish,
    FinishReason,
    Prompt,
    Request,
    Sequence,
    Times,
    TokensPrompt,
)
from trioserve.retention import Retention
from trioserve.sampling import SamplerParams, SamplingParams
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.feeds import Feeds
from trioserve.scheduler.iterations import Iteration
from trioserve.sessions import MAX_CAPACITY, Session, Sessions
from trioserve.statistics import EngineStatistics
from trioserve.stream import Chunk, Stream, StreamBudget
from trioserve.submissions import Submissions, open_submissions
from trioserve.text.tokenizer import Tokenizer

__all__ = ["Engine"]


@attrs.define(eq=False, kw_only=True)
class Engine:
    """A running engine. Made by :func:`open_engine`; every method is for the same trio program."""

    config: EngineConfig
    model_name: str
    tokenizer: Tokenizer
    metrics: Metrics
    ready: wire.Ready
    """What the first worker said of itself: device, page pool, limits."""
    generation_defaults: dict[str, Any]
    task: ModelTask = "generate"
    """What the model is for: ``generate``, ``embed`` or ``classify``."""
    _encoding: Encoding | None = None
    """How texts are computed as a whole, if the model is an encoder."""
    _embedding: DecoderEmbedding
    """How it embeds texts, if it isn't one."""
    _eos_token_ids: tuple[int, ...]
    _scheduler: Backend
    _to_tokenizer: trio.MemorySendChannel[Request]
    _worker_restarts: Callable[[], int]
    _stream_budget: StreamBudget
    _seeds: random.Random
    on_request_end: Callable[[Request], None] = lambda _: None
    """Called once for each request, when nothing more will be delivered of it."""
    on_none_open: Callable[[], None] = lambda: None
    """Called whenever the last open request has ended."""
    _open: dict[Request, None] = attrs.field(factory=dict)
    """The requests whose caller's scope is open, in the order of their arrival."""
    sessions: Sessions = attrs.field(init=False)
    """Those that are open."""
    control: Control = attrs.field(init=False)
    """Pauses, aborts by name, and the like: what operators do."""
    pooling: Pooling = attrs.field(init=False)
    """Vectors, scores and labels of texts as a whole."""
    _entrance: Entrance = attrs.field(init=False)
    _draining: bool = False
    _closed: EngineError | None = None
    _idle: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        config = self.config
        batcher = None if self._encoding is None else self._encoding.batcher
        self.control = Control(self._scheduler, self._open, batcher)
        self.pooling = Pooling(
            task=self.task,
            model_name=self.model_name,
            config=config,
            metrics=self.metrics,
            check_open=self._check_open,
            encoding=self._encoding,
            embedding=self._embedding,
            pool_prompt=self._pool_prompt,
            complete=self.complete,
            open=OpenRequests(self._on_left),
        )
        self.sessions = Sessions(
            self._scheduler.holds, config.max_sessions, self.generate, self._end
        )
        self._entrance = Entrance(
            line=self._scheduler,
            max_requests=config.max_num_queued_reqs,
            max_tokens=config.max_num_queued_tokens or max(DEFAULT_MAX_TOKENS, self.max_model_len),
        )

    @property
    def max_num_queued_tokens(self) -> int:
        """Tokens that the prompts of waiting requests may have, before others are refused."""
        return self._entrance.max_tokens

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return self.ready.vocab_size

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and output together."""
        return self.ready.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence by themselves."""
        return self._eos_token_ids

    @property
    def healthy(self) -> bool:
        """Whether a worker is attached and at work, and new requests are admitted."""
        return (
            self._scheduler.attached
            and not self._scheduler.stalled
            and not self._draining
            and self._closed is None
        )

    @property
    def stalled(self) -> bool:
        """Whether the worker owes a step for so long that it may be hung."""
        return self._scheduler.stalled

    @property
    def idle(self) -> bool:
        """Whether no request is open, and nothing is computed any more for those that were."""
        batcher = None if self._encoding is None else self._encoding.batcher
        return (
            not self._open
            and not self.pooling.open
            and self._scheduler.idle
            and (batcher is None or batcher.idle)
        )

    @property
    def draining(self) -> bool:
        """Whether :meth:`drain` was called."""
        return self._draining

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
            request_id: a name for logs (default: a random one).
            priority: smaller runs sooner under the priority policy.
            timeout: seconds after which the block is cancelled and ``DeadlineExceeded`` raised
                (default: the option ``default_timeout``); infinity for never.
            arrived: the moment on trio's clock from which ``timeout`` counts (default: now).
            cache_salt: share cached prefixes only with requests of the same salt.
            retention: how much its KV is worth in the prefix cache once it has ended.
            adapter: the name of a loaded adapter (default: the model as it is).
            prefix_ids: tokens that come before those of the prompt.
            traceparent: the caller's W3C trace context; the request's span becomes its child.
            tracestate: what goes with ``traceparent``.

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
        if self.task != "generate":
            raise self.pooling.refusal("generate")
        if params is None:
            params = sampling_params({**self.generation_defaults, **sampling})
        elif sampling:
            raise InvalidRequest("give either params or its fields, not both", param="params")
        check_arguments(
            priority,
            timeout,
            arrived,
            request_id=request_id or "",
            cache_salt=cache_salt,
            adapter=adapter,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        number = self._adapter_number(adapter)
        if retention is not None and not isinstance(retention, Retention):
            raise InvalidRequest(
                f"retention must be a Retention, got {retention!r}", param="retention"
            )
        request = self._make_request(
            as_prompt(prompt), params, request_id or f"req-{uuid.uuid4().hex}", priority, cache_salt
        )
        request.retention = retention
        request.adapter = number
        if prefix_ids:
            check_prompt(
                TokensPrompt(tuple(prefix_ids)),
                self.tokenizer,
                max_model_len=self.max_model_len,
                vocab_size=self.vocab_size,
                keep=None,
            )
            request.prefix_ids = tuple(prefix_ids)
            request.fewest_tokens += len(prefix_ids)
        request.traceparent, request.tracestate = traceparent, tracestate
        return self._generation(request, Deadline.of(timeout, arrived, self.config))

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
        retention: Retention | None = None,
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
        **sampling: Any,
    ) -> Completion:
        """The whole output at once; arguments and errors are those of :meth:`generate`."""
        chunks: list[Chunk] = []
        generation = self.generate(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            timeout=timeout,
            arrived=arrived,
            cache_salt=cache_salt,
            retention=retention,
            adapter=adapter,
            traceparent=traceparent,
            tracestate=tracestate,
            **sampling,
        )
        async with generation as stream:
            async for chunk in stream:
                chunks.append(chunk)
        return completion_of(stream, chunks)

    def submissions(self) -> contextlib.AbstractAsyncContextManager[Submissions]:
        """An executor: ``async with engine.submissions() as executor``, then ``executor.submit``.

        For requests that are handed in at once and waited for later. Leaving the block, for
        whatever reason, aborts those that haven't ended; its own exceptions come out as they are.
        """
        return open_submissions(self.generate)

    async def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        pooling: str | None = None,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> Embeddings:
        """The embeddings of texts. Leaving the call, for whatever reason, aborts it.

        A model that generates gives them, too: of the hidden states behind its last layer.

        Args:
            inputs: a text, the token ids of one, or a list of either. Ids are taken as they are,
                special tokens included.
            dimensions: keep as many of each vector, and make it as long as 1 again: for models that
                were trained so (Matryoshka).
            normalize: whether vectors are as long as 1 (default: as the model's files say; yes for
                a model that generates).
            pooling: of a decoder: the hidden state of the ``last`` token or the ``mean`` of all
                (default: as the model's files say, else ``last``). An encoder's is its own.
            truncate_prompt_tokens: cut longer texts to as many tokens, -1 for as many as the model
                takes (default: refuse what is longer than that).
            request_id: a name for :meth:`abort` (default: a random one).
            timeout: seconds after which :exc:`~trioserve.errors.DeadlineExceeded` is raised
                (default: the option ``default_timeout``); infinity for never.
            arrived: the moment on trio's clock from which ``timeout`` counts (default: now).
            cache_salt: share cached prefixes only with requests of the same salt.
            adapter: the name of a loaded adapter (default: the model as it is).
            traceparent: as for :meth:`generate`.
            tracestate: as there.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served.
            AdapterNotFound: no adapter of that name is loaded.
            ContextTooLong: a text is longer than the model takes.
            QueueFull: too many texts wait, or too many tokens in them.
            Draining: the engine is shutting down.
            Paused: it is paused, and refuses what comes.
            DeadlineExceeded: the timeout ran out.
            RequestAborted: somebody has ended the request.
            EngineError: the worker can't compute one of the texts, or the engine failed.
        """
        return await self.pooling.embed(
            inputs,
            dimensions=dimensions,
            normalize=normalize,
            pooling=pooling,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=Sender(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
            cache_salt=cache_salt,
            adapter=adapter,
        )

    async def score(
        self,
        queries: str | Seq[str],
        documents: str | Seq[str],
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Scores:
        """How well queries and documents go together: a score for each pair, larger for better.

        A model that scores pairs (a cross-encoder) reads each pair as one; of a model that embeds
        it is the cosine between the two embeddings.

        Args:
            queries: one for all documents, or one for each.
            documents: one or several.
            truncate_prompt_tokens: as for :meth:`embed`, as all else; of a pair, the longer text is
                cut first.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served; and
                whatever :meth:`embed` raises.
        """
        return await self.pooling.score(
            queries,
            documents,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=Sender(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
        )

    async def score_labels(
        self,
        query: str | Seq[int],
        items: str | Seq[str | Seq[int]],
        label_token_ids: Seq[int],
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        cache_salt: str = "",
        adapter: str = "",
        traceparent: str = "",
        tracestate: str = "",
    ) -> LabelScores:
        """How probable each of some tokens is after the query and each item; nothing is generated.

        For a model that generates. What the query has computed is shared by all items behind it.

        Args:
            query: text, or token ids.
            items: one or several, each of the query's kind.
            label_token_ids: the tokens.
            apply_softmax: make their probabilities 1 in all.
            item_first: put each item before the query, instead of behind it.
            truncate_prompt_tokens: as for :meth:`embed`, as all else.

        Raises:
            InvalidRequest: the model is for something else, or an argument can't be served; and
                whatever :meth:`embed` raises.
        """
        return await self.pooling.score_labels(
            query,
            items,
            label_token_ids,
            apply_softmax=apply_softmax,
            item_first=item_first,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=Sender(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
            cache_salt=cache_salt,
            adapter=adapter,
        )

    async def classify(
        self,
        inputs: Inputs,
        *,
        truncate_prompt_tokens: int | None = None,
        request_id: str | None = None,
        timeout: float | None = None,
        arrived: float | None = None,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Classifications:
        """How probable each label is for texts, or for pairs of texts given as tuples.

        Arguments and errors are those of :meth:`embed`.
        """
        return await self.pooling.classify(
            inputs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            sender=Sender(
                request_id=request_id,
                timeout=timeout,
                arrived=arrived,
                traceparent=traceparent,
                tracestate=tracestate,
            ),
        )

    @contextlib.contextmanager
    def open_session(
        self,
        session_id: str | None = None,
        *,
        capacity: int = MAX_CAPACITY,
        timeout: float = math.inf,
    ) -> Iterator[Session]:
        """A conversation whose turns are remembered: ``with engine.open_session() as session``.

        Leaving the block forgets it, and ends the turns that still run.

        Args:
            session_id: a name for it (default: a random one).
            capacity: tokens that its history may hold before it takes no more turns.
            timeout: seconds without a turn after which it is closed.

        Raises:
            InvalidRequest: an argument is wrong, or there is a session of that id.
            SessionLimit: as many sessions are open as may be (``max_sessions``).
            EngineError: the engine is closed.
        """
        session = self.sessions.open(session_id, capacity=capacity, timeout=timeout)
        try:
            yield session
        finally:
            session.close()

    def statistics(self) -> EngineStatistics:
        """Counts of this moment."""
        scheduler = self._scheduler.statistics()
        if self._encoding is not None and self._encoding.batcher is not None:
            scheduler = self._encoding.batcher.counted_in(scheduler)
        return EngineStatistics(
            scheduler=scheduler,
            num_tokenizing=self._entrance.num_entering,
            num_streams=len(self._open) + len(self.pooling.open),
            stream_bytes=self._stream_budget.waiting,
            worker_restarts=self._worker_restarts(),
            num_sessions=len(self.sessions),
        )

    def check_integrity(self) -> None:
        """Assert the invariants of the scheduler, the page pool and the streams.

        Raises:
            AssertionError: one is violated; this is a bug in trioserve.
        """
        self._scheduler.check_integrity()
        self._entrance.check_integrity()
        if self._encoding is not None and self._encoding.batcher is not None:
            self._encoding.batcher.check_integrity()
        self.sessions.check_integrity()
        num_open = sum(len(request.sequences) for request in self._open)
        assert self._entrance.num_entering <= num_open
        if not self._open:
            assert self._stream_budget.waiting == 0

    async def call_worker(self, name: str, arguments: object = None) -> Any:
        """Ask the worker for something rare, by name, and return its answer.

        Raises:
            EngineError: the worker refused.
            WorkerLost: it died before it answered.
        """
        return await self._scheduler.call(name, arguments)

    def drain(self) -> None:
        """Admit nothing new from now on; what runs goes on. Idempotent."""
        self._draining = True

    def check_room(self) -> None:
        """Refuse now what :meth:`generate` would refuse later, whatever it is asked for.

        Raises:
            QueueFull: too much waits.
            Draining: the engine is shutting down.
            Paused: it is paused, and refuses what comes.
            EngineError: it is closed.
        """
        self._check_open()
        self._entrance.check_room()

    async def pause(self, mode: str = "abort", *, refuse: bool = False) -> None:
        """Compute nothing until :meth:`resume`; return once nothing is computed any more.

        Streams stay open, deadlines go on. Idempotent; the last call's arguments count.

        Args:
            mode: what becomes of the requests there are. ``abort``: they end, with what they have
                and the finish reason ``abort``. ``wait``: they finish first, while those that come
                later wait. ``retract``: they keep their tokens, and their KV is computed anew
                after the pause. ``in_place``: they keep their KV, too.
            refuse: whether requests that come during the pause are refused with
                :exc:`~trioserve.errors.Paused`; else they wait in the queue.

        Raises:
            InvalidRequest: there is no such mode.
        """
        await self.control.pause(mode, refuse=refuse)

    def resume(self) -> None:
        """End the pause: what waits is computed, the same as without the pause. Idempotent."""
        self.control.resume()

    @property
    def paused(self) -> bool:
        """Whether nothing is computed because somebody has asked for that."""
        return self._scheduler.paused

    def abort(self, request_id: str, *, prefix: bool = False) -> int:
        """End requests by name, with what they have and the finish reason ``abort``. Never blocks.

        A request that isn't admitted yet raises :exc:`~trioserve.errors.RequestAborted`.

        Args:
            request_id: as given to :meth:`generate`.
            prefix: end all whose names begin so; the empty string ends all.

        Returns:
            how many were ended.
        """
        num_aborted = self.control.abort(request_id, prefix=prefix)
        return num_aborted + self.pooling.open.abort(request_id, prefix=prefix)

    async def update_weights(
        self, model: str, *, mode: str = "wait", weight_version: str | None = None
    ) -> None:
        """Serve other weights of the same model from now on, in later workers, too.

        They are read and checked while the old ones serve; then, for a moment, nobody is computed.
        Whatever goes wrong, the old ones serve on. Prefixes that were computed with them are not
        found any more.

        Args:
            model: a folder, a GGUF file, a Hub id, or a single safetensors file with all tensors
                (in shared memory, for one, under ``/dev/shm``), to be left there for later workers.
            mode: what becomes of the requests there are. ``wait``: they finish first, with the old
                weights, while those that come later wait; in a pause, in which nobody finishes, it
                means the same as ``retract``. ``abort``: they end, with what they have.
                ``retract``: they go on with the new weights from the tokens that they have.
            weight_version: what :attr:`weight_version` is to say (default: a checksum).

        Raises:
            InvalidRequest: there are no such weights, they are another model's, or damaged.
            WorkerLost: there is no worker, or it was lost meanwhile; the old weights serve.
        """
        await self.control.update_weights(model, mode, weight_version)

    @property
    def weight_version(self) -> str:
        """What the weights are called that serve: ``default`` for those that were loaded first."""
        return self.control.weight_version

    @weight_version.setter
    def weight_version(self, version: str) -> None:
        self.control.weight_version = version

    async def release_memory(self) -> None:
        """Give the worker's memory back, all of it: its process ends. Idempotent.

        Requests keep their tokens and go on after :meth:`resume_memory`; those that come meanwhile
        wait. Deadlines go on.
        """
        await self.control.release_memory()

    async def resume_memory(self) -> None:
        """Have a worker again; return once it has loaded the model. Idempotent."""
        await self.control.resume_memory()

    @property
    def memory_released(self) -> bool:
        """Whether there is no worker because somebody has asked for its memory."""
        return self.control.memory_released

    def flush_cache(self) -> int:
        """Have no request find what has been computed up to now. What runs goes on with its own.

        Returns:
            how many pages of the KV cache were freed.
        """
        return self.control.flush_cache()

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name, in the order in which they were loaded."""
        return tuple(self._scheduler.adapters.catalogue)

    async def load_adapter(self, name: str, path: str | PathLike[str]) -> None:
        """Load a LoRA adapter that requests may then name; what runs goes on meanwhile.

        Args:
            name: for requests; of no adapter that is loaded, nor the model's own.
            path: a folder with PEFT's adapter_config.json and adapter_model.safetensors.

        Raises:
            InvalidRequest: the files can't be served, and why; or the name is taken, or adapters
                aren't served (``enable_lora``).
            WorkerLost: the worker was lost while it loaded it.
            EngineError: it couldn't.
        """
        if not self.config.serves_adapters:
            raise InvalidRequest("adapters aren't served: start with --enable-lora", param="name")
        check_name(name)
        if name == self.model_name:
            raise InvalidRequest(f"{name!r} is the model's own name", param="name")
        await self._scheduler.adapters.load(name, absolute(path))

    async def unload_adapter(self, name: str) -> None:
        """Let no request name an adapter any more, and return once those have ended that use it.

        A request that isn't in the queue yet is refused. Cancelling this only ends the wait.

        Raises:
            AdapterNotFound: there is none of that name.
        """
        await self._scheduler.adapters.unload(name)

    def abort_all(self, error: RequestAborted) -> None:
        """End every open request with ``error``, whatever its stage; never blocks.

        What waits in its stream is read first, and one whose final chunk waits there ends as it
        would have. Those that come later are another matter: see :meth:`drain`.
        """
        if self._closed is not None:
            return
        for request in self._open:
            self._end(request, error)
        self.pooling.open.end_all(error)

    def _end(self, request: Request, error: RequestAborted) -> None:
        finish = Finish(FinishReason.ABORT, error=error)
        for sequence in reversed(request.sequences):
            if not sequence.delivered:
                self._scheduler.abort(sequence, finish)
        # The detokenizer does the same, but may have been cancelled with the engine's scope.
        request.stream.close(error)

    def iterations(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[Iteration]]:
        """A record of each step: ``with engine.iterations() as iterations``, then read them.

        Nothing is recorded while nobody reads. A reader that is too slow for what comes loses the
        oldest records; ``iterations.num_dropped`` tells how many.

        Args:
            max_records: how many may wait to be read.
        """
        return self._feeds.iterations.feed.subscribe(max_records)

    def cache_events(
        self, max_records: int = DEFAULT_MAX_RECORDS
    ) -> contextlib.AbstractContextManager[Subscription[CacheEvent]]:
        """What comes into the prefix cache and goes out of it, as :meth:`iterations` tells steps.

        A page is told of when a plan is made that computes it.
        """
        return self._feeds.cache.feed.subscribe(max_records)

    @property
    def _feeds(self) -> Feeds:
        feeds = self._scheduler.feeds
        assert feeds is not None, "it is the engine process that tells"
        return feeds

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while self._open or self.pooling.open:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    def _make_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str, priority: int, salt: str
    ) -> Request:
        check_params(params, self.config, vocab_size=self.vocab_size)
        keep = max_prompt_tokens(params, self.max_model_len)
        fewest_tokens = check_prompt(
            prompt,
            self.tokenizer,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            keep=keep,
        )
        request = Request(
            id=request_id,
            prompt=prompt,
            params=params,
            stream=Stream(self._stream_budget),
            times=Times(arrived=trio.current_time()),
            priority=priority,
            cache_salt=salt,
            max_prompt_tokens=keep,
            fewest_tokens=fewest_tokens,
        )
        request.stream.on_evicted = functools.partial(self._evict, request)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed % 2**64
        sampler = sampler_params(params, seed, self._eos_token_ids, self.tokenizer)
        request.sequences += [
            Sequence(request=request, index=index, sampler=_with_index(sampler, index))
            for index in range(params.n)
        ]
        return request

    def _adapter_number(self, name: str) -> int:
        """The number of a loaded adapter, or of none."""
        return self._scheduler.adapters.catalogue.find(name).number if name else NO_ADAPTER

    async def _pool_prompt(self, asked: AskedPrompt, deadline: Deadline) -> tuple[bytes, int]:
        """What the hidden states of a prompt become, as a float32 column, and its tokens."""
        request = self._make_request(asked.prompt, asked.params, asked.id, 0, asked.cache_salt)
        request.adapter = self._adapter_number(asked.adapter)
        request.traceparent, request.tracestate = asked.traceparent, asked.tracestate
        for sequence in request.sequences:
            sequence.sampler = attrs.evolve(sequence.sampler, pooling=asked.pooling)
        async with self._generation(request, deadline) as stream:
            async for _ in stream:
                pass
        if not request.vector:
            raise RequestAborted("the request was aborted")
        return request.vector, len(request.prompt_ids)

    def on_finished(self, sequence: Sequence, finish: Finish) -> None:
        """Nothing more will be delivered of ``sequence``: note when and why."""
        sequence.delivered = True
        # A stop string may have ended it before its last token did: what was delivered counts.
        sequence.finish = finish
        sequence.request.times.finished = trio.current_time()
        self.metrics.request_finished(sequence.request, sequence, finish)
        if all(sibling.delivered for sibling in sequence.request.sequences):
            self.on_request_end(sequence.request)

    @contextlib.asynccontextmanager
    async def _generation(
        self, request: Request, deadline: Deadline
    ) -> AsyncIterator[GenerationStream]:
        self._check_open()
        self._entrance.enter(request, trio.current_time())
        self._open[request] = None
        try:
            with deadline.enforced():
                self._to_tokenizer.send_nowait(request)
                await request.admitted.wait()
                if request.rejection is not None:
                    raise request.rejection
                yield GenerationStream(request)
        finally:
            self._abandon(request)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if self._draining:
            raise Draining("the server is shutting down")
        if self.control.refuses:
            raise Paused("the engine is paused, and takes no requests meanwhile")

    def close(self, error: EngineError) -> None:
        """End every open request with ``error``, and refuse new ones with it. Idempotent."""
        if self._closed is not None:
            return
        self._closed = error
        if self._scheduler.feeds is not None:
            self._scheduler.feeds.close(error)
        for request in self._open:
            request.reject(error)
            request.stream.close(error)
        self.pooling.open.end_all(error)
        self.sessions.close(error)

    def _evict(self, request: Request, error: SlowReader) -> None:
        """The request's stream was cut off for the sake of others. Never blocks."""
        finish = Finish(FinishReason.ABORT, error=error)
        for sequence in reversed(request.sequences):
            if not sequence.delivered:
                self._scheduler.abort(sequence, finish)

    def _abandon(self, request: Request) -> None:
        """The caller's scope is left: nothing more is to be computed or kept. Never blocks."""
        if self._closed is None:
            finish = Finish(FinishReason.ABORT)
        else:
            finish = Finish(FinishReason.ERROR, error=self._closed)
        # The last one first: nobody is to compute the prompt in place of one that has left.
        for sequence in reversed(request.sequences):
            if not sequence.delivered:
                self._scheduler.abort(sequence, finish)
                self.on_finished(sequence, sequence.finish or finish)
        request.stream.discard()
        self._entrance.forget(request)
        del self._open[request]
        self._on_left()

    def _on_left(self) -> None:
        """A caller's scope has been left."""
        if not self._open and not self.pooling.open:
            self._idle.set()
            self.on_none_open()


def _with_index(sampler: SamplerParams, index: int) -> SamplerParams:
    return attrs.evolve(sampler, sequence_index=index) if index else sampler

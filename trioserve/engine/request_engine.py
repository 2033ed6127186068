"""The part of an engine that takes requests: limits, aborts, statistics, drain.

The calls that generate are in :mod:`trioserve.engine.generating`. Texts that are computed as a
whole are in :mod:`trioserve.pooling.engine`. Sessions and operators' calls are in
:mod:`trioserve.engine.engine`, because they need the scheduler in this process.

A request isn't a task: it belongs to the scope of the ``async with engine.generate(...)`` block,
and leaving that block, for whatever reason, is its abort. The tasks behind it are
:mod:`trioserve.engine.nursery`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import trio

from trioserve._util.feed import Feed
from trioserve.config import EngineConfig
from trioserve.engine.backend import Backend
from trioserve.engine.generating import GeneratingEngine
from trioserve.engine.lifecycle import OpenGenerations, abort_by_name
from trioserve.engine.request_factory import RequestMaker
from trioserve.engine.speech import SpeechEngine
from trioserve.engine.transcribing import Transcriber
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.model_files.encoder_files import ModelTask
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.observability.metrics import Metrics
from trioserve.observability.statistics import EngineStatistics
from trioserve.pooling.decoders import AskedPrompt
from trioserve.pooling.engine import PoolingEngine
from trioserve.pooling.open_requests import OpenRequests
from trioserve.pooling.requests import Encoding, Pooling
from trioserve.protocol import wire
from trioserve.protocol.errors import Draining, EngineError, InvalidRequest, RequestAborted
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.adapters import Adapter
from trioserve.requests.admission import DEFAULT_MAX_TOKENS, Admission
from trioserve.requests.deadline import Deadline
from trioserve.requests.embedded import SpeechPrompt
from trioserve.requests.generation import GenerationStream
from trioserve.requests.options import RequestOptions
from trioserve.requests.request import Finish, Request, Sequence
from trioserve.requests.speech.reader import SpeechReader
from trioserve.text.tokenizer import Tokenizer


@attrs.define(eq=False, kw_only=True)
class RequestEngine(GeneratingEngine, PoolingEngine, SpeechEngine):
    """The part of an engine that takes requests. Every method is for the same trio program.

    A front end has no more than this: the engine process administers the scheduler.
    """

    config: EngineConfig
    model_name: str
    tokenizer: Tokenizer
    metrics: Metrics
    ready: wire.Ready
    """The first worker's device, page pool and limits."""
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)
    """Defaults of requests, and a limit of their outputs."""
    task: ModelTask = "generate"
    """The task of the model: ``generate``, ``embed``, ``classify`` or ``transcribe``."""
    reads_images: bool = False
    """True if prompts may have images."""
    reads_audio: bool = False
    """True if prompts may have audio clips."""
    _encoding: Encoding | None = None
    """Computes texts as a whole, if the model is an encoder."""
    _embedding: DecoderEmbedding
    """The pooling of texts by a model that generates."""
    _speech: SpeechReader | None = None
    """Reads speech, if the model transcribes it."""
    transcriber: Transcriber | None = attrs.field(init=False, default=None)
    """Makes transcripts, if the model does."""
    _requests: RequestMaker
    _backend: Backend
    _to_tokenizer: trio.MemorySendChannel[Request]
    _worker_restarts: Callable[[], int]
    on_request_end: Callable[[Request], None] = lambda _: None
    """Called once for each request when all of it has been delivered."""
    on_none_open: Callable[[], None] = lambda: None
    """Called whenever the last open request has ended."""
    _open: OpenGenerations = attrs.field(init=False)
    closed_requests: Feed[Request] = attrs.field(init=False, factory=Feed)
    """Requests as their callers leave them, published while the feed has readers."""
    pooling: Pooling = attrs.field(init=False)
    """Vectors, scores and labels of texts as a whole."""
    _admission: Admission = attrs.field(init=False)
    _draining: trio.Event = attrs.field(factory=trio.Event)
    _closed: EngineError | None = None
    _idle: trio.Event = attrs.field(factory=trio.Event)

    def __attrs_post_init__(self) -> None:
        config = self.config
        self._admission = Admission(
            queue=self._backend,
            max_requests=config.max_num_queued_reqs,
            max_tokens=config.max_num_queued_tokens or max(DEFAULT_MAX_TOKENS, self.max_model_len),
        )
        self._open = OpenGenerations(
            backend=self._backend,
            admission=self._admission,
            to_tokenizer=self._to_tokenizer,
            check_open=self._check_open,
            on_finished=self.on_finished,
            on_left=self._on_generation_left,
        )
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

        if self._speech is not None:
            self.transcriber = Transcriber(
                reader=self._speech,
                tokenizer=self.tokenizer,
                max_model_len=self.max_model_len,
                open_window=self._open_window,
                at_a_time=trio.CapacityLimiter(self.ready.max_num_seqs),
                max_waiting=config.max_num_queued_reqs,
            )

    @property
    def newest_requests(self) -> Iterator[Request]:
        """The open requests, the newest first."""
        return reversed(self._open)

    @property
    def max_num_queued_tokens(self) -> int:
        """Limit of the tokens in the prompts of waiting requests."""
        return self._admission.max_tokens

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
        return self._requests.eos_token_ids

    @property
    def healthy(self) -> bool:
        """True if workers are attached and at work, and new requests are admitted."""
        return (
            self._backend.attached
            and not self._backend.stalled
            and not self.draining
            and self._closed is None
        )

    @property
    def stalled(self) -> bool:
        """True if a step of the worker is so late that it may be hung."""
        return self._backend.stalled

    @property
    def idle(self) -> bool:
        """True if no request is open, and nothing more is computed for closed ones."""
        return not self._open and not self.pooling.open and self._backend.idle

    @property
    def draining(self) -> bool:
        """True once :meth:`drain` was called."""
        return self._draining.is_set()

    def check_integrity(self) -> None:
        """Assert the invariants of the scheduler, the page pool and the streams.

        Raises:
            AssertionError: one is violated; this is a bug in trioserve.
        """
        self._backend.check_integrity()
        self._admission.check_integrity()
        num_open = sum(len(request.sequences) for request in self._open)
        assert self._admission.num_entering <= num_open
        if not self._open:
            assert self._requests.stream_budget.waiting == 0

    def abort(self, request_id: str, *, prefix: bool = False) -> int:
        """End requests by name, with their output so far and the finish reason ``abort``.

        Never blocks. A request that isn't admitted yet raises
        :exc:`~trioserve.protocol.errors.RequestAborted`.

        Args:
            request_id: as given to :meth:`generate`.
            prefix: end all requests with names that begin so; the empty string ends all.

        Returns:
            how many were ended.
        """
        num_aborted = abort_by_name(self._backend, self._open, request_id, prefix=prefix)
        return num_aborted + self.pooling.open.abort(request_id, prefix=prefix)

    def end(self, request: Request, error: RequestAborted) -> None:
        """End an open request with ``error``, whatever its stage. Never blocks."""
        self._open.end(request, error)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """The adapters that requests may name, in the order in which they were loaded."""
        return tuple(self._backend.catalogue)

    @property
    def paused(self) -> bool:
        """True while an operator's pause lasts: no request is computed."""
        return self._backend.paused

    def stored_salt(self, salt: str, tenant: str) -> str:
        """Return the digest that stands for a request's salt and tenant in the prefix cache."""
        return self._requests.stored_salt(salt, tenant)

    async def call_worker(self, name: str, arguments: object = None) -> Any:
        """Call the worker by name, for something rare, and return its answer.

        Raises:
            EngineError: the worker refused.
            WorkerLost: the worker died before it answered.
        """
        return await self._backend.call(name, arguments)

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment."""
        return EngineStatistics(
            scheduler=self._backend.statistics(),
            num_tokenizing=self._admission.num_entering,
            num_streams=len(self._open) + len(self.pooling.open),
            stream_bytes=self._requests.stream_budget.waiting,
            worker_restarts=self._worker_restarts(),
        )

    def drain(self) -> None:
        """Admit no new requests from now on; running ones go on. Idempotent."""
        self._draining.set()

    async def wait_draining(self) -> None:
        """Wait until :meth:`drain` is called."""
        await self._draining.wait()

    def check_room(self, tenant: str = "") -> None:
        """Refuse a request early if :meth:`generate` would refuse even the smallest.

        Args:
            tenant: the one that will ask.

        Raises:
            QueueFull: too much waits.
            Draining: the engine is shutting down.
            Paused: it is paused, and refuses what comes.
            EngineError: it is closed.
        """
        self._check_open()
        self._admission.check_room(tenant)

    def abort_all(self, error: RequestAborted) -> None:
        """End every open request with ``error``, whatever its stage; never blocks.

        Unread output is read first. A request with an unread final chunk ends as it would have. New
        requests are still admitted: see :meth:`drain`.
        """
        if self._closed is not None:
            return
        for request in self._open:
            self._open.end(request, error)
        self.pooling.open.end_all(error)

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        while self._open or self.pooling.open:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()
        await trio.lowlevel.checkpoint()

    async def _pool_prompt(self, asked: AskedPrompt, deadline: Deadline) -> tuple[bytes, int]:
        """Return the pooled hidden states of a prompt, a float32 column, and its tokens."""
        adapter = self._find_adapter(asked.options.adapter)
        if adapter.num_virtual_tokens:
            raise InvalidRequest(
                f"{adapter.name!r} puts virtual tokens in front of a prompt, which is served for "
                "generating only",
                param="adapter",
            )
        request = self._requests.make(asked.prompt, asked.params, asked.options, adapter=adapter)
        for sequence in request.sequences:
            sequence.sampler = attrs.evolve(sequence.sampler, pooling=asked.pooling)
        async with self._open.opened(request, deadline) as stream:
            async for _ in stream:
                pass
        if not request.vector:
            raise RequestAborted("the request was aborted")
        return request.vector, len(request.prompt_ids)

    def _open_window(
        self,
        prompt: SpeechPrompt,
        params: SamplingParams,
        options: RequestOptions,
        deadline: Deadline,
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        """Open the request of a window of speech, whose transcript is open."""
        request = self._requests.make(prompt, params, options)
        return self._open.opened(request, deadline, is_new=False)

    def on_finished(self, sequence: Sequence, finish: Finish) -> None:
        """Note the end of ``sequence``, all of which has been delivered."""
        sequence.delivered = True
        # A stop string may have ended it before its last token did: what was delivered counts.
        sequence.finish = finish
        sequence.request.times.finished = trio.current_time()
        self.metrics.request_finished(sequence.request, sequence, finish)
        if all(sibling.delivered for sibling in sequence.request.sequences):
            self.on_request_end(sequence.request)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed
        if self.draining:
            raise Draining("the server is shutting down")

    def close(self, error: EngineError) -> None:
        """End every open request with ``error``, and refuse new ones with it. Idempotent."""
        if self._closed is not None:
            return
        self._closed = error
        self.closed_requests.close(error)
        self._open.close(error)
        self.pooling.open.end_all(error)

    def _on_generation_left(self, request: Request) -> None:
        if self.closed_requests.is_wanted:
            self.closed_requests.publish(request)
        self._on_left()

    def _on_left(self) -> None:
        """Note that a caller has left its block."""
        if not self._open and not self.pooling.open:
            self._idle.set()
            self.on_none_open()

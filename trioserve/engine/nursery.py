"""The nursery: the engine's tasks and the workers' supervisors under one parent.

::

    Engine.generate ──▶ tokenizer ──▶ validation ───▶ scheduler ══▶ worker
                                                        │   ▲
    GenerationStream ◀────────────── detokenizer ◀──────┘   ╚══════ worker

Each single arrow is a memory channel, each double one an nng socket. Nothing else is owned here: a
request belongs to its caller's scope.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import attrs
import trio

from trioserve.config import EngineConfig
from trioserve.engine.backend import Backend
from trioserve.engine.engine import Engine
from trioserve.engine.engine_worker import MakeWorker
from trioserve.engine.idle_check import AskedWorkers, IdleCheck
from trioserve.engine.loaded_model import LoadedModel, in_thread
from trioserve.engine.media import ModelMedia, open_media, worker_encoder
from trioserve.engine.request_engine import RequestEngine
from trioserve.engine.request_factory import RequestMaker
from trioserve.engine.tasks import EngineTasks, open_tasks
from trioserve.engine.worker_group import WorkerGroup
from trioserve.engine.worker_start import WorkerProcesses, locate_model, log_loaded, workers_port
from trioserve.model_files.decoder_embedding import DecoderEmbedding
from trioserve.observability.metrics import Metrics
from trioserve.observability.task_dump import reporting
from trioserve.observability.tracing import open_tracing
from trioserve.pooling.requests import Encoding
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError
from trioserve.requests.request import Finish, Request, Sequence, SequenceOutput
from trioserve.requests.stream import StreamBudget
from trioserve.text.detokenizer import Detokenizer
from trioserve.text.tokenizer_task import PromptMedia, TokenizerTask
from trioserve.text.worker_validation import WorkerValidation
from trioserve.workers.life import OnProgress
from trioserve.workers.remote.port import WorkersPort

_Outputs = list[SequenceOutput]
_Engine = TypeVar("_Engine", bound=RequestEngine)


@contextlib.asynccontextmanager
async def open_engine(
    model: str | EngineConfig,
    *,
    on_progress: OnProgress | None = None,
    mock: wire.MockSteps | None = None,
    while_loading: Callable[[], None] | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """Run an engine that serves ``model`` for as long as the block lasts.

    Args:
        model: a known name, a folder, a GGUF file, a Hub id, or a whole configuration.
        on_progress: called while the model is loaded.
        mock: use a worker that computes nothing, and takes that long for a step: for measuring.
        while_loading: called in a thread while the worker loads the model, such as for imports.
        options: fields of :class:`~trioserve.config.EngineConfig`, over those of a configuration.

    Raises:
        InvalidRequest: an option's value isn't allowed.
        ModelLoadError: the model can't be loaded; one line says why and what to do.
        EngineError: the engine failed while the block ran; ``__cause__`` is the reason.

    The block's own exceptions come out as they are. When it is left, no task, thread, process or
    file of the engine remains.
    """
    config = EngineConfig.of(model, options)
    async with open_tracing(config.otlp_traces_endpoint) as tracing:
        async with _open_worker(config, on_progress, mock, while_loading) as engine:
            tracing.model_name = engine.model_name
            engine.on_request_end = tracing.request_ended
            engine.pooling.on_end = tracing.texts_ended
            yield engine


@contextlib.asynccontextmanager
async def _open_worker(
    config: EngineConfig,
    on_progress: OnProgress | None,
    mock: wire.MockSteps | None,
    while_loading: Callable[[], None] | None,
) -> AsyncIterator[Engine]:
    """Run the engine over a worker process of its own."""
    path = await locate_model(config)
    processes = WorkerProcesses.of(config, path, on_progress, mock)
    async with processes.ahead():
        loaded = await LoadedModel.read(config, path)
        metrics = Metrics(loaded.name, config.metrics_prefix)
        async with (
            open_media(config, loaded, path, metrics) as media,
            run_engine(
                config,
                loaded,
                processes.maker(config, metrics),
                metrics,
                port=await workers_port(config, path, mock),
                media=media,
                asks_idle_worker=True,
                while_loading=while_loading,
            ) as engine,
        ):
            log_loaded(loaded.name, engine.ready, config.num_workers)
            loaded.log_defaults()
            yield engine


@contextlib.asynccontextmanager
async def run_engine(
    config: EngineConfig,
    model: LoadedModel,
    make_worker: MakeWorker,
    metrics: Metrics,
    *,
    port: WorkersPort | None = None,
    media: ModelMedia | None = None,
    asks_idle_worker: bool = False,
    while_loading: Callable[[], None] | None = None,
) -> AsyncIterator[Engine]:
    """Run an engine over any kind of workers; :func:`open_engine` makes real ones.

    ``port`` is for workers of other hosts. ``media`` reads media in prompts and speech.
    ``asks_idle_worker`` says whether a worker with nothing to do is asked if it holds nothing.
    ``while_loading`` is called in a thread, and done when the block begins.
    """
    group = WorkerGroup.of(
        config,
        metrics,
        make_worker,
        encodes=model.encoder is not None,
        port=port,
        stop_string_at_end=model.stop_string_at_end,
    )
    schedulers, encoder = group.schedulers, model.encoder
    media = media or ModelMedia(model=model, metrics=metrics)
    media_encoder = worker_encoder(config, schedulers, metrics)
    encoding = None if encoder is None else Encoding(encoder=encoder, compute=schedulers.encode)
    async with run_tasks(
        config,
        model,
        schedulers,
        metrics,
        functools.partial(_start_workers, group, config, while_loading),
        functools.partial(
            Engine,
            worker_group=group,
            worker_restarts=lambda: group.num_restarts,
            encoding=encoding,
            speech=media.speech_reader(media_encoder),
        ),
        validation=WorkerValidation(
            schedulers, timeout=config.grammar_timeout, observe_grammar=metrics.observe_grammar
        ),
        prompt_media=media.embedder(media_encoder),
        asked_workers=schedulers if asks_idle_worker else None,
    ) as engine:
        schedulers.notify_idle(engine.on_none_open)
        engine.sessions.start_task = group.start_task
        yield engine


async def _start_workers(
    group: WorkerGroup,
    config: EngineConfig,
    while_loading: Callable[[], None] | None,
    tasks: EngineTasks,
) -> wire.Ready:
    """Start the workers, and call ``while_loading`` meanwhile; return when both are done."""
    called = trio.Event()

    async def call_meanwhile() -> None:
        if while_loading is not None:
            await in_thread(while_loading)
        called.set()

    tasks.start_soon(call_meanwhile)
    ready = await group.start(tasks, config)
    await called.wait()
    return ready


@attrs.frozen(kw_only=True)
class Place:
    """A process's place among those that share a server's requests, and its share."""

    index: int = 0
    count: int = 1

    def seeds(self, config: EngineConfig) -> random.Random:
        """Return the source of seeds for requests without one. It differs between processes."""
        if config.seed is None or self.count == 1:
            return random.Random(config.seed)
        return random.Random(f"{config.seed} {self.index}")

    def stream_budget(self, config: EngineConfig) -> StreamBudget:
        """Return the budget of this process for output that waits for slow readers."""
        total = max(config.max_total_stream_bytes // self.count, 1)
        return StreamBudget(config.max_stream_bytes, total)

    def request_maker(
        self, config: EngineConfig, model: LoadedModel, ready: wire.Ready
    ) -> RequestMaker:
        """Return the maker of this process's requests."""
        return RequestMaker(
            config=config,
            tokenizer=model.tokenizer,
            generation=model.generation,
            max_model_len=ready.max_model_len,
            vocab_size=ready.vocab_size,
            embedding_width=ready.embedding_width,
            eos_token_ids=model.eos_token_ids,
            stream_budget=self.stream_budget(config),
            seeds=self.seeds(config),
        )


@contextlib.asynccontextmanager
async def run_tasks(
    config: EngineConfig,
    model: LoadedModel,
    backend: Backend,
    metrics: Metrics,
    open_backend: Callable[[EngineTasks], Awaitable[wire.Ready]],
    make_engine: Callable[..., _Engine],
    *,
    validation: WorkerValidation | None,
    prompt_media: PromptMedia | None = None,
    asked_workers: AskedWorkers | None = None,
    output_buffer: float = math.inf,
    place: Place = Place(),
) -> AsyncIterator[_Engine]:
    """Run the engine's tasks over a back end of requests.

    ``open_backend`` starts the tasks that the backend needs, and says what its worker can hold.
    ``make_engine`` gets the fields that are made here. ``validation`` is the task between
    tokenizer and backend; None in a front end. ``prompt_media`` is None where media aren't served.
    ``asked_workers`` are asked if they hold nothing while idle. At most ``output_buffer`` batches
    of outputs wait for the detokenizer.
    """
    engine: _Engine | None = None

    def on_failure(error: EngineError) -> None:
        if engine is not None:
            engine.close(error)

    def on_delivered(sequence: Sequence, finish: Finish) -> None:
        assert engine is not None
        engine.on_finished(sequence, finish)

    to_detokenizer, detokenizer_inbox = trio.open_memory_channel[_Outputs](output_buffer)
    detokenizer = Detokenizer(model.tokenizer, backend.abort, on_delivered)
    async with open_tasks(on_failure) as tasks:
        to_tokenizer, backend_inbox = _start_preparing(tasks, model, prompt_media, validation)
        tasks.start_soon(backend.run, backend_inbox, to_detokenizer)
        tasks.start_soon(detokenizer.run, detokenizer_inbox)
        ready = await open_backend(tasks)
        model.tokenizer.bound(ready.max_model_len)
        engine = make_engine(
            **_model_fields(model, config),
            config=config,
            metrics=metrics,
            ready=ready,
            requests=place.request_maker(config, model, ready),
            backend=backend,
            to_tokenizer=to_tokenizer,
        )
        tasks.is_ready = True
        metrics.watch(engine)
        idle_check = IdleCheck(engine, asked_workers)
        engine.on_none_open = idle_check.note
        tasks.start_soon(idle_check.run)
        try:
            with reporting(functools.partial(_report, engine)):
                yield engine
        finally:
            # The worker's end takes a moment; readers are told before it.
            engine.close(EngineError("the engine is closed"))


def _start_preparing(
    tasks: EngineTasks,
    model: LoadedModel,
    prompt_media: PromptMedia | None,
    validation: WorkerValidation | None,
) -> tuple[trio.MemorySendChannel[Request], trio.MemoryReceiveChannel[Request]]:
    """Start the tasks before the back end; return the first one's channel and the back end's."""
    to_tokenizer, tokenizer_inbox = trio.open_memory_channel[Request](math.inf)
    to_backend, backend_inbox = trio.open_memory_channel[Request](math.inf)
    tokenizer = TokenizerTask(model.tokenizer, prompt_media)
    if validation is None:
        tasks.start_soon(tokenizer.run, tokenizer_inbox, to_backend)
    else:
        to_validation, validation_inbox = trio.open_memory_channel[Request](math.inf)
        tasks.start_soon(tokenizer.run, tokenizer_inbox, to_validation)
        tasks.start_soon(validation.run, validation_inbox, to_backend)
    return to_tokenizer, backend_inbox


def _model_fields(model: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """Return the fields of an engine that come from its model."""
    return {
        "model_name": model.name,
        "tokenizer": model.tokenizer,
        "generation": model.generation,
        "task": model.task,
        "embedding": model.embedding or DecoderEmbedding(),
        "reads_images": model.reads("image", config),
        "reads_audio": model.reads("audio", config),
    }


def _report(engine: RequestEngine) -> str:
    """Return the beginning of a dump of tasks."""
    state = engine.statistics().summary()
    lag = engine.metrics.loop_lag.peak
    return f"engine {engine.model_name}\n{state}\nevent loop's worst recent lag: {lag:.3f} s"

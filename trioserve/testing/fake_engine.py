"""A whole engine over a fake worker, without a process, a socket or a model.

This is for tests, trioserve's own and users'. Tokenizer, scheduler, detokenizer and supervisor are
the real ones. The worker is a :class:`~trioserve.testing.FakeWorker`, and its link is two memory
channels. All waiting uses trio's clock, so a test on a virtual clock takes no time and always runs
in the same order::

    async def test_my_app(autojump_clock):
        async with open_fake_engine() as engine:
            completion = await engine.complete("hello", max_tokens=5)
            assert completion.finish_reason == "length"
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import tokenizers
import trio
from tokenizers import decoders, models, pre_tokenizers

from trioserve._util.exception_groups import sole_exception
from trioserve.config import EngineConfig
from trioserve.engine.engine import Engine
from trioserve.engine.engine_worker import EngineWorker, MakeWorker
from trioserve.engine.loaded_model import LoadedModel, chosen_generation_config
from trioserve.engine.nursery import run_engine
from trioserve.model_files import EncoderConfig
from trioserve.model_files.encoder_files import ModelTask
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.observability.metrics import Metrics
from trioserve.pooling.inputs import TextEncoder
from trioserve.protocol import wire
from trioserve.protocol.errors import WorkerLost
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config
from trioserve.testing.fake_loop import serve_fake
from trioserve.testing.fake_worker import FakeWorker
from trioserve.testing.memory_link import memory_link_pair
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.encoder_tokenizer import EncoderTokenizer
from trioserve.text.tokenizer import Tokenizer
from trioserve.workers import Link
from trioserve.workers.supervisor import OpenWorker

FAKE_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer of 256 tokens, one for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@contextlib.asynccontextmanager
async def open_fake_engine(
    make_worker: Callable[[], FakeWorker] = FakeWorker,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    eos_token_ids: tuple[int, ...] = (),
    generation_defaults: dict[str, Any] | None = None,
    open_worker: OpenWorker | None = None,
    worker_maker: Callable[[EngineConfig, Metrics], MakeWorker] | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """Open an engine with a fake model called ``fake`` for the block.

    Args:
        make_worker: Makes the first worker and, after each death, the next one.
        tokenizer: A tokenizer with at least the worker's vocabulary (default:
            :func:`byte_tokenizer`).
        eos_token_ids: Tokens that end a sequence.
        generation_defaults: Default sampling parameters, as in ``generation_config.json``.
        open_worker: Context manager that runs one worker; it replaces ``make_worker``. Usually a
            wrapper of :func:`run_fake_worker`.
        worker_maker: Returns the function that makes the worker of each number. It replaces
            ``open_worker`` where several workers aren't alike.
        options: Fields of :class:`~trioserve.EngineConfig`.

    Raises:
        EngineError: The engine failed, as in :func:`trioserve.open_engine`.
    """
    config = EngineConfig("fake", **options)
    model = LoadedModel(
        name="fake",
        tokenizer=Tokenizer(tokenizer or byte_tokenizer(), ChatTemplate(FAKE_CHAT_TEMPLATE)),
        eos_token_ids=eos_token_ids,
        generation=chosen_generation_config(
            GenerationConfig(sampling=generation_defaults or {}), config
        ),
    )
    metrics = Metrics(model.name, config.metrics_prefix)
    if worker_maker is not None:
        make = worker_maker(config, metrics)
    else:
        opened = open_worker or (lambda: run_fake_worker(make_worker(), config))
        make = _worker_maker(config, metrics, opened)
    async with run_engine(config, model, make, metrics) as engine:
        yield engine


def _worker_maker(config: EngineConfig, metrics: Metrics, opened: OpenWorker) -> MakeWorker:
    return lambda index, device=None: EngineWorker.of(index, config, metrics, opened)


@contextlib.asynccontextmanager
async def open_fake_encoder(
    task: ModelTask = "embed",
    *,
    make_worker: Callable[[], FakeWorker] | None = None,
    encoder_config: EncoderConfig | None = None,
    open_worker: OpenWorker | None = None,
    **options: Any,
) -> AsyncIterator[Engine]:
    """Open an engine with a fake encoder called ``fake`` for the block.

    Args:
        task: ``embed`` or ``classify``.
        make_worker: Makes workers (default: :func:`~trioserve.testing.fake_encoder.fake_encoder`).
        encoder_config: The model's configuration (default: of
            :func:`~trioserve.testing.fake_encoder.fake_encoder_config`).
        open_worker: As for :func:`open_fake_engine`.
        options: Fields of :class:`~trioserve.EngineConfig`.
    """
    shape = encoder_config or fake_encoder_config(task)
    config = EngineConfig("fake", **options)
    make_fake = make_worker or (lambda: fake_encoder(shape))
    metrics = Metrics("fake", config.metrics_prefix)
    opened = open_worker or (lambda: run_fake_worker(make_fake(), config))
    model = fake_encoder_model(shape)
    make = _worker_maker(config, metrics, opened)
    async with run_engine(config, model, make, metrics) as engine:
        yield engine


def fake_encoder_model(shape: EncoderConfig) -> LoadedModel:
    """Return the loaded model of an encoder of that ``shape``."""
    backend = byte_tokenizer()
    return LoadedModel(
        name="fake",
        tokenizer=Tokenizer(backend),
        eos_token_ids=(),
        task=shape.task,
        encoder=TextEncoder(shape, EncoderTokenizer(backend, shape), shape.max_length),
    )


@contextlib.asynccontextmanager
async def run_fake_worker(
    worker: FakeWorker, config: EngineConfig, *, killed: trio.Event | None = None
) -> AsyncIterator[tuple[Link, wire.Ready]]:
    """Run a fake worker for the block. If it dies, the block is cancelled.

    Args:
        worker: The worker.
        config: The engine's configuration, which limits the worker.
        killed: Event that kills the worker when it is set.

    Raises:
        WorkerLost: The worker died.
    """
    ready = _within(worker.ready(), config)
    engine_side, worker_side = memory_link_pair()
    lost = False

    async def serve(scope: trio.CancelScope) -> None:
        nonlocal lost
        with trio.CancelScope() as life:
            if killed is not None:
                nursery.start_soon(_cancel_when_set, killed, life)
            await serve_fake(worker, worker_side)
        lost = True
        scope.cancel()

    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, nursery.cancel_scope)
            yield engine_side, ready
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = sole_exception(group)
    if lost and (error is None or isinstance(error, WorkerLost)):
        # The block noticed only that the link is closed.
        from_outside = killed is not None and killed.is_set()
        raise WorkerLost("the fake worker ended", from_outside=from_outside)
    if error is not None:
        raise error


async def _cancel_when_set(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


def _within(ready: wire.Ready, config: EngineConfig) -> wire.Ready:
    """Return ``ready`` within the limits that the engine sends at the start."""
    asked = {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
    }
    bounds = {
        name: min(getattr(ready, name), bound) for name, bound in asked.items() if bound is not None
    }
    return attrs.evolve(ready, **bounds)

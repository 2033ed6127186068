"""A deadline ends a request in whatever stage it is, embedded and over HTTP, on a virtual clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from tests.support.asgi_client import Answer, ask
from trioserve import DeadlineExceeded, Engine, EngineConfig
from trioserve.config import ServerConfig
from trioserve.http import create_app
from trioserve.http.api.app import App
from trioserve.http.api.openai.chat.preparation import ChatPreparation
from trioserve.protocol import wire
from trioserve.protocol.grammar import Grammar
from trioserve.requests.request import State
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker
from trioserve.text.tokenizer_task import TokenizerTask
from trioserve.workers import Link

Clock = trio.testing.MockClock

COMPLETIONS = "/v1/completions"
LIMIT = 5.0


@attrs.frozen
class Stage:
    """A stage of a request: the engine that holds it there, its other work, and the request.

    ``begun`` says whether a streaming response has begun by then.
    """

    name: str
    state: State
    body: dict[str, Any]
    begun: bool
    engine: dict[str, Any] = attrs.field(factory=dict)
    worker: Callable[[], FakeWorker] = FakeWorker
    before: dict[str, Any] | None = None
    """A request that keeps the engine busy for ever."""


def _prepares_for_ever(_: Any) -> Any:
    raise AssertionError("nobody waits for so long")


SHORT: dict[str, Any] = {"prompt": "hello", "max_tokens": 10, "ignore_eos": True}
STAGES = [
    Stage("tokenizing", State.TOKENIZING, {**SHORT, "prompt": "x" * 5000}, begun=False),
    Stage(
        "preparing",
        State.TOKENIZING,
        {**SHORT, "regex": "a+"},
        begun=False,
        engine={"grammar_timeout": 1000},
        worker=lambda: FakeWorker(call_time=1000, calls={"prepare": _prepares_for_ever}),
    ),
    Stage(
        "waiting",
        State.WAITING,
        SHORT,
        begun=True,
        engine={"max_num_seqs": 1},
        worker=lambda: FakeWorker(step_time=0.1),
        before={**SHORT, "max_tokens": 1500},
    ),
    Stage(
        "prefill",
        State.PREFILL,
        {**SHORT, "prompt": [1] * 1000},
        begun=True,
        engine={"max_num_batched_tokens": 10},
        worker=lambda: FakeWorker(step_time=1.0),
    ),
    Stage(
        "decode",
        State.DECODE,
        {**SHORT, "max_tokens": 1000},
        begun=True,
        worker=lambda: FakeWorker(step_time=0.1),
    ),
]
each_stage = pytest.mark.parametrize("stage", STAGES, ids=[stage.name for stage in STAGES])


@contextlib.contextmanager
def stuck_threads(engine: Engine) -> Iterator[None]:
    """Encoding of long texts takes for ever, as long as the block lasts."""
    release = threading.Event()

    def encode(_task: TokenizerTask, requests: Any) -> Any:
        release.wait(30)
        return [([1], []) for _ in requests]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenizerTask, "_encode_all", encode)
        try:
            yield
        finally:
            release.set()


@contextlib.asynccontextmanager
async def busy_engine(stage: Stage, **options: Any) -> AsyncIterator[Engine]:
    """Open an engine on which the stage's request gets no further than it."""
    async with open_fake_engine(stage.worker, **stage.engine, **options) as engine:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(stuck_threads(engine))
            if stage.before is not None:
                generation = engine.generate(timeout=float("inf"), **stage.before)
                running = await stack.enter_async_context(generation)
                await running.receive()
            yield engine
        await trio.sleep(2000)
        engine.check_integrity()
        statistics = engine.statistics()
        assert statistics.num_streams == statistics.num_tokenizing == 0
        scheduler = statistics.scheduler
        assert scheduler.num_running == scheduler.num_waiting == scheduler.pages_held == 0


def app_over(engine: Engine) -> App:
    return create_app(engine, ServerConfig(engine=EngineConfig("fake")))


def engine_words(body: dict[str, Any]) -> dict[str, Any]:
    fields = dict(body)
    if "regex" in fields:
        fields["grammar"] = Grammar("regex", fields.pop("regex"))
    return fields


async def watch(engine: Engine, number: int, at: float) -> State:
    """Return the state, at a moment, of the ``number``-th open request."""
    await trio.sleep_until(at)
    return list(engine._open)[number].sequences[0].state


@each_stage
@pytest.mark.parametrize("own", [True, False])
async def test_embedded(autojump_clock: Clock, stage: Stage, own: bool) -> None:
    options = {} if own else {"default_timeout": LIMIT}
    async with busy_engine(stage, **options) as engine:
        start = trio.current_time()
        fields = engine_words(stage.body) | ({"timeout": LIMIT} if own else {})
        message = "timeout of 5 s ran out" if own else r"took longer than 5 s \(--default-timeout\)"
        states: list[State] = []

        async def look() -> None:
            number = 1 if stage.before else 0
            states.append(await watch(engine, number, start + LIMIT - 0.01))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            with pytest.raises(DeadlineExceeded, match=message):
                await engine.complete(**fields)
        assert states == [stage.state]
        assert trio.current_time() - start == pytest.approx(LIMIT)


@each_stage
@pytest.mark.parametrize("streams", [True, False])
async def test_over_http(autojump_clock: Clock, stage: Stage, streams: bool) -> None:
    async with busy_engine(stage) as engine:
        start = trio.current_time()
        body = {**stage.body, "timeout": LIMIT, "stream": streams}
        answer = await ask(app_over(engine), COMPLETIONS, body)
        assert trio.current_time() - start == pytest.approx(LIMIT)
        assert answer.complete
        if stage.begun and streams:
            assert answer.status == 200
            error = answer.events[-1]["error"]
        else:
            assert answer.status == 504
            error = answer.error
        assert error["code"] == "deadline_exceeded"
        assert error["type"] == "timeout_error"
        assert error["message"] == "the request's timeout of 5 s ran out"


async def test_a_worker_that_is_being_replaced_stops_no_clock(autojump_clock: Clock) -> None:
    def dies(step: int, _: wire.Plan) -> None:
        if step == 5:
            raise WorkerDies

    config = EngineConfig("fake")
    started: list[FakeWorker] = []

    @contextlib.asynccontextmanager
    async def open_worker() -> AsyncIterator[tuple[Link, wire.Ready]]:
        if started:
            await trio.sleep(1000)
        started.append(FakeWorker(step_time=0.1, script=FakeWorker.script if started else dies))
        async with run_fake_worker(started[-1], config) as worker:
            yield worker

    async with open_fake_engine(open_worker=open_worker) as engine:
        for streams in (False, True):
            start = trio.current_time()
            body = {**SHORT, "max_tokens": 1000, "timeout": LIMIT, "stream": streams}
            answer = await ask(app_over(engine), COMPLETIONS, body)
            assert trio.current_time() - start == pytest.approx(LIMIT)
            assert not engine.healthy
            assert answer.status == (200 if streams else 504)
            error = answer.events[-1]["error"] if streams else answer.error
            assert error["code"] == "deadline_exceeded"
        await trio.sleep(2000)
        assert engine.healthy
        engine.check_integrity()
        assert engine.statistics().num_streams == 0


async def test_a_slow_reader_is_not_waited_for(autojump_clock: Clock) -> None:
    async with open_fake_engine(lambda: FakeWorker(step_time=0.1)) as engine:
        with pytest.raises(DeadlineExceeded):
            async with engine.generate(**SHORT, timeout=LIMIT):
                await trio.sleep(1000)
        assert trio.current_time() == pytest.approx(LIMIT)
        answer = Answer()
        body = {**SHORT, "timeout": LIMIT, "stream": True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: ask(app_over(engine), COMPLETIONS, body, answer=answer, reads_after=4)
            )
            await trio.sleep(LIMIT + 0.1)
            assert engine.statistics().num_streams == 0
        assert answer.events[-1]["error"]["code"] == "deadline_exceeded"
        engine.check_integrity()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("entering", [True, False])
async def test_a_batch_ends_as_a_whole(
    autojump_clock: Clock, streams: bool, entering: bool
) -> None:
    """While some of its prompts are being tokenized, or while some of them wait."""
    async with open_fake_engine(lambda: FakeWorker(step_time=0.1), max_num_seqs=2) as engine:
        prompts = ["a", "x" * 5000 if entering else "b", "c", "d"]
        body = {**SHORT, "prompt": prompts, "max_tokens": 200, "timeout": LIMIT, "stream": streams}
        with stuck_threads(engine):
            answer = await ask(app_over(engine), COMPLETIONS, body)
        assert trio.current_time() == pytest.approx(LIMIT)
        assert answer.status == (200 if streams and not entering else 504)
        error = answer.error if answer.status == 504 else answer.events[-1]["error"]
        assert error["code"] == "deadline_exceeded"
        await trio.sleep(10)
        engine.check_integrity()
        assert engine.statistics().num_streams == 0


async def test_time_counts_from_the_request_s_arrival(autojump_clock: Clock) -> None:
    """And not from when its body has come, or its grammar has been made of several."""
    async with open_fake_engine(lambda: FakeWorker(step_time=0.1)) as engine:
        arrived = trio.current_time()
        await trio.sleep(3)
        with pytest.raises(DeadlineExceeded, match="timeout of 5 s"):
            await engine.complete(**{**SHORT, "max_tokens": 500}, timeout=LIMIT, arrived=arrived)
        assert trio.current_time() == pytest.approx(arrived + LIMIT)
        with pytest.raises(DeadlineExceeded):
            await engine.complete(**SHORT, timeout=LIMIT, arrived=arrived)
        assert trio.current_time() == pytest.approx(arrived + LIMIT)


async def test_what_comes_before_and_after_the_engine_counts_too(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def for_ever(*_: Any) -> Any:
        await trio.sleep_forever()

    async with open_fake_engine() as engine:
        app = app_over(engine)
        for module in ("openai.chat", "openai.completions", "sglang"):
            monkeypatch.setattr(f"trioserve.http.api.{module}.endpoint.run_if_long", for_ever)
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        native = {"text": "x", "sampling_params": {"max_new_tokens": 3}}
        for path, body in (
            (COMPLETIONS, SHORT),
            ("/v1/chat/completions", chat),
            ("/generate", native),
        ):
            start = trio.current_time()
            answer = await ask(app, path, {**body, "timeout": LIMIT})
            assert trio.current_time() - start == pytest.approx(LIMIT)
            assert answer.status == 504
            assert answer.error["code"] == "deadline_exceeded"
        monkeypatch.setattr(ChatPreparation, "_constrain", for_ever)
        for streams in (True, False):
            body = {**chat, "timeout": LIMIT, "stream": streams}
            answer = await ask(app, "/v1/chat/completions", body)
            assert answer.status == 504


async def test_the_default_is_no_bound_on_what_a_request_names(autojump_clock: Clock) -> None:
    worker = lambda: FakeWorker(step_time=0.1)  # noqa: E731
    async with open_fake_engine(worker, default_timeout=2.0) as engine:
        app = app_over(engine)
        body = {**SHORT, "max_tokens": 50}
        answer = await ask(app, COMPLETIONS, body)
        assert answer.status == 504
        assert answer.error["message"] == (
            "the request took longer than 2 s (--default-timeout), and named no timeout of its own"
        )
        assert (await ask(app, COMPLETIONS, {**body, "timeout": 60})).status == 200
        assert (await ask(app, COMPLETIONS, {**body, "timeout": 1})).status == 504
        assert (await engine.complete(**body, timeout=float("inf"))).finish_reason == "length"

"""An engine without a model: what a prompt says is what happens. And clients for tests of HTTP."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any, cast
from unittest import mock

import attrs
import httpx
import msgspec
import trio
from quart.routing import QuartRule
from quart_trio.testing import TrioClient

from trioserve.config import EngineConfig, ServerConfig
from trioserve.engine.engine import Engine
from trioserve.http import create_app
from trioserve.http.api.app import App
from trioserve.http.server.server import serve_app
from trioserve.model_files.generation_config import GenerationConfig
from trioserve.observability.metrics import Metrics
from trioserve.protocol.errors import Draining, RequestAborted, ShuttingDown
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.adapters import Adapter
from trioserve.requests.generation import GenerationStream
from trioserve.requests.logprobs import PromptLogprobs
from trioserve.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from trioserve.requests.request import Request, Times
from trioserve.requests.stream import Chunk, Stream, StreamBudget, TokenLogprob
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.text.chat_template import ChatTemplate

Step = Chunk | float | trio.Event | Exception
"""A chunk to give, seconds to wait (``math.inf``: for ever), what to wait for, or an error to
raise."""


class StubTokenizer:
    """Every character is a token, its code point the id."""

    vocab_size = 0x110000
    has_text = True

    def __init__(self, chat_template: str | None = None, tokens: dict[str, int] | None = None):
        self.chat_template = ChatTemplate(chat_template) if chat_template is not None else None
        self.tokens = tokens or {}
        self.special_ids = frozenset(self.tokens.values())

    def token_of(self, text: str) -> int | None:
        return self.tokens.get(text)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    async def render(self, prompt: ChatPrompt) -> str:
        assert self.chat_template is not None
        return self.chat_template.render(prompt)

    def decode(self, ids: Any, *, skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        return "".join(chr(token) for token in ids if token not in hidden)

    def incremental_decoder(self, prompt_ids: Any, **options: bool) -> Any:
        return StubDecoder()

    def token_bytes(self, token: int) -> bytes:
        return chr(token).encode()

    def token_text(self, token: int) -> str:
        return chr(token)


class StubDecoder:
    """Every token is a character at once."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def words(text: str, *, finish: str = "stop", stop_reason: int | str | None = None) -> list[Step]:
    """``text`` as a chunk per word, the last of them final."""
    parts = [part + " " for part in text.split(" ")]
    parts[-1] = parts[-1][:-1]
    chunks = [Chunk(part, tuple(ord(character) for character in part)) for part in parts]
    chunks[-1] = msgspec.structs.replace(chunks[-1], finish_reason=finish, stop_reason=stop_reason)
    return list(chunks)


def with_logprobs(chunk: Chunk, top: int) -> Chunk:
    """``chunk`` with made-up log-probabilities, the chosen token's first among the best."""
    entries = tuple(
        TokenLogprob(token, -0.5, chr(token), ((token, -0.5, chr(token)), (33, -1.5, "!"))[:top])
        for token in chunk.token_ids
    )
    return msgspec.structs.replace(chunk, logprobs=entries)


@attrs.define(eq=False)
class Call:
    """One ``generate`` and what became of it."""

    prompt: Prompt
    params: SamplingParams
    options: dict[str, Any]
    stream: ScriptedStream | None = None
    left: trio.Event = attrs.field(factory=trio.Event)
    scope_error: BaseException | None = None


class ScriptedStream(GenerationStream):
    """Gives the steps of a script."""

    def __init__(self, request: Request, script: list[Step]) -> None:
        super().__init__(request)
        self._script = deque(script)
        self._wake_at = 0.0
        self._aborted: Exception | None = None
        self._waiting = trio.CancelScope()

    def abort(self, error: Exception) -> None:
        """Give nothing more but ``error``."""
        self._aborted = error
        self._waiting.cancel()

    async def receive(self) -> Chunk:
        while self._script or self._aborted is not None:
            if self._aborted is not None:
                raise self._aborted
            step = self._script[0]
            if isinstance(step, float):
                # A later call after a cancellation waits for the same moment.
                self._wake_at = self._wake_at or trio.current_time() + step
                with trio.CancelScope() as self._waiting:
                    await trio.sleep_until(self._wake_at)
                self._wake_at = 0.0
                self._script.popleft()
                continue
            if isinstance(step, trio.Event):
                with trio.CancelScope() as self._waiting:
                    await step.wait()
                    self._script.popleft()
                continue
            self._script.popleft()
            if isinstance(step, Exception):
                raise step
            await trio.lowlevel.checkpoint()
            self._completion_tokens += len(step.token_ids)
            return step
        raise trio.EndOfChannel


@attrs.define(eq=False)
class StubEngine:
    """The parts of :class:`~trioserve.engine.engine.Engine` that HTTP uses, with scripted outputs.

    ``script(call)`` gives the steps of an output; ``admit(call)`` is awaited before admission and
    may raise.
    """

    script: Callable[[Call], list[Step]] = lambda call: words("Hello there !")
    admit: Callable[[Call], Any] | None = None
    config: EngineConfig = attrs.field(factory=lambda: EngineConfig("stub"))
    model_name: str = "stub"
    max_model_len: int = 2048
    max_num_queued_tokens: int = 2 << 20
    vocab_size: int = 0x110000
    tokenizer: StubTokenizer = attrs.field(factory=StubTokenizer)
    metrics: Metrics = attrs.field(factory=lambda: Metrics("stub"))
    eos_token_ids: tuple[int, ...] = (0,)
    generation_defaults: dict[str, Any] = attrs.field(factory=dict)
    generation: GenerationConfig = attrs.field(factory=GenerationConfig)
    adapters: tuple[Adapter, ...] = ()
    reads_images: bool = False
    reads_audio: bool = False
    prompt_logprobs: Callable[[Call], PromptLogprobs | None] = lambda call: None
    calls: list[Call] = attrs.field(factory=list)
    healthy: bool = True
    draining: bool = False
    stalled: bool = False

    def drain(self) -> None:
        self.draining = True
        self.healthy = False

    def abort_all(self, error: RequestAborted) -> None:
        for call in self.calls:
            if call.stream is not None:
                call.stream.abort(error)

    def check_room(self, tenant: str = "") -> None:
        """There always is."""

    def statistics(self) -> Any:
        raise NotImplementedError("the stub has no scheduler to count")

    def generate(
        self, prompt: Prompt, params: SamplingParams, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[GenerationStream]:
        call = Call(prompt, params, options)
        self.calls.append(call)
        return self._generation(call)

    @contextlib.asynccontextmanager
    async def _generation(self, call: Call) -> AsyncIterator[GenerationStream]:
        try:
            if self.draining:
                raise Draining("the server is shutting down")
            await trio.lowlevel.checkpoint()
            if self.admit is not None:
                await self.admit(call)
            call.stream = ScriptedStream(self._request(call), self.script(call))
            yield call.stream
        except BaseException as error:
            call.scope_error = error
            raise
        finally:
            call.left.set()

    def _request(self, call: Call) -> Request:
        return Request(
            id=call.options["request_id"],
            prompt=call.prompt,
            params=call.params,
            stream=Stream(StreamBudget(1 << 20, 1 << 20)),
            times=Times(arrived=trio.current_time()),
            prompt_ids=_prompt_ids(call.prompt, self.tokenizer)[
                -max(call.params.truncate_prompt_tokens or 0, 0) :
            ],
            num_cached_tokens=1,
            prompt_logprobs=self.prompt_logprobs(call),
        )


def _prompt_ids(prompt: Prompt, tokenizer: StubTokenizer) -> list[int]:
    if isinstance(prompt, TokensPrompt):
        return list(prompt.token_ids)
    if isinstance(prompt, TextPrompt):
        return [ord(character) for character in prompt.text]
    assert isinstance(prompt, ChatPrompt)
    if tokenizer.chat_template is not None:
        return [ord(character) for character in tokenizer.chat_template.render(prompt)]
    return [0] * len(prompt.messages)


def as_engine(stub: StubEngine) -> Engine:
    """Return the stub as an engine."""
    return cast(Engine, stub)


def server_config(**options: Any) -> ServerConfig:
    """Options of a server on a free port of this machine."""
    return ServerConfig(**{"engine": EngineConfig("stub"), "port": 0, **options})


def app_of(stub: StubEngine, **options: Any) -> App:
    """Return the application over a stub.

    werkzeug compiles functions that build URLs of its routes. No route builds any, and they take
    most of the time in which an application is made.
    """
    with mock.patch.object(QuartRule, "_compile_builder", return_value=lambda *_: None):
        return create_app(as_engine(stub), server_config(**options))


def client_of(stub: StubEngine, **options: Any) -> TrioClient:
    """Return a client that calls the application without a socket."""
    return cast(TrioClient, app_of(stub, **options).test_client())


async def post(stub: StubEngine, path: str, **body: Any) -> Any:
    """Return the decoded answer to a request that must succeed."""
    response = await client_of(stub).post(path, json=body)
    assert response.status_code == 200, await response.get_data(True)
    return json.loads(await response.get_data(True))


async def events(stub: StubEngine, path: str, **body: Any) -> list[Any]:
    """Return the decoded data of a stream's events; assert that it ends as it should."""
    response = await client_of(stub).post(path, json={**body, "stream": True})
    assert response.status_code == 200, await response.get_data(True)
    assert response.content_type == "text/event-stream"
    *parts, done, rest = (await response.get_data(True)).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@contextlib.asynccontextmanager
async def served(stub: StubEngine, **options: Any) -> AsyncIterator[str]:
    """Yield the URL of a real server over the stub. The server is cancelled at the end."""
    config = server_config(**options)
    async with trio.open_nursery() as nursery:
        app = create_app(as_engine(stub), config)
        (url,) = await nursery.start(serve_app, app, config)
        yield url
        nursery.cancel_scope.cancel()


@attrs.define(eq=False)
class Running:
    """A server that a test can drain."""

    url: str
    shutdown: trio.Event
    ended: trio.Event
    stub: StubEngine
    num_cut: int | None = None


@contextlib.asynccontextmanager
async def running(stub: StubEngine, **options: Any) -> AsyncIterator[Running]:
    config = server_config(**options)
    server = Running("", trio.Event(), trio.Event(), stub)
    app = create_app(as_engine(stub), config)

    async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
        server.num_cut = await serve_app(
            app,
            config,
            shutdown=server.shutdown,
            on_drain=stub.drain,
            on_cut=lambda: stub.abort_all(ShuttingDown("time is up")),
            task_status=task_status,
        )
        server.ended.set()

    async with trio.open_nursery() as nursery:
        (server.url,) = await nursery.start(run)
        yield server
        nursery.cancel_scope.cancel()


def http_client(url: str, **options: Any) -> httpx.AsyncClient:
    """Return a client of a real server."""
    options = {"verify": _authorities(), **options}
    return httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, **options)


@cache
def _authorities() -> ssl.SSLContext:
    """Return the context that each client would make, which takes it 17 ms."""
    return httpx.create_ssl_context(trust_env=False)


class _Capture(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None) or record.getMessage()
        fields = getattr(record, "fields", {})
        entry = {"event": event, "level": record.levelname, **fields}
        if record.exc_info:
            entry["error"] = record.exc_info[1]
        self.entries.append(entry)


@contextlib.contextmanager
def captured_logs() -> Iterator[list[dict[str, Any]]]:
    """Yield the log lines of the HTTP side during the block, as dictionaries."""
    logger = logging.getLogger("trioserve.http")
    handler, level, propagate = _Capture(), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield handler.entries
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


async def standstill(stub: StubEngine, count: int = 1) -> list[int]:
    """Wait until ``count`` generations have given something and nothing more is taken of any, as
    when what the system buffers is full; the tokens that each has given."""
    produced: list[int] = []
    while True:
        before = produced
        streams = [call.stream for call in stub.calls]
        produced = [stream.usage.completion_tokens if stream else 0 for stream in streams]
        if len(produced) == count and all(produced) and produced == before:
            return produced
        await trio.sleep(0.3)


async def connect(url: str) -> trio.SocketStream:
    """Return a raw connection to a real server."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return await trio.open_tcp_stream(host, int(port))


def raw_request(body: bytes, *, path: str = "/v1/chat/completions", close: bool = False) -> bytes:
    """Return a POST as bytes."""
    connection = b"Connection: close\r\n" if close else b""
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n%b"
        b"Content-Length: %d\r\n\r\n%b" % (path.encode(), connection, len(body), body)
    )


async def read_until(client: trio.SocketStream, wanted: bytes) -> bytes:
    """Everything up to and with ``wanted``."""
    data = b""
    while wanted not in data:
        part = await client.receive_some()
        assert part, f"the server closed after {data!r}"
        data += part
    return data


async def check_leaving(path: str, body: dict[str, Any], *, first: bytes | None) -> None:
    """Assert that a client which closes its connection ends its request, and that the log says so.

    Args:
        path: where it posts.
        body: what.
        first: what it reads before it leaves; None to leave once the request is known.
    """
    stub = StubEngine(script=lambda _: [Chunk("a", (97,)), math.inf])
    with captured_logs() as logs:
        async with served(stub) as url:
            client = await connect(url)
            await client.send_all(raw_request(json.dumps(body).encode(), path=path))
            if first is not None:
                await read_until(client, first)
            while not stub.calls:
                await trio.sleep(0.01)
            await client.aclose()
            with trio.fail_after(60):
                await stub.calls[0].left.wait()
                while not logs:
                    await trio.sleep(0.01)
    assert isinstance(stub.calls[0].scope_error, trio.Cancelled)
    assert (logs[0]["status"], logs[0]["reason"]) == (499, "client_disconnected")


async def read_to_end(client: trio.SocketStream) -> bytes:
    data = b""
    with contextlib.suppress(trio.BrokenResourceError):
        while part := await client.receive_some():
            data += part
    return data


@contextlib.asynccontextmanager
async def serving_fake_engine(
    **options: Any,
) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    """Serve a fake engine over HTTP for the block; yield it and a client."""
    config = server_config()
    async with open_fake_engine(**options) as engine, trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_app, create_app(engine, config), config)
        async with http_client(url) as client:
            yield engine, client
        nursery.cancel_scope.cancel()

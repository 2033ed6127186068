"""HTTP over the whole engine, with a fake worker in place of the process: nothing is scripted."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.http_stub import captured_logs, connect, http_client, raw_request, server_config
from trioserve import Engine, EngineConfig
from trioserve.http import create_app, serve_app
from trioserve.protocol import wire
from trioserve.testing import FakeWorker, WorkerDies
from trioserve.testing.fake_engine import open_fake_engine, run_fake_worker
from trioserve.workers import Link

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"


@attrs.define(eq=False)
class Site:
    """A running server, its engine and a client."""

    engine: Engine
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def idle(self) -> None:
        """Wait until the engine has nothing to do; then look for leftovers."""
        with trio.fail_after(20):
            while not self._is_idle():
                await trio.sleep(0.005)
        self.engine.check_integrity()

    def _is_idle(self) -> bool:
        statistics = self.engine.statistics()
        scheduler = statistics.scheduler
        busy = (
            *(statistics.num_streams, statistics.num_tokenizing, statistics.stream_bytes),
            *(scheduler.num_running, scheduler.num_waiting, scheduler.plans_in_flight),
            scheduler.pages_held,
        )
        return not any(busy)


@contextlib.asynccontextmanager
async def site(
    make_worker: Callable[[], FakeWorker] = FakeWorker,
    server: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Site]:
    async with open_fake_engine(make_worker, **options) as engine:
        config = server_config(**(server or {}))
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(serve_app, create_app(engine, config), config)
            async with http_client(url) as client:
                yield Site(engine, url, client)
            nursery.cancel_scope.cancel()


def slow(seconds: float, **fields: Any) -> Callable[[], FakeWorker]:
    return lambda: FakeWorker(step_time=seconds, **fields)


def streamed_text(response: httpx.Response) -> str:
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n")[:-2]]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


async def test_streaming_or_not_gives_what_the_engine_gives() -> None:
    async with site(slow(0.001)) as server:
        fields = {"max_tokens": 30, "seed": 3}
        expected = await server.engine.complete("hello", **fields)
        whole = await server.post(TEXT, prompt="hello", **fields)
        assert whole.json()["choices"][0]["text"] == expected.text
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        stream = await server.post(TEXT, prompt="hello", stream=True, **fields)
        assert streamed_text(stream) == expected.text
        sampling = {"max_new_tokens": 30, "sampling_seed": 3}
        native = await server.post("/generate", text="hello", sampling_params=sampling)
        assert native.json()["output_ids"] == list(expected.token_ids)
        chat = await server.engine.complete([{"role": "user", "content": "hi"}], **fields)
        reply = await server.post(CHAT, messages=[{"role": "user", "content": "hi"}], **fields)
        assert reply.json()["choices"][0]["message"]["content"] == chat.text
        assert reply.json()["usage"]["prompt_tokens"] == chat.usage.prompt_tokens
        await server.idle()


async def test_a_batch_gives_what_its_prompts_give_alone() -> None:
    async with site() as server:
        prompts = ["one", "two", "three"]
        fields = {"max_tokens": 8, "seed": 1, "logprobs": 2}
        alone = [await server.engine.complete(prompt, **fields) for prompt in prompts]
        together = (await server.post(TEXT, prompt=prompts, **fields)).json()
        assert [choice["text"] for choice in together["choices"]] == [each.text for each in alone]
        columns = together["choices"][1]["logprobs"]
        assert len(columns["tokens"]) == 8
        assert together["usage"]["completion_tokens"] == 24
        await server.idle()


@pytest.mark.parametrize("leave", ["close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["waiting", "prefill", "decode"])
async def test_a_client_that_leaves_takes_its_request_along(
    stage: str, stream: bool, leave: str
) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    async with site(slow(0.02), **options) as server, contextlib.AsyncExitStack() as stack:
        if stage == "waiting":
            blocker = server.engine.generate("block", max_tokens=2000)
            await stack.enter_async_context(blocker)
        prompt = "x" * (1000 if stage == "prefill" else 5)
        body = json.dumps({"prompt": prompt, "max_tokens": 900, "stream": stream}).encode()
        client = await connect(server.url)
        await client.send_all(raw_request(body, path=TEXT))
        await _reach(server.engine, stage)
        if leave == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.socket.close()
        if stage == "waiting":
            with trio.fail_after(20):
                while server.engine.statistics().scheduler.num_waiting:
                    await trio.sleep(0.005)
            assert server.engine.statistics().num_streams == 1
        await stack.aclose()
        await server.idle()
        # It was not served to its end.
        assert set(server.engine.metrics.finished) == {"abort"}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_its_text_is_encoded(stream: bool) -> None:
    """Drop the result of a thread that can't be stopped."""
    go_on = threading.Event()
    async with site(slow(0.0)) as server:
        engine = server.engine
        encode = engine.tokenizer.encode

        def encode_later(text: str, **options: bool) -> list[int]:
            assert go_on.wait(60)
            return encode(text, **options)

        engine.tokenizer.encode = encode_later  # type: ignore[method-assign]
        body = json.dumps({"prompt": "x" * 2040, "max_tokens": 5, "stream": stream}).encode()
        client = await connect(server.url)
        await client.send_all(raw_request(body, path=TEXT))
        with trio.fail_after(20):
            while not engine.statistics().num_tokenizing:
                await trio.sleep(0.005)
        client.socket.close()
        await server.idle()
        go_on.set()
        engine.tokenizer.encode = encode  # type: ignore[method-assign]
        assert (await server.post(TEXT, prompt="hello", max_tokens=2)).status_code == 200
        await server.idle()
        assert engine.statistics().scheduler.num_tokens_sampled == 2


async def _reach(engine: Engine, stage: str) -> None:
    """Wait until the request is in its stage."""
    with trio.fail_after(20):
        while True:
            scheduler = engine.statistics().scheduler
            if stage == "waiting" and scheduler.num_waiting:
                return
            if stage == "prefill" and scheduler.num_running and scheduler.num_steps >= 2:
                assert scheduler.num_tokens_sampled == 0
                return
            if stage == "decode" and scheduler.num_tokens_sampled >= 3:
                return
            await trio.sleep(0.005)


class TestSlowReaders:
    """The worker takes no time, and log-probabilities make every token a few hundred bytes."""

    BODY = json.dumps(
        {"prompt": "x", "max_tokens": 4000, "stream": True, "logprobs": 20, "ignore_eos": True}
    ).encode()
    OPTIONS = {"max_stream_bytes": 20_000, "max_logprobs": 20}  # noqa: RUF012

    async def _stall(self, server: Site, buffer: int = 1 << 16) -> trio.SocketStream:
        """Return a client that doesn't read, once the engine has given it up."""
        client = await connect(server.url)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        await client.send_all(raw_request(self.BODY, path=TEXT, close=True))
        with trio.fail_after(60):
            while not server.engine.metrics.finished:
                await trio.sleep(0.01)
        return client

    async def test_one_that_comes_back_is_told(self) -> None:
        worker = slow(0.0, max_model_len=1 << 14, num_pages=1024)
        with captured_logs() as logs:
            async with site(worker, **self.OPTIONS) as server:
                client = await self._stall(server)
                data = b""
                while part := await client.receive_some(1 << 16):
                    data += part
                await client.aclose()
                await server.idle()
        assert b'"code":"slow_reader"' in data
        assert b"[DONE]" not in data
        (line,) = logs
        assert (line["status"], line["reason"]) == (200, "slow_reader")

    async def test_one_that_does_not_is_cut_off(self) -> None:
        worker = slow(0.0, max_model_len=1 << 14, num_pages=1024)
        with captured_logs() as logs:
            async with site(worker, {"send_timeout": 0.2}, **self.OPTIONS) as server:
                client = await self._stall(server, buffer=4096)
                await server.idle()
                while not logs:
                    await trio.sleep(0.01)
                await client.aclose()
        (line,) = logs
        assert (line["status"], line["reason"]) == (499, "slow_reader")


async def test_a_deadline() -> None:
    async with site(slow(0.01)) as server:
        fields = {"prompt": "x", "max_tokens": 1000, "timeout": 0.1}
        late = await server.post(TEXT, **fields)
        assert late.status_code == 504
        assert late.json()["error"]["type"] == "timeout_error"
        stream = await server.post(TEXT, stream=True, **fields)
        assert stream.status_code == 200
        last = json.loads(stream.text.split("\n\n")[-2].removeprefix("data: "))
        assert last["error"]["code"] == "deadline_exceeded"
        await server.idle()


async def test_a_full_queue() -> None:
    options = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    async with site(slow(0.01), **options) as server:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(server.engine.generate("run", max_tokens=500))
            await _reach(server.engine, "decode")
            await stack.enter_async_context(server.engine.generate("wait", max_tokens=500))
            refused = await server.post(TEXT, prompt="x")
            assert refused.status_code == 429
            assert refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        await server.idle()


@pytest.mark.parametrize(
    ("path", "fields", "param", "code"),
    [
        (TEXT, {"prompt": "x" * 3000}, None, "context_length_exceeded"),
        (TEXT, {"prompt": [300]}, "prompt", None),
        (TEXT, {"prompt": ""}, "prompt", None),
        (TEXT, {"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias", None),
        (TEXT, {"prompt": "x", "stop_token_ids": [999]}, "stop_token_ids", None),
        (TEXT, {"prompt": "x", "logprobs": 50}, "logprobs", None),
        ("/generate", {"input_ids": [300]}, "input_ids", None),
        ("/generate", {"text": ""}, "text", None),
    ],
)
async def test_what_the_engine_refuses(
    path: str, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    async with site() as server:
        for stream in (False, True):
            refused = await server.post(path, stream=stream, **fields)
            assert refused.status_code == 400
            error = refused.json()["error"]
            if param is not None:
                assert error["param"] == param
            if code is not None:
                assert error["code"] == code
        await server.idle()


async def test_draining() -> None:
    async with site() as server:
        server.engine.drain()
        assert (await server.post(TEXT, prompt="x")).status_code == 503
        health = await server.client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})


async def test_a_scrape() -> None:
    async with site() as server:
        await server.post(TEXT, prompt="hello", max_tokens=5)
        await server.idle()
        response = await server.client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain")
    lines = response.text.splitlines()
    labels = 'engine="0",finished_reason="length",model_name="fake"'
    for line in (
        f"trioserve:request_success_total{{{labels}}} 1.0",
        'trioserve:prompt_tokens_total{engine="0",model_name="fake"} 5.0',
        'trioserve:generation_tokens_total{engine="0",model_name="fake"} 5.0',
        'trioserve:num_requests_running{engine="0",model_name="fake"} 0.0',
        'trioserve:time_to_first_token_seconds_count{engine="0",model_name="fake"} 1.0',
        'trioserve:inter_token_latency_seconds_count{engine="0",model_name="fake"} 4.0',
        'trioserve:request_prompt_tokens_count{engine="0",model_name="fake"} 1.0',
        'trioserve:iteration_tokens_total_sum{engine="0",model_name="fake"} 10.0',
    ):
        assert line in lines
    assert any(line.startswith("trioserve:http_requests_total") for line in lines)


async def test_the_sleep_state_in_a_scrape() -> None:
    states = ("awake", "weights_offloaded", "discard_all")

    async def scraped(server: Site) -> list[str]:
        lines = (await server.client.get("/metrics")).text.splitlines()
        found = [line for line in lines if line.startswith("trioserve:engine_sleep_state")]
        return [line[-3:] for state in states for line in found if f'"{state}"' in line]

    async with site() as server:
        assert await scraped(server) == ["1.0", "0.0", "0.0"]
        await server.engine.release_memory()
        assert await scraped(server) == ["0.0", "1.0", "0.0"]
        await server.engine.resume_memory()
        assert await scraped(server) == ["1.0", "0.0", "0.0"]


async def test_a_stream_is_kept_alive_while_the_worker_is_replaced() -> None:
    """Send comments in the gap, and then the tokens that were to come."""
    body: dict[str, Any] = {"prompt": "A", "max_tokens": 40, "seed": 7, "stream": True}
    opened: list[None] = []
    commented = trio.Event()

    def die_once(step: int, _: wire.Plan) -> None:
        if step == 5 and len(opened) == 1:
            raise WorkerDies

    @contextlib.asynccontextmanager
    async def open_worker() -> AsyncIterator[tuple[Link, wire.Ready]]:
        if opened:
            await commented.wait()
        opened.append(None)
        async with run_fake_worker(FakeWorker(script=die_once), EngineConfig("fake")) as pair:
            yield pair

    def tokens_of(events: list[str]) -> str:
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])

    async with site() as calm:
        expected = (await calm.post(TEXT, **body)).text.strip().split("\n\n")
    server: dict[str, Any] = {"keep_alive_interval": 0.5}
    async with site(server=server, open_worker=open_worker) as here:
        text = ""
        async with here.client.stream("POST", TEXT, json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if text.count(": keep-alive\n\n") >= 3:
                    commented.set()
        assert here.engine.statistics().worker_restarts == 1
        before, *gap, after = text.strip().split(": keep-alive\n\n")
        assert before.startswith("data: ")
        assert set(gap) == {""}
        events = before.split("\n\n")[:-1] + after.split("\n\n")
        assert events[-1] == expected[-1] == "data: [DONE]"
        assert tokens_of(events[:-1]) == tokens_of(expected[:-1])
        await here.idle()

"""Spans: their contents and parents, and a collector that takes them or doesn't."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.support.http_stub import server_config
from tests.support.otlp_collector import collecting
from trioserve import Engine, InvalidRequest
from trioserve.cli.commands import main
from trioserve.http import create_app
from trioserve.observability import tracing
from trioserve.observability.tracing import ENDPOINT_VARIABLE, Tracing, open_tracing
from trioserve.protocol.errors import ContextTooLong, DeadlineExceeded
from trioserve.testing import FakeWorker
from trioserve.testing.fake_encoder import fake_encoder, fake_encoder_config
from trioserve.testing.fake_engine import open_fake_encoder, open_fake_engine

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


@attrs.define(eq=False)
class Traced:
    """An engine with its spans kept in memory."""

    engine: Engine
    exporter: InMemorySpanExporter

    def span(self) -> ReadableSpan:
        (span,) = self.exporter.get_finished_spans()
        return span

    def attributes(self) -> dict[str, Any]:
        return dict(self.span().attributes or {})


@contextlib.asynccontextmanager
async def traced(**options: Any) -> AsyncIterator[Traced]:
    async with open_fake_engine(lambda: FakeWorker(step_time=1.0), **options) as engine:
        yield keeping_spans(engine)


def keeping_spans(engine: Engine) -> Traced:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider.get_tracer("test"), "fake")
    engine.on_request_end = tracing.request_ended
    engine.pooling.on_end = tracing.texts_ended
    return Traced(engine, exporter)


async def test_a_span_says_what_vllms_says(autojump_clock: object) -> None:
    async with traced(max_num_seqs=1) as case:
        async with case.engine.generate("x", max_tokens=3) as first:
            await first.receive()
            await case.engine.complete(
                "hello", max_tokens=4, temperature=0.5, top_p=0.75, request_id="r1"
            )
        first_span, span = case.exporter.get_finished_spans()
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    latencies = {
        name.removeprefix("gen_ai.latency."): attributes.pop(name)
        for name in list(attributes)
        if name.startswith("gen_ai.latency.")
    }
    assert attributes == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.n": 1,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 4,
    }
    assert latencies == {
        "time_in_queue": pytest.approx(2),
        "time_to_first_token": pytest.approx(3),
        "time_in_model_prefill": pytest.approx(1),
        "time_in_model_decode": pytest.approx(3),
        "time_in_model_inference": pytest.approx(4),
        "e2e": pytest.approx(6),
    }
    page = (Path(__file__).parents[2] / "docs" / "observability.md").read_text("utf-8")
    for name in span.attributes or {}:
        assert f"`{name}`" in page or f"`.{name.rpartition('.')[2]}`" in page
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(6)
    assert first_span.context is not None
    assert span.context is not None
    assert first_span.context.trace_id != span.context.trace_id


async def test_a_span_is_its_callers_child(autojump_clock: object) -> None:
    async with traced() as case:
        await case.engine.complete(
            "x", max_tokens=1, traceparent=TRACEPARENT, tracestate="vendor=1,other=2"
        )
        span = case.span()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert dict(span.context.trace_state) == {"vendor": "1", "other": "2"}


async def test_the_caller_decides_what_is_sampled(autojump_clock: object) -> None:
    async with traced() as case:
        await case.engine.complete("x", max_tokens=1, traceparent=f"{TRACEPARENT[:-2]}00")
        assert case.exporter.get_finished_spans() == ()


@pytest.mark.parametrize("traceparent", ["nonsense", "00-0-0-01", "ff" + TRACEPARENT[2:], "é"])
async def test_a_context_that_makes_no_sense_is_none(
    autojump_clock: object, traceparent: str
) -> None:
    async with traced() as case:
        await case.engine.complete("x", max_tokens=1, traceparent=traceparent, tracestate="=,=")
        assert case.span().parent is None


async def test_several_outputs_are_one_span(autojump_clock: object) -> None:
    async with traced() as case:
        await case.engine.complete("hello", max_tokens=4, n=3)
        attributes = case.attributes()
    assert attributes["gen_ai.request.n"] == 3
    assert attributes["gen_ai.usage.num_sequences"] == 3
    assert attributes["gen_ai.usage.prompt_tokens"] == 5
    assert attributes["gen_ai.usage.completion_tokens"] == 12
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * 3


async def test_who_leaves_has_a_span_with_what_there_was(autojump_clock: object) -> None:
    async with traced() as case:
        async with case.engine.generate("hello", max_tokens=50) as stream:
            await stream.receive()
        span, attributes = case.span(), case.attributes()
    assert attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert attributes["gen_ai.usage.completion_tokens"] == 1
    assert span.status.status_code is StatusCode.UNSET


async def test_a_refused_request_has_a_span_with_the_errors_type(autojump_clock: object) -> None:
    async with traced(max_model_len=8) as case:
        with pytest.raises(ContextTooLong):
            await case.engine.complete("four words of text", max_tokens=4)
        span, attributes = case.span(), case.attributes()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes["error.type"] == span.status.description == "ContextTooLong"
    assert "gen_ai.latency.time_to_first_token" not in attributes


async def test_the_header_of_a_request_reaches_its_span(autojump_clock: object) -> None:
    async with traced() as case:
        client: Any = create_app(case.engine, server_config()).test_client()
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        response = await client.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers=headers
        )
        assert response.status_code == 200
        span = case.span()
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert dict(span.context.trace_state) == {"vendor": "1"}


async def test_texts_of_an_encoder_have_a_span(autojump_clock: object) -> None:
    def make() -> FakeWorker:
        return fake_encoder(fake_encoder_config(), call_time=2.0)

    async with open_fake_encoder(make_worker=make) as engine:
        case = keeping_spans(engine)
        client: Any = create_app(engine, server_config()).test_client()
        response = await client.post(
            "/v1/embeddings",
            json={"input": ["one", "two"], "request_id": "mine"},
            headers={"traceparent": TRACEPARENT, "tracestate": "vendor=1"},
        )
        assert response.status_code == 200
        span, attributes = case.span(), case.attributes()
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert dict(span.context.trace_state) == {"vendor": "1"}
        assert attributes == {
            "gen_ai.request.id": "embd-mine",
            "gen_ai.response.model": "fake",
            "gen_ai.response.finish_reasons": ("stop",),
            "gen_ai.usage.num_sequences": 2,
            "gen_ai.usage.prompt_tokens": 6,
            "gen_ai.usage.completion_tokens": 0,
            "gen_ai.latency.e2e": pytest.approx(2),
        }
        assert span.start_time is not None
        assert span.end_time is not None
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2)
        case.exporter.clear()
        for ask in (engine.embed("x", timeout=0.5), engine.embed("x" * 600)):
            with pytest.raises((DeadlineExceeded, ContextTooLong)):
                await ask
        late, long = case.exporter.get_finished_spans()
        assert late.status.description == "DeadlineExceeded"
        assert long.status.description == "ContextTooLong"
        case.exporter.clear()
        with trio.move_on_after(0.5):
            await engine.embed("x")
        assert case.attributes()["gen_ai.response.finish_reasons"] == ("abort",)
        assert case.span().status.status_code is StatusCode.UNSET


async def test_prompts_that_are_pooled_have_their_callers_trace(autojump_clock: object) -> None:
    async with traced() as case:
        await case.engine.embed(["one", "two"], traceparent=TRACEPARENT, request_id="mine")
        await case.engine.score_labels("x", "y", [1], traceparent=TRACEPARENT, request_id="mine")
        spans = case.exporter.get_finished_spans()
    names = [dict(span.attributes or {})["gen_ai.request.id"] for span in spans]
    assert sorted(names) == ["mine-0", "mine-0", "mine-1"]
    for span in spans:
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE_ID


async def send_one_span(endpoint: str | None) -> None:
    async with open_fake_engine() as engine, open_tracing(endpoint) as spans:
        spans.model_name = "fake"
        engine.on_request_end = spans.request_ended
        await engine.complete("hello", max_tokens=2, traceparent=TRACEPARENT)


def no_exporter_thread_is_left() -> bool:
    return not any(thread.name.startswith("OtelBatch") for thread in threading.enumerate())


class TestCollector:
    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The exporter itself waits longer for a collector than any of these tests may take."""
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")

    async def test_spans_are_sent_when_the_engine_closes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-key=secret")
        with collecting() as collector:
            await send_one_span(collector.url)
        assert no_exporter_thread_is_left()
        ((path, key, message),) = collector.requests
        assert (path, key) == ("/v1/traces", "secret")
        (resource_spans,) = message.resource_spans
        resource = {each.key: each.value for each in resource_spans.resource.attributes}
        assert resource["service.name"].string_value == "trioserve"
        ((span,),) = [scope.spans for scope in resource_spans.scope_spans]
        assert (span.name, span.trace_id.hex()) == ("llm_request", TRACE_ID)
        attributes = {each.key: each.value for each in span.attributes}
        assert attributes["gen_ai.usage.prompt_tokens"].int_value == 5
        assert attributes["gen_ai.response.model"].string_value == "fake"

    async def test_the_standard_variables_are_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with collecting() as collector:
            monkeypatch.setenv(ENDPOINT_VARIABLE, f"{collector.url}/other/path")
            monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
            await send_one_span(None)
        ((path, _, message),) = collector.requests
        assert path == "/other/path"
        resource = message.resource_spans[0].resource.attributes
        assert [e.value.string_value for e in resource if e.key == "service.name"] == ["mine"]

    async def test_one_that_refuses_harms_nobody_and_is_told_of(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        with collecting(status=400) as collector:
            await send_one_span(collector.url)
        assert len(collector.requests) == 1
        assert "Failed to export" in caplog.text
        assert no_exporter_thread_is_left()

    async def test_one_that_hangs_holds_nobody_up(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
        with collecting(hang=True) as collector, caplog.at_level(logging.WARNING):
            with trio.fail_after(30):
                await send_one_span(collector.url)
            assert "the last spans weren't taken in time" in caplog.text
            collector.released.set()
            with trio.fail_after(30):
                while not no_exporter_thread_is_left():
                    await trio.sleep(0.01)

    async def test_who_is_cancelled_waits_less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tracing, "FLUSH_SECONDS", math.inf)
        monkeypatch.setattr(tracing, "CANCELLED_FLUSH_SECONDS", 0.1)
        with collecting(hang=True) as collector, trio.fail_after(30):
            with trio.CancelScope() as scope:
                async with open_fake_engine() as engine, open_tracing(collector.url) as spans:
                    engine.on_request_end = spans.request_ended
                    await engine.complete("hello", max_tokens=2)
                    scope.cancel()
                    await trio.sleep_forever()
            assert scope.cancelled_caught

    async def test_who_is_cancelled_while_spans_are_sent_does_not_wait(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(tracing, "FLUSH_SECONDS", math.inf)
        with collecting(hang=True) as collector, trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_one_span, collector.url)
                while not collector.requests:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            assert "the last spans weren't taken in time" in caplog.text

    async def test_nobody_listens(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Retry a refused connection, and give up when the engine closes."""
        monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.2)
        with (
            socket.socket() as nobody,
            trio.fail_after(30),
            caplog.at_level(logging.WARNING),
        ):
            nobody.bind(("127.0.0.1", 0))
            await send_one_span(f"http://127.0.0.1:{nobody.getsockname()[1]}")
            while not no_exporter_thread_is_left():
                await trio.sleep(0.01)
        assert "the last spans weren't taken in time" in caplog.text


class TestWithoutTheExtra:
    @pytest.fixture(autouse=True)
    def not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)

    async def test_the_option_is_refused_with_what_to_install(self) -> None:
        with pytest.raises(InvalidRequest) as caught:
            async with open_tracing("http://x"):
                pytest.fail("it was opened")
        message = str(caught.value)
        assert "--otlp-traces-endpoint needs" in message
        assert message.endswith("-m pip install '.[otel]' in a clone of trioserve")
        assert "\n" not in message

    def test_the_command_says_so_in_one_line_before_it_looks_for_the_model(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("trioserve.observability.logs.setup_logging", lambda *_: None)
        options = ["--port", "0", "--otlp-traces-endpoint", "http://x"]
        assert main(["serve", "/no/such/model", *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trioserve: --otlp-traces-endpoint needs")

    async def test_the_variable_alone_is_a_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv(ENDPOINT_VARIABLE, "http://x")
        await send_one_span(None)
        assert "-m pip install '.[otel]'" in caplog.text

    async def test_nothing_is_imported_where_nothing_is_asked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
        async with open_tracing(None) as spans:
            assert spans.tracer is None

"""Spans of requests, by OpenTelemetry: one for each, made when it has ended, below its caller's.

The names of a span's attributes are vLLM's, which are OpenTelemetry's for generative models where
those exist. Spans leave by OTLP over HTTP in a thread of the SDK's own, in batches. A collector
that can't be reached is told of in the log, and its spans are dropped; no request waits for it.

The SDK is an extra, ``otel``, and is imported only where spans are asked for. What else
it can be told (headers, certificates, sampling, the service's name) are its standard environment
variables.
"""

from __future__ import annotations

import contextlib
import os
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import attrs
import trio

from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.machine import extra_advice
from trioserve.requests.request import FinishReason, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Tracer

ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"

FLUSH_SECONDS = 5.0
"""How long the collector has to take the last spans when an engine closes."""
CANCELLED_FLUSH_SECONDS = 0.5
"""The same where the engine's own scope was cancelled, or interrupted: somebody is in a hurry."""

_log = get_logger("trioserve.tracing")

Attributes = dict[str, str | int | float | list[str]]


@attrs.frozen(kw_only=True)
class EndedTexts:
    """A request for what an encoder says of texts, when it has ended. Times are on trio's clock."""

    id: str
    count: int
    """Of its texts."""
    num_tokens: int
    """Of all of them together; 0 if they weren't tokenized."""
    reason: str
    """Why it ended: ``stop`` if all texts are computed, ``abort`` or ``error``."""
    error: Exception | None
    arrived: float
    finished: float
    traceparent: str
    tracestate: str


@attrs.define(eq=False)
class Tracing:
    """Makes the spans. Without a tracer it makes none."""

    tracer: Tracer | None = None
    model_name: str = ""

    def request_ended(self, request: Request) -> None:
        """Make the span of ``request``, whose times are complete. Never blocks."""
        if self.tracer is not None:
            self._make_span(
                {"traceparent": request.traceparent, "tracestate": request.tracestate},
                request.times.arrived,
                request.times.finished,
                lambda: {**self._attributes(request), **_latencies(request)},
                _failure_of(request),
            )

    def texts_ended(self, texts: EndedTexts) -> None:
        """Make the span of ``texts``. Never blocks."""
        if self.tracer is not None:
            self._make_span(
                {"traceparent": texts.traceparent, "tracestate": texts.tracestate},
                texts.arrived,
                texts.finished,
                lambda: self._attributes_of_texts(texts),
                None if texts.error is None else type(texts.error).__name__,
            )

    def _make_span(
        self,
        carrier: dict[str, str],
        began: float,
        ended: float | None,
        attributes: Callable[[], Attributes],
        failure: str | None,
    ) -> None:
        """Make a span below the caller's.

        Args:
            carrier: the caller's trace context, by the names of W3C's headers.
            began: when, in seconds on trio's clock.
            ended: the same; None for now.
            attributes: makes them, where the span is wanted.
            failure: the type of what went wrong: a message may quote what the request said.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self.tracer is not None
        # An empty context: the parent is the caller's span, not what else this thread is tracing.
        context = TraceContextTextMapPropagator().extract(carrier, context=Context())
        now, clock = time.time_ns(), trio.current_time()
        span = self.tracer.start_span(
            "llm_request",
            context=context,
            kind=SpanKind.SERVER,
            start_time=now - round((clock - began) * 1e9),
        )
        if span.is_recording():
            span.set_attributes(attributes())
            if failure is not None:
                span.set_attribute("error.type", failure)
                span.set_status(Status(StatusCode.ERROR, failure))
        span.end(now - round((clock - (clock if ended is None else ended)) * 1e9))

    def _attributes(self, request: Request) -> Attributes:
        params, sequences = request.params, request.sequences
        attributes: Attributes = {
            "gen_ai.request.id": request.id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.response.model": self.model_name,
            "gen_ai.response.finish_reasons": [
                sequence.finish.reason.value for sequence in sequences if sequence.finish
            ],
            "gen_ai.usage.num_sequences": len(sequences),
            "gen_ai.usage.prompt_tokens": len(request.prompt_ids),
            "gen_ai.usage.completion_tokens": sum(len(each.output_ids) for each in sequences),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        return attributes

    def _attributes_of_texts(self, texts: EndedTexts) -> Attributes:
        return {
            "gen_ai.request.id": texts.id,
            "gen_ai.response.model": self.model_name,
            "gen_ai.response.finish_reasons": [texts.reason],
            "gen_ai.usage.num_sequences": texts.count,
            "gen_ai.usage.prompt_tokens": texts.num_tokens,
            "gen_ai.usage.completion_tokens": 0,
            "gen_ai.latency.e2e": texts.finished - texts.arrived,
        }


def _latencies(request: Request) -> Attributes:
    """The times that have come, in seconds."""
    times = request.times
    spans = {
        "time_in_queue": (times.queued, times.first_scheduled),
        "time_to_first_token": (times.arrived, times.first_token),
        "time_in_model_prefill": (times.first_scheduled, times.first_token),
        "time_in_model_decode": (times.first_token, times.last_token),
        "time_in_model_inference": (times.first_scheduled, times.last_token),
        "e2e": (times.arrived, times.finished),
    }
    return {
        f"gen_ai.latency.{name}": end - start
        for name, (start, end) in spans.items()
        if start is not None and end is not None
    }


def _failure_of(request: Request) -> str | None:
    """The type of its error; None where nothing went wrong."""
    finishes = [sequence.finish for sequence in request.sequences if sequence.finish is not None]
    errors = [request.rejection, *(finish.error for finish in finishes)]
    error = next((error for error in errors if error is not None), None)
    if error is not None:
        return type(error).__name__
    failed = any(finish.reason is FinishReason.ERROR for finish in finishes)
    return "error" if failed else None


@contextlib.asynccontextmanager
async def open_tracing(endpoint: str | None) -> AsyncIterator[Tracing]:
    """What makes an engine's spans, for as long as the block lasts; they are sent when it ends.

    Args:
        endpoint: the collector's URL; without a path it gets ``/v1/traces``. None for that of
            ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, and for no spans where that isn't set.

    Raises:
        InvalidRequest: an endpoint is given, and the SDK isn't installed.
    """
    url = _with_path(endpoint) if endpoint else os.environ.get(ENDPOINT_VARIABLE)
    if not url:
        yield Tracing()
        return
    try:
        provider, exporter = await trio.to_thread.run_sync(_open_provider, url)
    except ImportError as error:
        if endpoint:
            raise InvalidRequest(
                f"--otlp-traces-endpoint needs OpenTelemetry's SDK: {extra_advice('otel')}",
                param="otlp_traces_endpoint",
            ) from error
        _log.warning("no spans", needs=extra_advice("otel"), because=f"{ENDPOINT_VARIABLE} is set")
        yield Tracing()
        return
    hurried = False
    try:
        yield Tracing(provider.get_tracer("trioserve"))
    except BaseException as error:
        hurried = not isinstance(error, Exception)
        raise
    finally:
        limit = CANCELLED_FLUSH_SECONDS if hurried else FLUSH_SECONDS
        taken = False
        try:
            # Who gets into a hurry only now, as by a second signal, doesn't wait at all.
            with trio.move_on_after(limit, shield=hurried):
                await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
                taken = True
        finally:
            if not taken:
                _log.warning("the last spans weren't taken in time", endpoint=url, seconds=limit)
                # What it has begun it gives up now, and then the threads end that were abandoned.
                exporter.shutdown()


def _with_path(endpoint: str) -> str:
    parts = urllib.parse.urlsplit(endpoint)
    return endpoint if parts.path not in ("", "/") else parts._replace(path="/v1/traces").geturl()


def _open_provider(url: str) -> tuple[TracerProvider, SpanExporter]:
    """A provider, and what it sends to ``url`` with. Imports the SDK, which takes a moment.

    Raises:
        ImportError: it isn't installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "trioserve"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=url)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider, exporter

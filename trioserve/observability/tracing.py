"""OpenTelemetry spans: one for each request, made at its end, below its caller's span.

The attributes have vLLM's names, which are OpenTelemetry's for generative models if those exist. A
thread of the SDK sends spans by OTLP over HTTP, in batches. If a collector can't be reached, the
log says so and its spans are dropped; no request waits for it.

The SDK is the extra ``otel``, and is imported only if spans are enabled. Its standard environment
variables set further options (headers, certificates, sampling, the service's name).
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
"""Seconds that the collector has for the last spans when an engine closes."""
CANCELLED_FLUSH_SECONDS = 0.5
"""Seconds for the last spans if the engine was cancelled or interrupted."""

_log = get_logger("trioserve.tracing")

Attributes = dict[str, str | int | float | list[str]]


@attrs.frozen(kw_only=True)
class EndedTexts:
    """A finished request for embeddings or the like. Times are on trio's clock."""

    id: str
    count: int
    """Number of texts."""
    num_tokens: int
    """Tokens of all texts together; 0 if they weren't tokenized."""
    reason: str
    """Reason of the end: ``stop`` if all texts are computed, ``abort`` or ``error``."""
    error: Exception | None
    arrived: float
    finished: float
    traceparent: str
    tracestate: str


@attrs.define(eq=False)
class Tracing:
    """Maker of spans. Without a tracer it makes none."""

    tracer: Tracer | None = None
    model_name: str = ""

    def request_ended(self, request: Request) -> None:
        """Make the span of ``request``; its times are complete. Never blocks."""
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
            began: the start in seconds on trio's clock.
            ended: the end on the same clock; None for now.
            attributes: function that returns the attributes; it is called only if the span is
                sampled.
            failure: the type of an error; its message may quote the request, so it is left out.
        """
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self.tracer is not None
        # An empty context: the parent is the caller's span, not another span of this thread.
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
            "gen_ai.usage.prompt_tokens": len(request.own_prompt_ids),
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
    """Return the times that are known, in seconds."""
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
    """Return the type of the request's error; None without an error."""
    finishes = [sequence.finish for sequence in request.sequences if sequence.finish is not None]
    errors = [request.rejection, *(finish.error for finish in finishes)]
    error = next((error for error in errors if error is not None), None)
    if error is not None:
        return type(error).__name__
    failed = any(finish.reason is FinishReason.ERROR for finish in finishes)
    return "error" if failed else None


@contextlib.asynccontextmanager
async def open_tracing(endpoint: str | None) -> AsyncIterator[Tracing]:
    """Open the tracing of an engine for the block; the spans are sent at its end.

    Args:
        endpoint: the collector's URL; ``/v1/traces`` is added if it has no path. None for the value
            of ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``, and for no spans if that isn't set.

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
            # A second signal in the meantime ends the wait at once.
            with trio.move_on_after(limit, shield=hurried):
                await trio.to_thread.run_sync(provider.shutdown, abandon_on_cancel=True)
                taken = True
        finally:
            if not taken:
                _log.warning("the last spans weren't taken in time", endpoint=url, seconds=limit)
                # This makes the exporter give up, so that its abandoned threads end.
                exporter.shutdown()


def _with_path(endpoint: str) -> str:
    parts = urllib.parse.urlsplit(endpoint)
    return endpoint if parts.path not in ("", "/") else parts._replace(path="/v1/traces").geturl()


def _open_provider(url: str) -> tuple[TracerProvider, SpanExporter]:
    """Return a provider, and its exporter to ``url``. This imports the SDK, which is slow.

    Raises:
        ImportError: the SDK isn't installed.
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

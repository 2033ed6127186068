"""Access log: one line per HTTP request with its client, outcome, duration and usage.

Prompts and answers are in it only if the server was told to log them, too.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Sequence

import attrs
import trio

from trioserve.http.api.contents import Contents, item_texts
from trioserve.http.api.errors import CLIENT_CLOSED_REQUEST
from trioserve.http.api.generations import total_usage
from trioserve.http.api.jobs import PromptJob
from trioserve.observability.logs import get_logger
from trioserve.observability.metrics import Metrics
from trioserve.pooling.inputs import Item
from trioserve.requests.generation import GenerationStream, Usage
from trioserve.requests.request import Times
from trioserve.requests.stream import Chunk

SERVER_ERROR = 500
OTHER = "other"
"""Label of unknown routes and unusual methods in metrics; it bounds the number of labels."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})

_REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT_PATTERN = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")

_log = get_logger("trioserve.http")


def request_id_from(header: str | None) -> str:
    """Return the client's own request id if it is valid, else a new one."""
    if header is not None and _REQUEST_ID_PATTERN.fullmatch(header):
        return header
    return uuid.uuid4().hex


@attrs.define(eq=False, kw_only=True)
class AccessRecord:
    """Log record of one HTTP request; :meth:`write` writes its line.

    ``reason`` is the finish reason of a generation, or why the request ended early. If its outputs
    ended differently, it holds several reasons with commas between them. ``client`` is the client's
    address, ``key`` the name of its API key, ``tenant`` the name under which its shares count,
    ``may_set_priority`` whether the key may name a priority. ``traceparent`` and ``tracestate`` are
    the caller's trace context.
    """

    method: str
    path: str
    request_id: str
    client: str | None = None
    key: str | None = None
    tenant: str = ""
    may_set_priority: bool = True
    traceparent: str = ""
    tracestate: str = ""
    started: float = attrs.field(factory=trio.current_time)
    route: str = OTHER
    status: int | None = None
    completed: bool = False
    disconnected: bool = False
    usage: Usage | None = None
    reason: str | None = None
    contents: Contents | None = None
    texts: Sequence[Item] = ()
    """Texts that are computed as a whole, if they may be logged."""
    error: str | None = None
    """Code of the error that the client got."""
    times: Sequence[Times] = ()
    """Timestamps of each generated prompt."""
    _num_outputs: int = 0
    _queue_time: float | None = None
    _first_token: float | None = None
    _first_sent: float | None = None

    def note_jobs(self, jobs: Sequence[PromptJob], *, with_contents: bool) -> None:
        """Record the number of outputs to come, and the prompts if they may be logged."""
        self._num_outputs += sum(job.params.n for job in jobs)
        if with_contents:
            self.contents = Contents(jobs)

    def note_chunk(self, index: int, chunk: Chunk) -> None:
        """Record why an output of prompt ``index`` ended, and its text if that may be logged."""
        if self.contents is not None:
            self.contents.add(index, chunk)
        reason = chunk.finish_reason
        if reason is not None and reason not in (self.reason or "").split(","):
            self.reason = reason if self.reason is None else f"{self.reason},{reason}"

    def note_streams(self, streams: Sequence[GenerationStream]) -> None:
        """Record the tokens so far, the longest queueing time and the time of the first token."""
        self.usage = total_usage(stream.usage for stream in streams)
        self.times = [stream.times for stream in streams]
        self._queue_time = max(
            (
                each.first_scheduled - each.queued
                for each in self.times
                if each.first_scheduled is not None and each.queued is not None
            ),
            default=None,
        )
        self._first_token = min(
            (each.first_token for each in self.times if each.first_token is not None),
            default=None,
        )

    def note_sent(self) -> None:
        """Record the time at which output was first sent."""
        if self._first_sent is None:
            self._first_sent = trio.current_time()

    def note_texts(self, items: Sequence[Item], *, with_contents: bool) -> None:
        """Record the number of texts computed as a whole, and the texts if they may be logged."""
        self._num_outputs += len(items)
        if with_contents:
            self.texts = items

    def note_error(self, reason: str) -> None:
        """Record why the request failed."""
        self.reason = self.error = reason

    def write(self, metrics: Metrics) -> None:
        """Write the line and count the response."""
        status = self.status or 500
        if not self.completed:
            status = CLIENT_CLOSED_REQUEST if self.disconnected else status
            self.reason = self.reason or (
                "client_disconnected" if self.disconnected else "server_closed"
            )
        method = self.method if self.method in _METHODS else OTHER
        metrics.observe_response(method, self.route, status)
        if self.error is not None:
            metrics.observe_error(self.error)
        fields: dict[str, object] = {
            "method": self.method,
            "path": self.path,
            "status": status,
            "request_id": self.request_id,
            "duration_ms": _milliseconds(trio.current_time() - self.started),
        }
        if self.client is not None:
            fields["client"] = self.client
        if self.key is not None:
            fields["key"] = self.key
        if match := _TRACEPARENT_PATTERN.fullmatch(self.traceparent):
            fields["trace_id"] = match[1]
        fields |= self._generation_fields()
        if self.reason is not None:
            fields["reason"] = self.reason
        if self.contents is not None:
            fields |= self.contents.fields()
        if self.texts:
            fields["prompts"] = item_texts(self.texts)
        write = _log.warning if status >= SERVER_ERROR else _log.info
        write("request", **fields)

    def _generation_fields(self) -> dict[str, object]:
        """Return sizes and times of the generation; empty if nothing was generated."""
        fields: dict[str, object] = {}
        if self._num_outputs:
            fields["n"] = self._num_outputs
        if self.usage is not None:
            fields["prompt_tokens"] = self.usage.prompt_tokens
            fields["completion_tokens"] = self.usage.completion_tokens
            fields["cached_tokens"] = self.usage.cached_tokens
        if self._queue_time is not None:
            fields["queue_ms"] = _milliseconds(self._queue_time)
        if self._first_token is not None:
            fields["first_token_ms"] = _milliseconds(self._first_token - self.started)
            if self._first_sent is not None:
                fields["first_sent_ms"] = _milliseconds(self._first_sent - self.started)
            if (rate := self._tokens_per_second()) is not None:
                fields["tokens_per_second"] = round(rate, 1)
        return fields

    def _tokens_per_second(self) -> float | None:
        """Return the rate of all outputs after their first tokens, if it is known."""
        last = max((each.last_token or -math.inf for each in self.times), default=-math.inf)
        if self.usage is None or self._first_token is None or last <= self._first_token:
            return None
        return max(self.usage.completion_tokens - self._num_outputs, 0) / (last - self._first_token)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)

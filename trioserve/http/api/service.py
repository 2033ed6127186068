"""Service that all endpoints share: the engine, the options, the model's names, its jobs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs
import msgspec
import quart
from quart.wrappers.response import DataBody
from werkzeug.exceptions import UnsupportedMediaType

from trioserve.config import ServerConfig
from trioserve.engine.request_engine import RequestEngine
from trioserve.http.api.access_log import AccessRecord
from trioserve.http.api.asgi import LoggedRequest
from trioserve.http.api.bounds import AnswerSize, check_batch
from trioserve.http.api.cors import CrossOrigin
from trioserve.http.api.errors import Forbidden, ModelNotFound, WrongMediaType
from trioserve.http.api.generations import Generations, open_generations, renamed
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.prompt_pages import HEADER, PromptPagesAsked
from trioserve.http.api.schema.forms import FORM_TYPE, parse_form
from trioserve.http.api.schema.ignored_fields import IgnoredFields
from trioserve.http.api.schema.reading import parse_body, parse_query
from trioserve.http.api.server_api import ServerApi
from trioserve.http.api.sse import EventStream, Framing, StreamWriter, stream_response
from trioserve.http.api.threads import LONG_BODY, run_if_long
from trioserve.pooling.inputs import Item
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.sampling import SamplingParams
from trioserve.requests.deadline import Deadline
from trioserve.requests.generation import (
    Completion,
    GenerationStream,
    completion_of,
    sampling_params,
)
from trioserve.requests.stream import Chunk

RequestType = TypeVar("RequestType", bound=msgspec.Struct)

OPENAI_FRAMING = Framing()

CURLS_TYPE = "application/x-www-form-urlencoded"
"""Media type that `curl -d` sends by default for any body."""


def json_response(value: Any, status: int = 200) -> quart.Response:
    """Return ``value`` as a JSON response."""
    body = msgspec.json.encode(value)
    return quart.Response(body, status=status, content_type="application/json")


def response_of_view(json: memoryview) -> quart.Response:
    """Return a response with the body ``json``, which all its readers share."""
    return quart.Response(
        DataBody(cast(bytes, json)),
        headers={"Content-Length": str(len(json))},
        content_type="application/json",
    )


def _check_media_type(request: quart.Request, *also: str) -> None:
    """Refuse a body of another media type than JSON, so no web page can send one without a
    preflight.

    Before a browser sends JSON to another site, it asks the server, and gets no permission here.
    Clients may leave the type out, or give one of ``also``. A page could do so, too, but its
    browser sends the origin.
    """
    media_type = "" if request.mimetype in also else request.mimetype
    is_json = media_type == "application/json" or media_type.endswith("+json")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    by_page = "Origin" in request.headers
    if ((media_type or by_page) and not is_json) or encoding != "identity":
        raise UnsupportedMediaType


def _form_boundary(request: quart.Request, cross_origin: CrossOrigin) -> str:
    """Return the boundary of the parts of a form; refuse another body.

    A web page can send a form without a preflight, but its browser tells the origin.

    Raises:
        WrongMediaType: The body is no form, or the page's origin isn't allowed.
    """
    boundary = request.mimetype_params.get("boundary", "")
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if request.mimetype != FORM_TYPE or not boundary or encoding != "identity":
        raise WrongMediaType(
            f"the body must be a form as it is: send Content-Type: {FORM_TYPE}; boundary=… and no "
            "Content-Encoding"
        )
    origin = request.headers.get("Origin")
    if origin is not None and not cross_origin.allows(origin):
        raise WrongMediaType("web pages may send forms if --allowed-origins names their origin")
    return boundary


def _query_as_json() -> bytes:
    """Return the object that the query of the current request stands for."""
    query = quart.request.args
    fields = {name: [_literal(text) for text in query.getlist(name)] for name in query}
    return msgspec.json.encode(
        {name: values[0] if len(values) == 1 else values for name, values in fields.items()}
    )


def _literal(text: str) -> Any:
    """Return the JSON value of ``text`` if that is a number, ``true``, ``false`` or ``null``; else
    ``text``.
    """
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text
    return text if isinstance(value, (str, list, dict)) else value


async def _parsed(
    request_type: type[RequestType], body: bytes, ignored: IgnoredFields | None = None
) -> RequestType:
    """Return the parsed request, and free the room of its body."""

    def parse() -> RequestType:
        return parse_body(request_type, body, ignored)

    request = await run_if_long(len(body), parse, most=LONG_BODY)
    cast(LoggedRequest, quart.request).body.release()
    return request


def _check_no_priority(jobs: Sequence[PromptJob]) -> None:
    for name, is_given in (
        ("priority", any(job.priority for job in jobs)),
        ("kv_cache_retention_config", any(job.retention for job in jobs)),
    ):
        if is_given:
            raise Forbidden(f"{name} needs a key that may set priorities (--priority-api-key)")


@attrs.frozen(kw_only=True)
class Service:
    """One engine behind HTTP. ``started`` is its start, in Unix seconds."""

    engine: RequestEngine
    server_api: ServerApi
    config: ServerConfig
    model_names: tuple[str, ...]
    started: int = attrs.field(factory=lambda: int(time.time()))
    _ignored: IgnoredFields | None = attrs.field(
        init=False,
        default=attrs.Factory(
            lambda self: IgnoredFields() if self.config.ignore_unknown_fields else None,
            takes_self=True,
        ),
    )
    """Names of ignored fields, if the server ignores unserved fields."""

    @property
    def record(self) -> AccessRecord:
        """Return the access-log record of the current request."""
        return cast(LoggedRequest, quart.request).record

    async def read(self, request_type: type[RequestType], *also: str) -> RequestType:
        """Return the body of the current request, parsed; ``also`` has further media types.

        Raises:
            InvalidRequest: it isn't a request of this type.
            werkzeug.exceptions.HTTPException: it isn't sent as JSON, is too large, or didn't come
                in time.
        """
        _check_media_type(quart.request, *also)
        body: bytes = await quart.request.get_data(False, False, False)
        return await _parsed(request_type, body, self._ignored)

    async def read_if_any(self, request_type: type[RequestType]) -> RequestType:
        """Return the body of a request with optional fields only, which may be left out itself.

        Without a body the query stands for it, as in vLLM.
        """
        body: bytes = await quart.request.get_data(False, False, False)
        if not body and "Content-Type" not in quart.request.headers:
            return parse_body(request_type, _query_as_json())
        _check_media_type(quart.request)
        return await _parsed(request_type, body or b"{}")

    async def read_form(self, form_type: type[RequestType]) -> RequestType:
        """Return the form of the current request, parsed.

        Its body counts as received until the request has ended, since the file is kept as long.

        Raises:
            InvalidRequest: it isn't a form of this type.
            WrongMediaType: it isn't sent as a form.
            werkzeug.exceptions.HTTPException: it is too large, or didn't come in time.
        """
        boundary = _form_boundary(quart.request, CrossOrigin(self.config.allowed_origins))
        body: bytes = await quart.request.get_data(False, False, False)

        def parse() -> RequestType:
            return parse_form(form_type, body, boundary, self._ignored)

        return await run_if_long(len(body), parse, most=LONG_BODY)

    def read_query(self, query_type: type[RequestType]) -> RequestType:
        """Return the parsed query of the current request.

        Raises:
            InvalidRequest: it isn't a query of this type.
        """
        return parse_query(query_type, quart.request.args.items(multi=True))

    def model(self, name: str | None) -> str:
        """Return the served name that a request means.

        Raises:
            ModelNotFound: it isn't served here.
        """
        if name is None:
            return self.model_names[0]
        adapters = [adapter.name for adapter in self.engine.adapters]
        if name not in self.model_names and name not in adapters:
            served = ", ".join((*self.model_names, *adapters))
            raise ModelNotFound(f"the model {name!r} isn't served here; it is one of {served}")
        return name

    def adapter(self, model: str | None, lora_path: str | None) -> tuple[str, str]:
        """Return the adapter that these fields name, empty for none, and the field that names it.

        Raises:
            InvalidRequest: they name two.
        """
        named = model if model is not None and model not in self.model_names else ""
        if named and lora_path and lora_path != named:
            raise InvalidRequest(
                f"lora_path names another adapter than model, which is {named!r}: give one of them",
                param="lora_path",
            )
        return (named, "model") if named else (lora_path or "", "lora_path")

    def sampling(
        self, fields: Mapping[str, Any], renames: Mapping[str, str] | None = None
    ) -> SamplingParams:
        """Return sampling parameters of the given fields; the model's defaults fill in.

        Raises:
            InvalidRequest: one is out of its range; ``param`` is the endpoint's name of it.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        try:
            return sampling_params({**self.engine.generation_defaults, **given})
        except InvalidRequest as error:
            raise renamed(error, renames or {}) from error

    def default_max_tokens(self, of_the_api: int) -> int:
        """Return the output tokens of a request that names none, if its API has a default."""
        return min(of_the_api, self.engine.generation.max_tokens or of_the_api)

    def deadline(self, timeout: float | None) -> Deadline:
        """Return the deadline of the current request, which names ``timeout`` or none.

        The engine enforces the same deadline, but doesn't see the work before and after it.
        """
        return Deadline.of(timeout, self.record.started, self.engine.config)

    def check_number_of_prompts(self, count: int, param: str) -> None:
        """Refuse an empty batch, and one that is too large.

        Raises:
            InvalidRequest: there are none, or more than the server's options allow.
        """
        limit = self.config.max_prompts_per_request
        if not 1 <= count <= limit:
            raise InvalidRequest(
                f"{param} holds {count} prompts; from 1 to {limit} are served at once "
                "(--max-prompts-per-request)",
                param=param,
            )

    def note_texts(self, items: Sequence[Item]) -> None:
        """Record texts that are computed as a whole for the log's line."""
        self.record.note_texts(items, with_contents=self.config.log_requests)

    def _open(self, jobs: Sequence[PromptJob]) -> Generations:
        """Return the generations of ``jobs``, recorded in the log's line, under the caller's trace.

        Raises:
            InvalidRequest: together they could never be queued.
            Forbidden: they name a priority, which the key may not.
            PromptPagesAsked: only the pages of their prompts are asked for.
        """
        if not self.record.may_set_priority:
            _check_no_priority(jobs)
        try:
            check_batch(jobs, self.engine, is_shared=bool(self.record.tenant))
        except InvalidRequest as error:
            raise renamed(error, jobs[0].renames) from error
        record = self.record
        record.note_jobs(jobs, with_contents=self.config.log_requests)
        jobs = [
            attrs.evolve(
                job,
                arrived=record.started,
                tenant=record.tenant,
                traceparent=record.traceparent,
                tracestate=record.tracestate,
            )
            for job in jobs
        ]
        if HEADER in quart.request.headers:
            raise PromptPagesAsked(jobs)
        return open_generations(self.engine, jobs)

    async def complete(self, jobs: Sequence[PromptJob]) -> list[Completion]:
        """Run every job to its end; leaving, cancelled or not, aborts what isn't finished.

        Raises:
            InvalidRequest: the answer would be too large to be held.
            TrioserveError: a job failed.
        """
        return [completion_of(stream, own) for stream, own in await self.chunks(jobs)]

    async def chunks(self, jobs: Sequence[PromptJob]) -> list[tuple[GenerationStream, list[Chunk]]]:
        """Run every job to its end; return the stream and all chunks of each.

        Raises:
            InvalidRequest: the answer would be too large to be held.
            TrioserveError: a job failed.
        """
        generations = self._open(jobs)
        chunks: list[list[Chunk]] = [[] for _ in jobs]
        record = self.record
        size = AnswerSize()
        async with generations:
            try:
                async for index, chunk in generations:
                    record.note_chunk(index, chunk)
                    size.add(chunk)
                    chunks[index].append(chunk)
            except InvalidRequest as error:
                raise renamed(error, jobs[0].renames) from error
            finally:
                record.note_streams(generations.streams)
        return list(zip(generations.streams, chunks, strict=True))

    def stream(
        self,
        jobs: Sequence[PromptJob],
        writer: StreamWriter,
        framing: Framing = OPENAI_FRAMING,
        *,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> quart.Response:
        """Return a response that streams the jobs' output in the form of ``writer``.

        ``before_end`` is awaited after the last output, before the stream is ended.
        """
        body = EventStream(
            self._open(jobs),
            writer,
            record=self.record,
            keep_alive_interval=self.config.keep_alive_interval,
            framing=framing,
            before_end=before_end,
        )
        return stream_response(body)

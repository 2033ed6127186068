"""HTTP status and body of each exception; this module alone decides.

An error has OpenAI's body, ``{"error": {"message", "type", "param", "code"}}``, except on paths of
APIs with another form (:mod:`trioserve.http.api.dialects`). Before a stream's 200 it is the
response; after it, the same body is an event of the stream, and then the stream ends.
"""

from __future__ import annotations

import math
import re

import attrs
import msgspec
from werkzeug.exceptions import HTTPException

from trioserve.http.server.error_body import ErrorBody, ErrorDetail, ErrorResponse
from trioserve.protocol.errors import (
    AdapterNotFound,
    DeadlineExceeded,
    Draining,
    EngineError,
    InvalidRequest,
    Paused,
    QueueFull,
    RequestAborted,
    SessionLimit,
    ShuttingDown,
    SlowReader,
    TrioserveError,
    WatcherLimit,
    WorkerLost,
)

MAX_MESSAGE_CHARACTERS = 4000
MAX_PARAM_CHARACTERS = 200
CLIENT_CLOSED_REQUEST = 499
"""Status in the log of a request that its client has left; no client ever sees it."""


class ModelNotFound(TrioserveError):
    """The request names a model that isn't served here."""


class ResponseNotFound(InvalidRequest):
    """The named response isn't kept: it never was, no longer is, or has another owner."""

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id '{id}' not found.", code="response_not_found")


class Unauthorized(TrioserveError):
    """The request brings no key, or a wrong one."""


class Forbidden(TrioserveError):
    """The route is closed to every key."""


class HostNotAllowed(TrioserveError):
    """The request has no key and is for a host that isn't this server's."""


class KeyLimit(TrioserveError):
    """The key has as many open requests as it may have."""


class WrongMediaType(TrioserveError):
    """The body is sent as something else than the route takes."""


class NoServer(TrioserveError):
    """No server behind the router can take the request."""


class ServerLost(TrioserveError):
    """The server behind the router was lost before the end of its answer."""


@attrs.frozen(kw_only=True)
class ErrorReply:
    """An error on its way to a client: status, body and headers; ``reason`` is for the log."""

    status: int
    body: bytes
    reason: str
    headers: dict[str, str] = attrs.field(factory=dict)


@attrs.frozen
class _Kind:
    status: int
    type: str
    code: str | None = None


_KINDS: dict[type[Exception], _Kind] = {
    AdapterNotFound: _Kind(404, "invalid_request_error"),
    InvalidRequest: _Kind(400, "invalid_request_error"),
    Unauthorized: _Kind(401, "authentication_error", "invalid_api_key"),
    Forbidden: _Kind(403, "permission_error", "forbidden"),
    HostNotAllowed: _Kind(403, "permission_error", "host_not_allowed"),
    ModelNotFound: _Kind(404, "invalid_request_error", "model_not_found"),
    ResponseNotFound: _Kind(404, "invalid_request_error"),
    WrongMediaType: _Kind(415, "invalid_request_error", "unsupported_media_type"),
    ServerLost: _Kind(502, "server_error", "server_lost"),
    NoServer: _Kind(503, "service_unavailable_error", "no_server"),
    QueueFull: _Kind(429, "rate_limit_error", "queue_full"),
    KeyLimit: _Kind(429, "rate_limit_error", "key_limit"),
    SessionLimit: _Kind(429, "rate_limit_error", "session_limit"),
    WatcherLimit: _Kind(429, "rate_limit_error", "watcher_limit"),
    SlowReader: _Kind(500, "slow_reader_error", "slow_reader"),
    RequestAborted: _Kind(500, "server_error", "request_aborted"),
    EngineError: _Kind(500, "server_error", "engine_error"),
    WorkerLost: _Kind(503, "service_unavailable_error", "no_worker"),
    Draining: _Kind(503, "service_unavailable_error", "draining"),
    Paused: _Kind(503, "service_unavailable_error", "paused"),
    ShuttingDown: _Kind(503, "service_unavailable_error", "shutting_down"),
    DeadlineExceeded: _Kind(504, "timeout_error", "deadline_exceeded"),
}
_HTTP_ERRORS = {
    404: ("not_found", "there is nothing at this path"),
    405: ("method_not_allowed", "this path doesn't take this method"),
    408: ("request_timeout", "the request's body didn't come in time"),
    413: ("request_too_large", "the request's body is larger than this server takes"),
    415: (
        "unsupported_media_type",
        "the body must be JSON as it is: send Content-Type: application/json and no "
        "Content-Encoding",
    ),
}
ERROR_STATUSES = {
    400: "The request can't be served as it stands; `param` names the field",
    401: "There is no key, or a wrong one",
    403: "The route controls the server, which has no `--admin-api-key`, or there are no keys and "
    "the request's `Host` isn't one of the server's (`--allowed-hosts`)",
    404: "The model or the path isn't served, or the response isn't kept",
    405: "The path doesn't take this method",
    408: "The body didn't come in time",
    413: "The body is larger than `--max-body-size`",
    415: "The body isn't sent as `application/json`, or a form as `multipart/form-data`, or it is "
    "compressed",
    429: "Too much waits already (`--max-num-queued-reqs`, `--max-num-queued-tokens`), or too many "
    "requests with this key are open (`--max-requests-per-key`), or too many sessions "
    "(`--max-sessions`)",
    500: "The server failed, or ended the request",
    503: "The server is shutting down, is paused, or has lost its worker",
    504: "The request's own `timeout`, or `--default-timeout`, ran out",
}
"""Description of each status of an error."""


def describe_error(error: BaseException, body: type[ErrorBody] = ErrorResponse) -> ErrorReply:
    """Return the reply for ``error``. An unexpected error is a 500 that reveals nothing of it.

    Args:
        body: the form of its body.
    """
    if isinstance(error, HTTPException):
        return _http_error(error, body)
    kind = next((_KINDS[cls] for cls in type(error).__mro__ if cls in _KINDS), None)
    if kind is None:
        detail = ErrorDetail(
            message="the server failed on this request", type="server_error", code="internal_error"
        )
        return _reply(500, detail, {}, body)
    headers = {}
    param, code = None, kind.code
    if isinstance(error, InvalidRequest):
        param, code = error.param, error.code
    elif isinstance(error, ModelNotFound):
        param = "model"
    elif isinstance(error, QueueFull):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    elif isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, (Draining, KeyLimit, Paused, ShuttingDown, WatcherLimit)):
        headers["Retry-After"] = "1"
    # Both may quote the client's input, which may be as large as a body.
    message = _shortened(str(error), MAX_MESSAGE_CHARACTERS)
    param = None if param is None else _shortened(param, MAX_PARAM_CHARACTERS)
    detail = ErrorDetail(message=_naming(param, message), type=kind.type, param=param, code=code)
    return _reply(kind.status, detail, headers, body)


def _shortened(text: str, most: int) -> str:
    """Return ``text``, cut to at most ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _naming(param: str | None, message: str) -> str:
    """Return ``message``, with the field's name before it if it doesn't mention it."""
    if (
        param is None
        or len(param) == MAX_PARAM_CHARACTERS
        or re.search(rf"(?<!\w){re.escape(param)}(?!\w)", message)
    ):
        return message
    return f"{param}: {message}"


def _http_error(error: HTTPException, body: type[ErrorBody]) -> ErrorReply:
    status = error.code or 500
    headers = {name: value for name, value in error.get_headers() if name == "Allow"}
    code, message = _HTTP_ERRORS.get(status, (None, error.name))
    detail = ErrorDetail(
        message=message,
        type="invalid_request_error" if status < 500 else "server_error",
        code=code,
    )
    return _reply(status, detail, headers, body)


def _reply(
    status: int, detail: ErrorDetail, headers: dict[str, str], body: type[ErrorBody]
) -> ErrorReply:
    return ErrorReply(
        status=status,
        body=msgspec.json.encode(body.of(status, detail)),
        reason=detail.code or detail.type,
        headers=headers,
    )

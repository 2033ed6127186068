"""The ASGI application over one engine.

It runs in anybody's hypercorn (with the trio worker). What only a server can do, bounding stalled
sends and surviving broken connections, is in :mod:`trioserve.http.server`.
"""

from __future__ import annotations

from typing import Any, cast

import quart
from quart_trio import QuartTrio

from trioserve.config import ServerConfig
from trioserve.engine import Engine
from trioserve.http.admin import AdminEndpoints
from trioserve.http.asgi import HTTPConnection, Request, WebSocketConnection, error_response
from trioserve.http.auth import OPEN_PATHS, check_key
from trioserve.http.chat.endpoint import ChatEndpoints
from trioserve.http.completions.endpoint import CompletionEndpoints
from trioserve.http.native.endpoint import NativeEndpoints
from trioserve.http.openai.models import ModelEndpoints
from trioserve.http.routes import ROUTES
from trioserve.http.service import Service
from trioserve.http.utilities.endpoint import UtilityEndpoints
from trioserve.http.utilities.tokens import TokenEndpoints

__all__ = ["App", "create_app"]

BODY_TIMEOUT = 60
"""Seconds that a client has for sending its request's body."""


class App(QuartTrio):
    """A quart application that knows its engine."""

    asgi_http_class = HTTPConnection
    asgi_websocket_class = WebSocketConnection
    request_class = Request
    engine: Engine


def create_app(engine: Engine, config: ServerConfig | None = None) -> App:
    """The application that serves ``engine``.

    Args:
        engine: an open engine; it has to stay open for as long as the application is served.
        config: names, keys and limits (default: those of a server without options).

    ``before_serving`` and ``after_serving`` aren't used: the engine is open before the application
    exists, and is closed by whoever opened it.
    """
    config = config or ServerConfig(engine=engine.config)
    service = Service(
        engine=engine,
        config=config,
        model_names=config.served_model_name or (engine.model_name,),
    )
    app = App("trioserve", static_folder=None)
    app.engine = engine
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = BODY_TIMEOUT
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_size
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    _add_routes(app, service)
    app.register_error_handler(Exception, _on_error)

    @app.before_request
    async def authorize() -> None:  # A function that isn't async would run in a thread each time.
        request = cast(Request, quart.request)
        if request.url_rule is not None:
            request.record.route = request.url_rule.rule
        if config.api_key and request.path not in OPEN_PATHS:
            check_key(request.headers.get("Authorization"), config.api_key)

    return app


def _add_routes(app: App, service: Service) -> None:
    endpoints: list[Any] = [
        ChatEndpoints(service),
        CompletionEndpoints(service),
        ModelEndpoints(service),
        NativeEndpoints(service),
        AdminEndpoints(service),
        TokenEndpoints(service),
        UtilityEndpoints(service),
    ]
    for route in ROUTES:
        (view,) = [
            getattr(endpoint, route.handler)
            for endpoint in endpoints
            if hasattr(endpoint, route.handler)
        ]
        for rule in route.rules:
            app.add_url_rule(rule, endpoint=route.handler, view_func=view, methods=[route.method])


async def _on_error(error: Exception) -> quart.Response:
    response, reply = error_response(error)
    cast(Request, quart.request).record.note_error(reply.reason)
    return response

"""The ASGI application over one engine.

It runs in any hypercorn with the trio worker. Only a server can bound stalled sends and survive
broken connections; :mod:`trioserve.http.server.server` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, overload

import quart
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope
from quart.wrappers.base import BaseRequestWebsocket
from werkzeug.exceptions import BadRequest, MethodNotAllowed
from werkzeug.routing import MapAdapter

from trioserve.config import ServerConfig
from trioserve.engine.engine import Engine
from trioserve.engine.request_engine import RequestEngine
from trioserve.http.api.anthropic.endpoint import MessageEndpoints
from trioserve.http.api.asgi import (
    ConnectionApp,
    HTTPConnection,
    LoggedRequest,
    WebSocketConnection,
    error_response,
    without_prefix,
)
from trioserve.http.api.auth import OPEN_PATHS, Keys, authorization_of
from trioserve.http.api.bodies import BodyBudget
from trioserve.http.api.console.endpoint import ConsoleEndpoints
from trioserve.http.api.console.redirects import console_redirect
from trioserve.http.api.control.endpoint import ControlEndpoints
from trioserve.http.api.cors import CrossOrigin
from trioserve.http.api.feeds.endpoint import FeedEndpoints
from trioserve.http.api.hosts import AllowedHosts
from trioserve.http.api.ollama.endpoint import OllamaEndpoints
from trioserve.http.api.ollama.models import OllamaModelEndpoints
from trioserve.http.api.openai.audio.endpoint import AudioEndpoints
from trioserve.http.api.openai.chat.endpoint import ChatEndpoints
from trioserve.http.api.openai.chat.preparation import ChatPreparation
from trioserve.http.api.openai.completions.endpoint import CompletionEndpoints
from trioserve.http.api.openai.models import ModelEndpoints
from trioserve.http.api.openai.responses.endpoint import ResponseEndpoints
from trioserve.http.api.pooling.embeddings import EmbeddingEndpoints
from trioserve.http.api.pooling.scores import ScoreEndpoints
from trioserve.http.api.prompt_pages import PromptPagesAsked, PromptPagesReader
from trioserve.http.api.route import Route
from trioserve.http.api.routes import served_routes
from trioserve.http.api.server_api import LocalServer, ServerApi
from trioserve.http.api.service import Service
from trioserve.http.api.sessions.endpoint import SessionEndpoints
from trioserve.http.api.sglang.endpoint import NativeEndpoints
from trioserve.http.api.utilities.admin import AdminEndpoints
from trioserve.http.api.utilities.endpoint import UtilityEndpoints
from trioserve.http.api.utilities.tokens import TokenEndpoints
from trioserve.protocol.errors import QueueFull

_REFUSAL_PAUSE = 0.005
"""Seconds between two refusals for a full queue."""


class App(ConnectionApp):
    """Quart application that serves one engine."""

    asgi_http_class = HTTPConnection
    asgi_websocket_class = WebSocketConnection
    request_class = LoggedRequest
    root_path: str
    """Prefix that paths may have in addition to those of the routes."""

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one ASGI connection."""
        await super().__call__(without_prefix(scope, self.root_path), receive, send)

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        """Return the adapter that finds the route of ``request``."""
        try:
            return super().create_url_adapter(request)
        except (BadRequest, UnicodeError):
            assert request is not None
            # The Host isn't a name, or the query isn't text. No route uses either.
            return self.url_map.bind(
                "localhost",
                url_scheme=request.scheme,
                default_method=request.method,
                path_info=request.path,
            )


@overload
def create_app(engine: Engine, config: ServerConfig | None = None) -> App: ...


@overload
def create_app(
    engine: RequestEngine, config: ServerConfig | None = None, *, server_api: ServerApi
) -> App: ...


def create_app(
    engine: RequestEngine,
    config: ServerConfig | None = None,
    *,
    server_api: ServerApi | None = None,
) -> App:
    """Return the application that serves ``engine``.

    Args:
        engine: an open engine; it has to stay open for as long as the application is served.
        config: names, keys and limits (default: those of a server without options).
        server_api: the whole server, if it has several processes (default: this engine).

    ``before_serving`` and ``after_serving`` aren't used: the engine is open before the application
    exists, and its owner closes it.
    """
    config = config or ServerConfig(engine=engine.config)
    server_api = server_api or LocalServer(cast(Engine, engine))
    service = Service(
        engine=engine,
        server_api=server_api,
        config=config,
        model_names=config.served_model_name or (engine.model_name,),
    )
    app = _empty_app(engine, config)
    keys = Keys(
        config.api_key,
        config.admin_api_key,
        priority_keys=config.priority_api_key,
        max_requests=config.max_requests_per_key,
    )
    routes = served_routes(config)
    _add_routes(app, service, keys, routes)
    app.register_error_handler(Exception, _on_error)
    pages = PromptPagesReader(engine)

    async def tell_pages(asked: PromptPagesAsked) -> quart.Response:
        try:
            return await pages.reply(asked)
        except Exception as error:
            return await _on_error(error)

    app.register_error_handler(PromptPagesAsked, tell_pages)
    entry = _Entry(engine, config, server_api, keys, app.cross_origin, routes)
    # Quart would run a function that isn't async in a thread for each request.
    app.before_request(entry.check)
    return app


def _empty_app(engine: RequestEngine, config: ServerConfig) -> App:
    """Return an application with its limits and without routes."""
    app = App("trioserve", static_folder=None)
    app.engine = engine
    app.root_path = config.root_path.rstrip("/")
    app.cross_origin = CrossOrigin(config.allowed_origins)
    app.body_room = BodyBudget.for_bodies_of(config.max_body_size)
    app.config["RESPONSE_TIMEOUT"] = None
    app.config["BODY_TIMEOUT"] = config.request_timeout
    app.config["MAX_CONTENT_LENGTH"] = config.max_body_size
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False
    return app


class _Entry:
    """The checks of every request before its body is read: host, key, permit and room."""

    def __init__(
        self,
        engine: RequestEngine,
        config: ServerConfig,
        server_api: ServerApi,
        keys: Keys,
        cross_origin: CrossOrigin,
        routes: Sequence[Route],
    ) -> None:
        self._config = config
        self._server_api = server_api
        self._keys = keys
        self._cross_origin = cross_origin
        self._hosts = AllowedHosts(config.allowed_hosts, config.host)
        self._admission = _Admission(engine)
        self._generating_rules = {
            rule for route in routes if route.events is not None for rule in route.rules
        }
        self._control_rules = {rule for route in routes if route.control for rule in route.rules}

    async def check(self) -> quart.Response | None:
        """Return an answer that needs no handler, or None; refuse a request by raising."""
        request = cast(LoggedRequest, quart.request)
        rule = request.url_rule
        if rule is not None:
            request.record.route = rule.rule
        answer = _preflight(request, self._cross_origin)
        if answer is None and self._config.console:
            answer = console_redirect(request)
        is_open = request.path in OPEN_PATHS or (rule is not None and rule.rule in OPEN_PATHS)
        if answer is None and not is_open:
            control = rule is not None and rule.rule in self._control_rules
            caller = self._keys.caller(authorization_of(request.headers), control=control)
            if caller is None:
                _check_host(request, self._hosts)
            request.record.key = None if caller is None else caller.name
            request.record.tenant = self._keys.tenant(caller)
            request.record.may_set_priority = self._keys.may_set_priority(caller)
            request.at_end.enter_context(await self._server_api.permit(self._keys, caller))
            if rule is not None and rule.rule in self._generating_rules:
                await self._admission.check(request.record.tenant)
        return answer


def _check_host(request: LoggedRequest, hosts: AllowedHosts) -> None:
    """Refuse a request that a web page may have sent to a host name of its own.

    Raises:
        HostNotAllowed: its host isn't the server's.
    """
    server = request.scope.get("server")
    if server is not None and request.scheme != "https":
        hosts.check(request.headers.get("Host", ""), server[0])


class _Admission:
    """Admission check that refuses requests while the queue is full, before their bodies are read.

    Refusals are sent one after the other, ``_REFUSAL_PAUSE`` apart. A refusal costs as much
    computing time as any short answer. Without the pause, clients that retry at once would take
    that time from admitted requests.
    """

    def __init__(self, engine: RequestEngine) -> None:
        self._engine = engine
        self._turn = trio.Lock()

    async def check(self, tenant: str) -> None:
        """Return if there is room for a request of ``tenant``.

        Raises:
            QueueFull: there is none.
            Draining: the engine is shutting down.
            EngineError: it is closed.
        """
        try:
            self._engine.check_room(tenant)
        except QueueFull:
            async with self._turn:
                await trio.sleep(_REFUSAL_PAUSE)
                self._engine.check_room(tenant)


def _preflight(request: LoggedRequest, cross_origin: CrossOrigin) -> quart.Response | None:
    """Return the answer to a browser's preflight request, which brings no key."""
    refusal = request.routing_exception
    if (
        request.method != "OPTIONS"
        or not isinstance(refusal, MethodNotAllowed)
        or not cross_origin.allows(request.headers.get("Origin"))
    ):
        return None
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = cross_origin.preflight_headers(refusal.valid_methods or (), asked)
    return quart.Response(b"", status=204, headers=headers)


def _add_routes(app: App, service: Service, keys: Keys, routes: Sequence[Route]) -> None:
    chats = ChatPreparation(service)
    tokens = TokenEndpoints(service)
    endpoints: list[Any] = [
        AudioEndpoints(service),
        ChatEndpoints(service, chats),
        CompletionEndpoints(service),
        ConsoleEndpoints(service, keys),
        ControlEndpoints(service),
        EmbeddingEndpoints(service),
        FeedEndpoints(service),
        MessageEndpoints(service, chats, tokens),
        ModelEndpoints(service),
        NativeEndpoints(service),
        OllamaEndpoints(service, chats),
        OllamaModelEndpoints(service, chats.format),
        ResponseEndpoints(service, chats, tokens),
        SessionEndpoints(service),
        AdminEndpoints(service),
        ScoreEndpoints(service),
        tokens,
        UtilityEndpoints(service),
    ]
    for route in routes:
        (view,) = [
            getattr(endpoint, route.handler)
            for endpoint in endpoints
            if hasattr(endpoint, route.handler)
        ]
        for rule in route.rules:
            app.add_url_rule(rule, endpoint=route.handler, view_func=view, methods=[route.method])


async def _on_error(error: Exception) -> quart.Response:
    request = cast(LoggedRequest, quart.request)
    response, reply = error_response(error, request.path)
    request.record.note_error(reply.reason)
    return response

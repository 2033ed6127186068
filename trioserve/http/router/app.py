"""The ASGI application of a router."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any, cast

import attrs
import msgspec
import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable, Scope

from trioserve.config.router import RouterConfig
from trioserve.engine.routing.passed_over import PassedOver, hoped_for
from trioserve.engine.routing.policy import Policy
from trioserve.http.api.bodies import BodyBudget
from trioserve.http.api.errors import CLIENT_CLOSED_REQUEST, NoServer
from trioserve.http.api.hosts import AllowedHosts
from trioserve.http.api.openai.schemas import ModelCard, ModelList
from trioserve.http.api.prompt_pages import HEADER, PromptPagesReply
from trioserve.http.router.affinity import Affinity, NamedInRequest, named_in
from trioserve.http.router.choice import Choice, RoutedRequest, choose
from trioserve.http.router.forwarding import Forwarding, Unreached, WholeAnswer
from trioserve.http.router.metrics import RouterMetrics
from trioserve.http.router.request import ClientRequest
from trioserve.http.router.routes import FoundRoute, Routes
from trioserve.http.router.upstream import RoutedPrompt, Upstream
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import Draining, ShuttingDown

ASK_TIMEOUT = 5.0
"""Seconds for the pages of a prompt; without them the request is routed by load."""
BODY_ROOM = 1 << 30
"""Bytes of all bodies that are held, each until its server answers."""
_BYTES_PER_TOKEN = 4
_JSON = [(b"content-type", b"application/json")]
_log = get_logger("trioserve.router")


class RouterApp:
    """The application over some servers.

    Args:
        config: Its options.
        upstreams: The servers.
        metrics: Counts its requests.
    """

    def __init__(
        self, config: RouterConfig, upstreams: Sequence[Upstream], metrics: RouterMetrics
    ) -> None:
        engine = config.server.engine
        self._config = config
        self._upstreams = upstreams
        self._metrics = metrics
        self._policy = Policy(engine.routing_policy, engine.routing_temperature)
        self._asks = engine.routing_policy in ("predicted", "prefix")
        self._hosts = AllowedHosts(config.server.allowed_hosts, config.server.host)
        self._routes = Routes()
        self._affinity = Affinity()
        self._room = BodyBudget(max(BODY_ROOM, config.server.max_body_size))
        self._draining = False
        self._open: dict[trio.CancelScope, None] = {}
        """Cancel scopes of the requests that are open."""
        self._num_asked = 0
        self._passed_over: PassedOver[tuple[Upstream, int]] = PassedOver()

    async def __call__(
        self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable
    ) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            await _live(cast(Any, receive), cast(Any, send))
        elif scope["type"] == "http":
            most = self._config.server.max_body_size
            request = ClientRequest(scope, receive, send, self._room, most)
            await self._serve(request)
        else:
            await send(cast(Any, {"type": "websocket.close"}))

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def cut(self) -> None:
        """End the open requests with an error."""
        for scope in self._open:
            scope.cancel()

    # ---- one request

    async def _serve(self, request: ClientRequest) -> None:
        """Answer a request, and leave a line in the log."""
        record = _Record(request)
        try:
            with trio.CancelScope() as life:
                self._open[life] = None
                await self._answer(request, record)
            if life.cancelled_caught and not record.has_left:
                error = ShuttingDown("the router is shutting down")
                record.error = (await request.fail(error)).reason
        finally:
            del self._open[life]
            request.release()
            record.write()
            self._metrics.count_answer(record.server, record.status)

    async def _answer(self, request: ClientRequest, record: _Record) -> None:
        """Answer a request; leave it when the client does."""
        error: Exception | None = None
        try:
            found = self._check(request)
        except Exception as failure:
            error = failure
        else:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_receive, request, record, nursery.cancel_scope)
                try:
                    await request.read(self._config.server.request_timeout)
                    await self._route(request, found, record)
                except Exception as failure:
                    error = failure
                nursery.cancel_scope.cancel()
        if error is not None and not record.has_left:
            reply = await request.fail(error)
            record.error = reply.reason
            if reply.reason == "internal_error":
                _log.error("a request failed", exc_info=error)

    def _check(self, request: ClientRequest) -> FoundRoute:
        """Return the route of a request, if it may be answered."""
        server: Any = request.scope["server"]
        has_key = request.header(b"authorization") or request.header(b"x-api-key")
        if server is not None and request.scope["scheme"] != "https" and not has_key:
            self._hosts.check(request.header(b"host").decode("latin-1"), server[0])
        method = request.header(b"access-control-request-method").decode("latin-1")
        preflight = request.method == "OPTIONS" and method
        found = self._routes.find(method if preflight else request.method, request.path)
        if self._draining and not found.is_own:
            raise Draining("the router is shutting down")
        return found

    async def _route(self, request: ClientRequest, found: FoundRoute, record: _Record) -> None:
        """Answer a request whose body has been read."""
        if found.is_own and request.method != "OPTIONS":
            await self._answer_own(request, found.route.rule)
            return
        named = named_in(request.body) if request.method == "POST" else NamedInRequest()
        id = found.response_id or named.lives_at
        among = [each for each in self._upstreams if each.is_up]
        sticky = await self._server_of(id, request, among) if id else None
        if sticky is not None:
            if not sticky.is_up:
                raise NoServer(f"the server that has {id!r} is out: {sticky.out_because}")
            among = [sticky]
        elif named.model is not None:
            among = [each for each in among if named.model in each.models] or among
        routed = await self._asked(request, found, among)
        if isinstance(routed, WholeAnswer):
            await request.answer(routed.status, routed.headers, routed.body)
            return
        await self._forward(request, found, record, routed, among, is_sticky=sticky is not None)
        if named.session_id is not None and record.choice is not None:
            self._affinity.note(named.session_id, record.choice.upstream)

    async def _forward(
        self,
        request: ClientRequest,
        found: FoundRoute,
        record: _Record,
        routed: RoutedRequest,
        among: list[Upstream],
        *,
        is_sticky: bool,
    ) -> None:
        """Forward a request to the best server, and to the next ones if it can't be reached."""
        error: Exception = NoServer("no server is there that computes now")
        while (choice := choose(self._policy, among, routed, sticky=is_sticky)) is not None:
            record.choice = choice
            self._metrics.count_choice(choice, routed.num_tokens)
            upstream = choice.upstream
            self._note_choice(choice, among)
            among = [each for each in among if each is not upstream]
            sent = upstream.send(choice.worker, routed.prompts, choice.num_cached)
            try:
                await self._forwarding(upstream, request).run(
                    is_last=not among,
                    on_answer=functools.partial(upstream.note_answer, sent),
                    on_first=functools.partial(self._on_first, record, found, upstream),
                )
            except Unreached as failure:
                error = failure.as_error()
                self._metrics.count_retry(upstream.url)
                _log.warning("server gave no answer", server=upstream.url, reason=str(failure))
                if not failure.connected:
                    upstream.out_because = str(failure)
            else:
                return
            finally:
                upstream.note_end(sent)
        raise error

    def _note_choice(self, choice: Choice, among: Sequence[Upstream]) -> None:
        """Note a choice, and the workers of ``among`` that got no request for long."""
        workers = [(each, worker) for each in among for worker in each.copied.loads]
        passed_over = self._passed_over.note((choice.upstream, choice.worker), workers)
        report = choice.upstream.copied.loads[choice.worker]
        for upstream, worker in passed_over if report.is_known else ():
            upstream.assume(worker, hoped_for(report.model()))

    def _on_first(
        self, record: _Record, found: FoundRoute, upstream: Upstream, data: bytes
    ) -> None:
        """Note the first bytes of an answer."""
        if found.generates:
            record.first_bytes = trio.current_time() - record.started
            self._metrics.count_first_bytes(record.first_bytes)
        self._affinity.note_answer(found.route.rule, data, upstream)

    # ---- what is known of a request

    async def _asked(
        self, request: ClientRequest, found: FoundRoute, among: Sequence[Upstream]
    ) -> RoutedRequest | WholeAnswer:
        """Return a request's prompts as one of the servers reads them, or its refusal.

        The servers take turns. If only one may be chosen, or none can say, the length of the body
        stands for the prompt.
        """
        guess = RoutedPrompt(num_tokens=len(request.body) // _BYTES_PER_TOKEN + 1)
        unknown = RoutedRequest(prompts=[guess])
        if not (self._asks and found.generates and len(among) > 1 and request.method == "POST"):
            return unknown
        self._num_asked += 1
        upstream = among[self._num_asked % len(among)]
        answer: WholeAnswer | None = None
        with trio.move_on_after(ASK_TIMEOUT):
            try:
                forwarding = self._forwarding(upstream, request)
                answer = await forwarding.whole((HEADER.lower().encode(), b"1"))
            except Unreached as failure:
                if not failure.connected:
                    upstream.out_because = str(failure)
        if answer is None or answer.status == 429 or answer.status >= 500:
            return unknown
        if answer.status != 200:
            return answer
        reply = msgspec.json.decode(answer.body, type=PromptPagesReply)
        prompts = [
            RoutedPrompt(num_tokens=each.num_tokens, hashes=array("Q", each.hashes))
            for each in reply.prompts
        ]
        return RoutedRequest(prompts=prompts, page_size=reply.page_size)

    async def _server_of(
        self, id: str, request: ClientRequest, among: Sequence[Upstream]
    ) -> Upstream | None:
        """Return the server that has a session or a kept response; None if none is known to.

        A kept response may be older than this router, so all servers are asked for it.
        """
        known = self._affinity.server_of(id)
        if known is not None or not id.startswith("resp_") or "/" in id or not id.isprintable():
            return known
        for upstream in among:
            try:
                answer = await self._forwarding(upstream, request).get(f"/v1/responses/{id}")
            except Unreached:
                continue
            if answer.status == 200:
                self._affinity.note(id, upstream)
                return upstream
        return None

    def _forwarding(self, upstream: Upstream, request: ClientRequest) -> Forwarding:
        return Forwarding(
            upstream=upstream, request=request, connect_timeout=self._config.upstream_timeout
        )

    # ---- the router's own routes

    async def _answer_own(self, request: ClientRequest, rule: str) -> None:
        status, headers = 200, _JSON
        if rule == "/metrics":
            headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
            body = self._metrics.render()
        elif rule == "/health":
            status, body = self._health()
        else:
            names = dict.fromkeys(
                name for each in self._upstreams if each.is_up for name in sorted(each.models)
            )
            body = msgspec.json.encode(ModelList([_card(name) for name in names]))
        await request.answer(status, headers, body)

    def _health(self) -> tuple[int, bytes]:
        """Return the status and the body of ``/health``."""
        any_up = any(each.is_up for each in self._upstreams)
        word = "draining" if self._draining else "ok" if any_up else "no_server"
        servers = [
            {"url": each.url, "up": each.is_up, "reason": each.out_because}
            for each in self._upstreams
        ]
        body = msgspec.json.encode({"status": word, "servers": servers})
        return (200 if word == "ok" else 503), body


@attrs.define(eq=False)
class _Record:
    """The line of one request in the log."""

    request: ClientRequest
    started: float = attrs.field(factory=trio.current_time)
    choice: Choice | None = None
    first_bytes: float | None = None
    """Seconds to the first bytes of the answer's body."""
    has_left: bool = False
    """True if the client has left before the end of the answer."""
    error: str | None = None

    @property
    def server(self) -> str:
        """URL of the server that was chosen last; empty if none was."""
        return self.choice.upstream.url if self.choice else ""

    @property
    def status(self) -> int:
        """Status of the answer."""
        return CLIENT_CLOSED_REQUEST if self.has_left else self.request.status

    def write(self) -> None:
        """Write the line."""
        fields: dict[str, Any] = {}
        if self.choice is not None:
            fields = {"server": self.server, "reason": self.choice.reason}
            fields["cached_tokens"] = self.choice.num_cached
        if self.first_bytes is not None:
            fields["ttft_ms"] = round(1000 * self.first_bytes, 1)
        if self.error is not None:
            fields["error"] = self.error
        _log.info(
            "request",
            method=self.request.method,
            path=self.request.path,
            status=self.status,
            duration_ms=round(1000 * (trio.current_time() - self.started), 1),
            **fields,
        )


def _card(name: str) -> ModelCard:
    return ModelCard(id=name, created=0, root=name, parent=None, max_model_len=0)


async def _receive(request: ClientRequest, record: _Record, scope: trio.CancelScope) -> None:
    """Take in the body, and cancel ``scope`` when the client leaves."""
    await request.receive()
    if not request.completed:
        record.has_left = True
    scope.cancel()


async def _live(receive: Any, send: Any) -> None:
    """Answer the server's messages about its start and end."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return

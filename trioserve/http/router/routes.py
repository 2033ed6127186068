"""The routes that a router forwards, found among those of a server."""

from __future__ import annotations

import attrs
from werkzeug.exceptions import MethodNotAllowed, NotFound
from werkzeug.routing import Map, Rule

from trioserve.http.api.errors import Forbidden
from trioserve.http.api.route import Route
from trioserve.http.api.routes import ROUTES

_FORWARDED = ("Generation", "Embeddings and scores", "Speech", "Tokens", "Models")
"""Groups of routes that any server answers alike, or the one that has the session."""
_ALSO = frozenset({"/", "/version", "/api/version", "/openapi.json", "/health_generate"})
OWN = frozenset({"/health", "/metrics", "/v1/models"})
"""Routes that the router answers itself."""


@attrs.frozen
class FoundRoute:
    """The route of a request."""

    route: Route
    response_id: str | None
    """The id of a kept response in the path."""

    @property
    def is_own(self) -> bool:
        """True if the router answers itself."""
        return self.route.rule in OWN

    @property
    def generates(self) -> bool:
        """True if the request has prompts that a prefix cache may have."""
        return self.route.events is not None and not self.route.is_form


class Routes:
    """The routes by path and method."""

    def __init__(self) -> None:
        rules = [
            Rule(rule, endpoint=route, methods=[route.method])
            for route in ROUTES
            for rule in route.rules
        ]
        self._adapter = Map(rules).bind("localhost")

    def find(self, method: str, path: str) -> FoundRoute:
        """Return the route of a request.

        Raises:
            NotFound: There is none.
            MethodNotAllowed: There is one for other methods.
            Forbidden: The route is about one server, not about all.
        """
        route, values = self._adapter.match(path, method)
        is_forwarded = route.group in _FORWARDED or route.rule in _ALSO
        if route.control or not (is_forwarded or route.rule in OWN):
            raise Forbidden("a router doesn't forward this route: ask the server itself")
        return FoundRoute(route, values.get("response_id"))


__all__ = ["OWN", "FoundRoute", "MethodNotAllowed", "NotFound", "Routes"]

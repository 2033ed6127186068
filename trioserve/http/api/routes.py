"""Every route that the application serves and ``/openapi.json`` describes.

The routes of an API are in its own folder, beside their handlers.
"""

from __future__ import annotations

from trioserve.config import ServerConfig
from trioserve.http.api.anthropic.routes import ROUTES as MESSAGES
from trioserve.http.api.console.routes import ROUTES as CONSOLE
from trioserve.http.api.control.routes import ROUTES as CONTROL
from trioserve.http.api.feeds.routes import ROUTES as FEEDS
from trioserve.http.api.ollama.routes import ROUTES as OLLAMA
from trioserve.http.api.openai.audio.routes import ROUTES as AUDIO
from trioserve.http.api.openai.chat.routes import ROUTES as CHAT
from trioserve.http.api.openai.completions.routes import ROUTES as COMPLETIONS
from trioserve.http.api.openai.responses.routes import ROUTES as RESPONSES
from trioserve.http.api.openai.routes import ROUTES as MODELS
from trioserve.http.api.pooling.routes import ROUTES as POOLING
from trioserve.http.api.route import Route
from trioserve.http.api.sessions.routes import ROUTES as SESSIONS
from trioserve.http.api.sglang.routes import ROUTES as NATIVE
from trioserve.http.api.utilities.routes import ROUTES as UTILITIES

ROUTES = (
    *CHAT,
    *COMPLETIONS,
    *NATIVE,
    *MESSAGES,
    *RESPONSES,
    *SESSIONS,
    *POOLING,
    *AUDIO,
    *MODELS,
    *UTILITIES,
    *FEEDS,
    *CONSOLE,
    *OLLAMA,
    *CONTROL,
)
"""All routes; within a group, the documentation keeps this order."""


def served_routes(config: ServerConfig) -> tuple[Route, ...]:
    """Return the routes of a server with these options."""
    return tuple(route for route in ROUTES if config.console or route not in CONSOLE)

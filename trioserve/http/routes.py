"""Every route: what the application serves and what ``/openapi.json`` describes.

An area's routes stand in its own folder, beside their handlers.
"""

from __future__ import annotations

from trioserve.http.chat.routes import ROUTES as CHAT
from trioserve.http.completions.routes import ROUTES as COMPLETIONS
from trioserve.http.control.routes import ROUTES as CONTROL
from trioserve.http.feeds.routes import ROUTES as FEEDS
from trioserve.http.messages.routes import ROUTES as MESSAGES
from trioserve.http.native.routes import ROUTES as NATIVE
from trioserve.http.ollama.routes import ROUTES as OLLAMA
from trioserve.http.openai.routes import ROUTES as MODELS
from trioserve.http.pooling.routes import ROUTES as POOLING
from trioserve.http.responses.routes import ROUTES as RESPONSES
from trioserve.http.sessions.routes import ROUTES as SESSIONS
from trioserve.http.utilities.routes import ROUTES as UTILITIES

__all__ = ["ROUTES"]

ROUTES = (
    *CHAT,
    *COMPLETIONS,
    *NATIVE,
    *MESSAGES,
    *RESPONSES,
    *SESSIONS,
    *POOLING,
    *MODELS,
    *UTILITIES,
    *FEEDS,
    *OLLAMA,
    *CONTROL,
)
"""In the order in which the documentation shows those of a group."""

"""The console's routes."""

from __future__ import annotations

from trioserve.http.api.console.schemas import LiveQuery
from trioserve.http.api.route import Route

ROUTES = (
    Route(
        method="GET",
        rule="/console",
        handler="console_page",
        summary="The console, for a browser",
        group="The server",
        response="text/html",
    ),
    Route(
        method="GET",
        rule="/console/static/<path:name>",
        handler="console_file",
        summary="One of the console's files",
        group="The server",
        response="text/javascript",
        errors=(404,),
    ),
    Route(
        method="GET",
        rule="/console/live",
        handler="console_live",
        summary="Snapshots of the engine, as events",
        group="The server",
        query=LiveQuery,
        response="text/event-stream",
        errors=(400, 429),
    ),
)

"""Redirects of a browser that is looking for the console."""

from __future__ import annotations

import quart

from trioserve.http.api.console.files import SECURITY_HEADERS


def console_redirect(request: quart.Request) -> quart.Response | None:
    """Return a redirect to ``/console``, or None if the request isn't for it.

    ``/console/`` always leads there; ``/`` does for a client that prefers HTML to JSON. Locations
    are relative, so they hold below any prefix.
    """
    if request.method not in ("GET", "HEAD"):
        return None
    if request.path == "/console/":
        location = "../console"
    elif request.path == "/" and _prefers_html(request):
        location = "console"
    else:
        return None
    headers = {**SECURITY_HEADERS, "Location": location, "Vary": "Accept"}
    return quart.Response(b"", status=307, headers=headers)


def _prefers_html(request: quart.Request) -> bool:
    accepted = request.accept_mimetypes
    return accepted["text/html"] > accepted["application/json"]

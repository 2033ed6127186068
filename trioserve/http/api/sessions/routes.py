"""The routes of sessions."""

from __future__ import annotations

from trioserve.http.api.control.schemas import Done
from trioserve.http.api.route import Route
from trioserve.http.api.sessions.schemas import CloseSessionRequest, OpenSessionRequest

ROUTES = (
    Route(
        method="POST",
        rule="/open_session",
        handler="open_session",
        summary="Open a session, in which the server remembers the turns of a conversation; "
        "the answer is its id",
        group="Generation",
        peers="SGLang",
        request=OpenSessionRequest,
        response=str,
        errors=(429,),
    ),
    Route(
        method="POST",
        rule="/close_session",
        handler="close_session",
        summary="Close a session, and end its running turns",
        group="Generation",
        peers="SGLang",
        request=CloseSessionRequest,
        response=Done,
    ),
)

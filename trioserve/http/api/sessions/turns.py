"""Translation of a request's ``session_params`` to a turn of a session."""

from __future__ import annotations

import attrs

from trioserve.engine.sessions.continuation import Continuation
from trioserve.http.api.generations import renamed
from trioserve.http.api.jobs import PromptJob
from trioserve.http.api.service import Service
from trioserve.http.api.sessions.schemas import SessionParams
from trioserve.protocol.errors import InvalidRequest

_FIELD = "session_params"
_RENAMES = {
    "session": f"{_FIELD}.id",
    "session_id": f"{_FIELD}.id",
    "after": f"{_FIELD}.rid",
    "request_id": "rid",
}


def as_turn(
    service: Service, params: SessionParams | None, jobs: list[PromptJob]
) -> list[PromptJob]:
    """Return ``jobs``, the only one of them as a turn of its session if ``params`` name one.

    Raises:
        InvalidRequest: there are several prompts, or the client has no such session. If other
            processes have the sessions, the second is raised when the turn begins.
    """
    if params is None or params == SessionParams():
        return jobs
    if params.id is None:
        raise InvalidRequest(f"{_FIELD} needs id", param=f"{_FIELD}.id")
    if len(jobs) != 1:
        raise InvalidRequest(
            f"a turn of a session has one prompt, got {len(jobs)}", param=f"{_FIELD}.id"
        )
    continuation = Continuation(
        after=params.rid,
        offset=params.offset or None,
        replace=bool(params.replace),
        drop_previous_output=bool(params.drop_previous_output),
    )
    try:
        turn = service.server_api.turn(params.id, service.record.key, continuation)
    except InvalidRequest as error:
        raise renamed(error, _RENAMES) from None
    return [attrs.evolve(jobs[0], turn=turn, renames={**jobs[0].renames, **_RENAMES})]

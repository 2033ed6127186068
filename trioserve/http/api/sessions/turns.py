"""From a request's ``session_params`` to the session that it is a turn of."""

from __future__ import annotations

import attrs

from trioserve.engine.sessions.continuation import Continuation
from trioserve.http.api.generations import PromptJob, renamed
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
    """``jobs`` as they are, or the one that there has to be as a turn of the session.

    Raises:
        InvalidRequest: there are several prompts, or no such session of this client's; where other
            processes have the sessions, that is told when the turn begins.
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

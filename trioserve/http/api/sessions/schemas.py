"""Requests and answers that have to do with sessions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.engine.sessions.sessions import MAX_CAPACITY
from trioserve.http.api.schema.reading import Identifier, about

MAX_TIMEOUT = 86_400.0
DEFAULT_TIMEOUT = 600.0
"""Seconds."""
_INT32 = 2**31 - 1
_Offset = Annotated[int, msgspec.Meta(ge=-_INT32, le=_INT32)]


class OpenSessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /open_session``."""

    capacity_of_str_len: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=_INT32)],
        about(
            "How much its turns may hold, counted in tokens, not in characters; more than "
            f"{MAX_CAPACITY} is as good as that."
        ),
    ]
    session_id: Annotated[Identifier | None, about("A name for it; a random one if not given.")] = (
        None
    )
    streaming: Annotated[
        bool | None,
        about(
            "Whether a turn that names no `rid` goes on from the last one; if not, it begins anew."
        ),
    ] = None
    timeout: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)] | None,
        about("Seconds without a turn after which it is closed; 600 if it isn't given."),
    ] = None


class CloseSessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /close_session``."""

    session_id: Annotated[Identifier, about("What `/open_session` answered.")]


class SessionParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which session a request is a turn of, and where it goes on from."""

    id: Annotated[
        Identifier | None, about("The session's; without it, the request isn't a turn.")
    ] = None
    rid: Annotated[
        Identifier | None,
        about("The id of the turn to go on from, as its answer told it; see `streaming`."),
    ] = None
    offset: Annotated[
        _Offset | None,
        about(
            "Keep only so many tokens of what came before; negative numbers count from its end; 0, "
            "as if it isn't given: all."
        ),
    ] = None
    replace: Annotated[
        bool | None,
        about(
            "Once this turn has ended, forget all others that went on from `rid`; without `rid`, "
            "forget everything."
        ),
    ] = None
    drop_previous_output: Annotated[
        bool | None, about("Leave out the output of the turn before.")
    ] = None

"""Requests and answers for sessions, as classes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.engine.sessions.session import MAX_CAPACITY
from trioserve.http.api.schema.reading import Identifier, about

MAX_TIMEOUT = 86_400.0
DEFAULT_TIMEOUT = 600.0
"""Default timeout in seconds."""
_INT32 = 2**31 - 1
_Offset = Annotated[int, msgspec.Meta(ge=-_INT32, le=_INT32)]


class OpenSessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /open_session``."""

    capacity_of_str_len: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=_INT32)],
        about(
            "Limit of a turn's length, counted in tokens, not in characters; larger numbers "
            f"than {MAX_CAPACITY} have the same effect."
        ),
    ]
    session_id: Annotated[Identifier | None, about("A name for it; a random one by default.")] = (
        None
    )
    streaming: Annotated[
        bool | None,
        about(
            "Whether a turn that names no `rid` continues the last one; if not, it begins "
            "from scratch."
        ),
    ] = None
    timeout: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=MAX_TIMEOUT)] | None,
        about("Seconds without a turn after which it is closed; 600 by default."),
    ] = None


class CloseSessionRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /close_session``."""

    session_id: Annotated[Identifier, about("The answer of `/open_session`.")]


class SessionParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The session of a request, and the turn that it continues."""

    id: Annotated[
        Identifier | None, about("The session's id; without it, the request isn't a turn.")
    ] = None
    rid: Annotated[
        Identifier | None,
        about("The id of the turn to continue, from its answer; see `streaming`."),
    ] = None
    offset: Annotated[
        _Offset | None,
        about(
            "Keep only this many tokens of the earlier turns; negative numbers count from "
            "their end; 0, the default: all."
        ),
    ] = None
    replace: Annotated[
        bool | None,
        about(
            "Once this turn has ended, forget all others that continued `rid`; without `rid`, "
            "forget everything."
        ),
    ] = None
    drop_previous_output: Annotated[
        bool | None, about("Leave out the output of the turn before.")
    ] = None

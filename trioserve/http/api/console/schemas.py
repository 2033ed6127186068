"""What the live feed may be asked for."""

from __future__ import annotations

from typing import Annotated

import msgspec

from trioserve.http.api.schema.reading import about
from trioserve.observability.live import (
    DEFAULT_INTERVAL,
    DEFAULT_NODES,
    DEFAULT_REQUESTS,
    MAX_NODES,
    MAX_REQUESTS,
)


class LiveQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of ``GET /console/live``."""

    interval: Annotated[
        Annotated[float, msgspec.Meta(ge=0.1, le=10)], about("Seconds between two pictures.")
    ] = DEFAULT_INTERVAL
    requests: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)],
        about("Requests in a picture at most; those that run come before those that wait."),
    ] = DEFAULT_REQUESTS
    pictures: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None,
        about("The feed ends after so many; when the client leaves, if it isn't given."),
    ] = None
    nodes: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)],
        about("Nodes of the prefix tree in a picture at most."),
    ] = DEFAULT_NODES

"""Query of the live feed."""

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
        Annotated[float, msgspec.Meta(ge=0.1, le=10)], about("Seconds between two snapshots.")
    ] = DEFAULT_INTERVAL
    requests: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUESTS)],
        about("Most requests in a snapshot; running ones come before waiting ones."),
    ] = DEFAULT_REQUESTS
    pictures: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None,
        about(
            "Number of snapshots after which the feed ends; by default it ends when the "
            "client leaves."
        ),
    ] = None
    nodes: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=MAX_NODES)],
        about("Most nodes of the prefix tree in a snapshot."),
    ] = DEFAULT_NODES

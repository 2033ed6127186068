"""The engine as it is right now, for whoever watches; it costs nothing while nobody does.

::

    async with trioserve.live.watch(engine) as pictures:
        async for picture in pictures:
            print(picture.counts.running, picture.rates.generated_tokens_per_s)

A :class:`Picture` is made of what the engine keeps anyway, when it is asked for. Only what would be
gone by then is recorded, as long as somebody watches: the newest steps, and the requests that end.
"""

from __future__ import annotations

from trioserve.observability.live.schema import SCHEMA, Hello, Picture
from trioserve.observability.live.subject import (
    DEFAULT_NODES,
    DEFAULT_REQUESTS,
    MAX_NODES,
    MAX_REQUESTS,
    MAX_WATCHERS,
    Subject,
    Watcher,
)
from trioserve.observability.live.watching import (
    DEFAULT_INTERVAL,
    Watching,
    due_after,
    hello_of,
    subject_of,
    watch,
)

__all__ = [
    "DEFAULT_INTERVAL",
    "DEFAULT_NODES",
    "DEFAULT_REQUESTS",
    "MAX_NODES",
    "MAX_REQUESTS",
    "MAX_WATCHERS",
    "SCHEMA",
    "Hello",
    "Picture",
    "Subject",
    "Watcher",
    "Watching",
    "due_after",
    "hello_of",
    "subject_of",
    "watch",
]

"""The snapshots of a server's live feed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

import attrs
import msgspec
import trio

from trioserve.load.answer import DECODING_ERRORS
from trioserve.load.events import Event
from trioserve.load.remote import RefusedRequest, Remote, RemoteError, RemoteEvents
from trioserve.observability.live.schema import SCHEMA, Hello, Snapshot
from trioserve.protocol.errors import printable

_SILENCE = 30.0
"""Seconds without a snapshot, beyond the interval, after which the server counts as lost."""

_MAX_VALUES = 1 << 18
_MAX_NUMBER = 1 << 53
_MAX_DEPTH = 200
"""Most levels of a snapshot's JSON, because the tree of tasks is drawn recursively."""

Decoded = TypeVar("Decoded")


@attrs.frozen
class Shown:
    """A snapshot, and its JSON as received."""

    snapshot: Snapshot
    data: bytes


@attrs.define(eq=False)
class SnapshotFeed:
    """An open feed, an async iterator of snapshots. ``hello`` describes the server."""

    hello: Hello
    _url: str
    _events: RemoteEvents
    _timeout: float

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, remote: Remote, base_path: str, interval: float
    ) -> AsyncIterator[SnapshotFeed]:
        """Open the feed of the server at ``base_path``, with a snapshot each ``interval`` seconds.

        Raises:
            RemoteError: The server can't be reached, has no such feed, or refuses.
        """
        path = f"{base_path}/console/live?interval={interval:g}&nodes=0"
        timeout = interval + _SILENCE
        try:
            async with contextlib.AsyncExitStack() as stack:
                with _time_limit(timeout, remote.url):
                    events = await stack.enter_async_context(remote.events(path))
                first = await _next(events, remote.url, timeout)
                if first is None or first.name != "hello":
                    raise RemoteError(f"{remote.url} has no live feed")
                hello = _decode(first.data, Hello, remote.url)
                yield cls(hello, remote.url, events, timeout)
        except RefusedRequest as refusal:
            if refusal.status != 404:
                raise
            raise RemoteError(
                f"{remote.url} has no live feed: it isn't trioserve, or runs with --no-console"
            ) from refusal

    def __aiter__(self) -> SnapshotFeed:
        return self

    async def __anext__(self) -> Shown:
        """Return the next snapshot.

        Raises:
            RemoteError: The server is lost, or sends JSON of another schema.
        """
        while True:
            event = await _next(self._events, self._url, self._timeout)
            if event is None:
                raise StopAsyncIteration
            if event.name == "picture":
                return Shown(_decode(event.data, Snapshot, self._url), event.data)


async def _next(events: RemoteEvents, url: str, timeout: float) -> Event | None:
    with _time_limit(timeout, url):
        return await anext(events, None)


@contextlib.contextmanager
def _time_limit(seconds: float, url: str) -> Iterator[None]:
    try:
        with trio.fail_after(seconds):
            yield
    except trio.TooSlowError as error:
        raise RemoteError(f"{url} has sent nothing for {seconds:g} s") from error


def _decode(data: bytes, kind: type[Decoded], url: str) -> Decoded:
    """Decode ``data``, without control characters in its texts.

    Raises:
        RemoteError: The data has another schema, or can't be drawn.
    """
    try:
        value = _drawable(msgspec.json.decode(data)) if data.count(b",") <= _MAX_VALUES else None
        return msgspec.convert(value, kind, str_keys=True)
    except (*DECODING_ERRORS, msgspec.ValidationError) as error:
        # Another version of the server may lack a field, or have another type.
        raise RemoteError(
            f"{url} sends snapshots of another version than {SCHEMA}: {error}"
        ) from error


def _drawable(value: Any, depth: int = 0) -> Any:
    """Return the JSON ``value`` with printable texts.

    Raises:
        msgspec.ValidationError: It is nested too deeply, or a number is too large.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (int, float)) and not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise msgspec.ValidationError("a number is too large")
    if isinstance(value, (list, dict)) and depth == _MAX_DEPTH:
        raise msgspec.ValidationError(f"it is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_drawable(each, depth + 1) for each in value]
    if isinstance(value, dict):
        return {name: _drawable(each, depth + 1) for name, each in value.items()}
    return value

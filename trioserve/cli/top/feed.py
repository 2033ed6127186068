"""The pictures of a server's live feed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TypeVar

import attrs
import msgspec
import trio

from trioserve.live.schema import SCHEMA, Hello, Picture
from trioserve.load.events import Event
from trioserve.load.remote import Events, Refusal, Remote, RemoteError

__all__ = ["Feed", "Shown"]

_SILENCE = 30.0
"""Seconds, beside the interval, after which a server that sends nothing counts as lost."""

Decoded = TypeVar("Decoded")


@attrs.frozen
class Shown:
    """A picture, and the JSON that it came as."""

    picture: Picture
    data: bytes


@attrs.define(eq=False)
class Feed:
    """An open feed: an async iterator of pictures, about whose server ``hello`` tells."""

    hello: Hello
    _url: str
    _events: Events
    _patience: float

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, remote: Remote, base_path: str, interval: float) -> AsyncIterator[Feed]:
        """The feed of the server at ``base_path``, with a picture each ``interval`` seconds.

        Raises:
            RemoteError: the server can't be reached, has no such feed, or refuses.
        """
        path = f"{base_path}/console/live?interval={interval:g}&nodes=0"
        patience = interval + _SILENCE
        try:
            async with remote.events(path) as events:
                first = await _next(events, remote.url, patience)
                if first is None or first.name != "hello":
                    raise RemoteError(f"{remote.url} has no live feed")
                hello = _decode(first.data, Hello, remote.url)
                yield cls(hello, remote.url, events, patience)
        except Refusal as refusal:
            if refusal.status != 404:
                raise
            raise RemoteError(
                f"{remote.url} has no live feed: it is no trioserve, or runs with --no-console"
            ) from refusal

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Shown:
        """The next picture.

        Raises:
            RemoteError: the server is lost, or says what isn't understood.
        """
        while True:
            event = await _next(self._events, self._url, self._patience)
            if event is None:
                raise StopAsyncIteration
            if event.name == "picture":
                return Shown(_decode(event.data, Picture, self._url), event.data)


async def _next(events: Events, url: str, patience: float) -> Event | None:
    with trio.move_on_after(patience):
        return await anext(events, None)
    raise RemoteError(f"{url} has sent nothing for {patience:g} s")


def _decode(data: bytes, kind: type[Decoded], url: str) -> Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # A field that came later than this version, or has gone since.
        raise RemoteError(
            f"{url} sends pictures of another version than {SCHEMA}: {error}"
        ) from error

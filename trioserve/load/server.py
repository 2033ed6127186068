"""A server as ``trioserve bench`` finds it: its address, what it calls its model, how to ask it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs
import msgspec
import trio

from trioserve.load.connect import Connect, reason_of
from trioserve.load.measure import MeasureError
from trioserve.load.response import InvalidAnswer, ResponseReader

__all__ = ["ServerInfo", "ask_models"]

_TIMEOUT = 30.0
_READ_SIZE = 65536
_MAX_BYTES = 4 << 20


@attrs.frozen(kw_only=True)
class ServerInfo:
    """What a server says of itself."""

    software: str
    """Its Server header."""
    models: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def ask_models(
    connect: Connect, host: str, path: str, headers: Mapping[str, str], url: str
) -> ServerInfo:
    """Ask ``GET path``; a server that doesn't have it lists no models.

    Raises:
        MeasureError: it can't be reached, or refuses.
    """
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    response, body = ResponseReader(), b""
    try:
        with trio.fail_after(_TIMEOUT):
            stream = await connect()
            async with contextlib.aclosing(stream):
                await stream.send_all("\r\n".join([*lines, "", ""]).encode())
                while not response.ended and len(body) < _MAX_BYTES:
                    body += response.feed(bytes(await stream.receive_some(_READ_SIZE)))
    except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
        raise MeasureError(f"{url} can't be reached: {reason_of(error)}") from error
    except InvalidAnswer as error:
        raise MeasureError(f"{url} is no HTTP server: {error}") from error
    if response.status in (401, 403):
        raise MeasureError(f"{url} refuses with {response.status}: give the right --api-key")
    names: tuple[str, ...] = ()
    if response.status == 200:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            names = tuple(model.id for model in msgspec.json.decode(body, type=_Models).data)
    software = response.headers.get(b"server", b"").decode(errors="replace")
    return ServerInfo(software=software, models=names)

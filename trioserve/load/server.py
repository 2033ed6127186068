"""A server for ``trioserve bench``: its address, its model's name, and its software."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs
import msgspec

from trioserve.load.connect import Connect
from trioserve.load.measure import MeasureError
from trioserve.load.remote import Remote, RemoteError


@attrs.frozen(kw_only=True)
class ServerFacts:
    """Facts about a server that it reports itself."""

    software: str
    """Value of the Server header."""
    models: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


async def ask_models(
    connect: Connect, host: str, path: str, headers: Mapping[str, str], url: str
) -> ServerFacts:
    """Return the answer of ``GET path``; a server without this path lists no models.

    Raises:
        MeasureError: The server can't be reached, or refuses the key.
    """
    remote = Remote(connect=connect, host=host, url=url, headers=headers)
    try:
        answer = await remote.get(path)
    except RemoteError as error:
        raise MeasureError(str(error)) from error
    if answer.status in (401, 403):
        raise MeasureError(f"{url} refuses with {answer.status}: give the right --api-key")
    names: tuple[str, ...] = ()
    if answer.status == 200:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            names = tuple(model.id for model in msgspec.json.decode(answer.body, type=_Models).data)
    software = answer.headers.get(b"server", b"").decode(errors="replace")
    return ServerFacts(software=software, models=names)

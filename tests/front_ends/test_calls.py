"""The table of remote calls: each entry has a handler and a caller."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import trioserve.front_ends
from trioserve.front_ends.calls import AdministrationCalls, EngineCalls, FrontEndCalls, Table
from trioserve.front_ends.client.server_api import RemoteServer
from trioserve.front_ends.server.administration import HostedAdministration
from trioserve.front_ends.server.permits import FrontEndPermits
from trioserve.front_ends.server.subscriptions import FrontEndSubscriptions
from trioserve.front_ends.server.turns import FrontEndTurns
from trioserve.http.api.server_api import ServerApi
from trioserve.requests.media import encoding
from trioserve.requests.media.encoder import WorkerMediaEncoder
from trioserve.requests.speech import reader

FOLDER = Path(trioserve.front_ends.__file__).parent
SIDES = [
    (
        EngineCalls,
        (
            *(HostedAdministration, FrontEndTurns, FrontEndSubscriptions, FrontEndPermits),
            WorkerMediaEncoder,
        ),
        "client",
    ),
    (FrontEndCalls, (RemoteServer,), "server"),
]


@pytest.mark.parametrize(("table", "parts", "callers"), SIDES)
def test_each_entry_has_one_handler_with_its_signature(
    table: type[Table], parts: tuple[type, ...], callers: str
) -> None:
    for call in table.entries():
        (handler,) = [getattr(part, call.name) for part in parts if hasattr(part, call.name)]
        assert inspect.iscoroutinefunction(handler)
        assert list(inspect.signature(handler).parameters) == list(call.signature.parameters)


@pytest.mark.parametrize(("table", "parts", "callers"), SIDES)
def test_each_entry_has_a_caller(table: type[Table], parts: tuple[type, ...], callers: str) -> None:
    # A front end's reading of media and speech has the calls as its encoder.
    files = [*(FOLDER / callers).glob("*.py"), Path(encoding.__file__), Path(reader.__file__)]
    text = "".join(path.read_text() for path in files)
    for call in table.entries():
        # HTTP calls the operators' part of the table, which is a base class of the remote server.
        by_http = call in AdministrationCalls.entries() and hasattr(ServerApi, call.name)
        assert by_http or re.search(rf"\b(calls|encoder)\.{call.name}\(", text), call.name


def test_a_name_stands_for_one_call() -> None:
    for table in (EngineCalls, FrontEndCalls):
        names = [call.name for call in table.entries()]
        assert len(names) == len(set(names))

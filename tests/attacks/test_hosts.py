"""A web page whose own name points to the server (DNS rebinding)."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.attacks.siege import Victim, besieged
from trioserve.http.api.auth import OPEN_PATHS
from trioserve.http.api.routes import ROUTES

HOSTS = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil", "evil.local")
PATHS = sorted(
    {
        (route.method, route.rule.replace("<", "").replace(">", ""))
        for route in ROUTES
        if not route.control and route.rule not in OPEN_PATHS
    }
)


@pytest.fixture(scope="module")
def open_victim() -> Iterator[Victim]:
    """A server without keys."""
    with besieged("--mock-worker", "5ms", keys=()) as victim:
        yield victim


def statuses(victim: Victim, host: str) -> set[int]:
    """Ask every route as a page of ``host`` does, on one connection, for the answers' statuses."""
    address = urlsplit(victim.url)
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    headers = {"Host": f"{host}:{address.port}", "Origin": f"http://{host}:{address.port}"}
    found = set()
    for method, path in PATHS:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        error = json.loads(response.read())
        found.add(response.status)
        assert host in json.dumps(error), error
        assert "--allowed-hosts" in json.dumps(error), error
    connection.close()
    return found


@pytest.mark.parametrize("host", HOSTS)
def test_a_page_whose_name_points_here(open_victim: Victim, host: str) -> None:
    assert {"/server_info", "/console/live", "/v1/chat/completions"} <= {path for _, path in PATHS}
    with open_victim.withstands():
        assert statuses(open_victim, host) == {403}


def test_a_page_over_http2(open_victim: Victim) -> None:
    with httpx.Client(http1=False, http2=True, trust_env=False) as client:
        url = f"{open_victim.url}/server_info"
        assert client.get(url, headers={"Host": "evil.example"}).status_code == 403
        assert client.get(url, headers={"Host": "localhost"}).status_code == 200

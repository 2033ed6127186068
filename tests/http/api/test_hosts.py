"""Allowed host names, and the routes for which they matter."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.http_stub import StubEngine, client_of, http_client, served, server_config
from trioserve.http.api.errors import HostNotAllowed
from trioserve.http.api.hosts import AllowedHosts
from trioserve.protocol.errors import InvalidRequest

EVERYWHERE = (
    *("localhost", "LocalHost:8000", "localhost.", "a.localhost:1", "127.0.0.1:8000", "127.9.9.9"),
    *("[::1]:8000", "192.168.0.7:8000", "203.0.113.9", "[2001:db8::1]", ""),
)
NOWHERE = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("evillocalhost.example", "notlocal.locale", "a.internal.example"),
    *("[::1", "a:b:c", "localhost:x", "\xe9", ":8000", "[evil.example]", "a" * 9000 + ".example"),
)
PRIVATE = (
    "vllm:8000",
    "gpu01",
    "models.svc.cluster.local",
    "host.docker.internal",
    "nas.home.arpa",
)


def allows(hosts: AllowedHosts, host: str, reached_at: str) -> bool:
    try:
        hosts.check(host, reached_at)
    except HostNotAllowed:
        return False
    return True


@pytest.mark.parametrize(
    ("bound", "reached_at", "is_private"),
    [
        ("127.0.0.1", "127.0.0.1", False),
        ("localhost", "::1", False),
        ("::1", "::1", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "172.17.0.2", True),
        ("::", "::ffff:127.0.0.1", True),
        ("10.0.0.7", "10.0.0.7", True),
        # In a server that isn't ours, which listens elsewhere than the options say.
        ("127.0.0.1", "10.0.0.7", True),
    ],
)
def test_names_by_where_the_server_is_reached(
    bound: str, reached_at: str, is_private: bool
) -> None:
    hosts = AllowedHosts((), bound)
    assert all(allows(hosts, host, reached_at) for host in EVERYWHERE)
    assert not any(allows(hosts, host, reached_at) for host in NOWHERE)
    private = (*PRIVATE, socket.gethostname())
    assert {allows(hosts, host, reached_at) for host in private} == {is_private}


def test_the_name_that_is_listened_on() -> None:
    assert allows(AllowedHosts((), "gpu.example.org"), "GPU.example.org:8000", "127.0.0.1")


def test_names_that_are_given() -> None:
    hosts = AllowedHosts(("llm.example.org", "*.Example.net"), "127.0.0.1")
    for host in ("llm.example.org", "LLM.example.org.:443", "a.example.net", "a.b.example.net:1"):
        assert allows(hosts, host, "127.0.0.1")
    for host in ("example.org", "a.llm.example.org", "example.net", "badexample.net"):
        assert not allows(hosts, host, "127.0.0.1")
    assert all(allows(AllowedHosts(("*",), "::1"), host, "::1") for host in NOWHERE)


@pytest.mark.parametrize("name", ["", "a b", "http://a", "a:80", "*a", "a.*", "**", "a,b"])
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        server_config(allowed_hosts=(name,))
    assert caught.value.param == "allowed_hosts"


async def ask(url: str, path: str, **headers: str) -> httpx.Response:
    async with http_client(url) as client:
        return await client.get(path, headers=headers)


async def test_the_refusal_says_what_to_do() -> None:
    async with served(StubEngine()) as url:
        response = await ask(url, "/v1/models", Host="llm.example.org:8000")
        assert response.status_code == 403
        error: Any = response.json()["error"]
        assert error["code"] == "host_not_allowed"
        assert error["message"] == (
            "the request's Host is 'llm.example.org:8000', to which this server doesn't answer "
            "without an API key: start it with --allowed-hosts and the name, or with --api-key"
        )
        # A load balancer's question tells a page nothing.
        assert (await ask(url, "/health", Host="llm.example.org")).status_code == 200


async def test_a_key_is_enough() -> None:
    async with served(StubEngine(), api_key=("one",)) as url:
        for authorization, status in (("Bearer one", 200), ("Bearer no", 401)):
            headers = {"Host": "llm.example.org", "Authorization": authorization}
            assert (await ask(url, "/v1/models", **headers)).status_code == status


async def test_a_unix_socket_is_out_of_a_browsers_reach(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with served(StubEngine(), uds=path):
        transport = httpx.AsyncHTTPTransport(uds=path)
        async with http_client("http://llm.example.org", transport=transport) as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_an_application_in_another_server() -> None:
    response = await client_of(StubEngine()).get("/v1/models", headers={"Host": "a.example"})
    assert response.status_code == 200  # Quart's client has no connection to look at.

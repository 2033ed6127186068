"""URLs are fetched of named hosts only, at public addresses that were checked, within limits."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator, Sequence

import pytest
import trio
import trustme

from trioserve.protocol.errors import InvalidRequest
from trioserve.requests.media import fetching
from trioserve.requests.media.fetching import MediaFetcher, MediaUrl
from trioserve.requests.media.public_addresses import is_public

NAME = "messages[0].content[1]"
LIMIT = 1000
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


class Resolver:
    """A resolver with an answer for each call; the last one repeats."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        await trio.lowlevel.checkpoint()
        self.calls.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def fetcher(resolver: Resolver, **more: object) -> MediaFetcher:
    options = {"resolve": resolver, "allowed": lambda address: address == "127.0.0.1", **more}
    return MediaFetcher(["a.example", "B.example."], LIMIT, **options)


@contextlib.asynccontextmanager
async def serving(
    answer: bytes, *, host: str = "127.0.0.1", context: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Serve ``answer`` to all requests; yield the port and the requests."""
    requests: list[bytes] = []

    async def handle(stream: trio.abc.Stream) -> None:
        if context is not None:
            stream = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        with contextlib.suppress(trio.BrokenResourceError):
            async with stream:
                request = b""
                while b"\r\n\r\n" not in request:
                    piece = await stream.receive_some()
                    if not piece:
                        return
                    request += piece
                requests.append(request)
                await stream.send_all(answer)
                if not answer:
                    await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host=host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, [listener])
        yield listener.socket.getsockname()[1], requests
        nursery.cancel_scope.cancel()


async def refused(found: MediaFetcher, url: str) -> str:
    with pytest.raises(InvalidRequest) as raised:
        await found.fetch(url, "image", NAME)
    assert raised.value.param == NAME
    name, _, reason = str(raised.value).partition(": ")
    assert name == NAME
    return reason


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("192.0.2.1", "203.0.113.9", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1"),
        *("fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "100::1", "64:ff9b:1::a00:1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1"),
        *("64:ff9b::169.254.169.254", "2002:7f00:1::", "2002:a00:1::1", "2001:0:7f00:1::"),
        *("2606:4700::1%1", "", "a.example", "127.1", "0x7f000001", "2130706433", "1.1.1.1/32"),
    ],
)
def test_an_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"],
)
def test_an_address_that_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://A.Example", MediaUrl("http", "a.example", 80, "/")),
        ("https://a.example.:8443/b%20c?d=e#f", MediaUrl("https", "a.example", 8443, "/b%20c?d=e")),
        ("HTTPS://a.example?x", MediaUrl("https", "a.example", 443, "/?x")),
    ],
)
def test_a_url_has_parts(text: str, url: MediaUrl) -> None:
    assert MediaUrl.parse(text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("ftp://a.example/", "//a.example", "http://", "http:///b", "https:a.example", "a"),
        *(
            "http://u@a.example/",
            "http://a.example@b.example/",
            "http://a.example:x/",
            "http://[::",
        ),
        *("http://a.example/\r\nX: y", "http://a.example/ b", "http://a.example\\@b.example/"),
        *("http://a.example:99999/", "http://ä.example/", "http://a.example/" + "x" * 9000),
    ],
)
async def test_what_is_no_url_is_refused(text: str) -> None:
    resolver = Resolver(["127.0.0.1"])
    assert (await refused(fetcher(resolver), text)).startswith("the URL isn't valid: ")
    assert resolver.calls == []


async def test_content_is_fetched_of_named_hosts_only() -> None:
    resolver = Resolver(["127.0.0.1"])
    async with serving(OK) as (port, requests):
        found = fetcher(resolver)
        for host in ("a.example", "B.Example", "b.example."):
            assert await found.fetch(f"http://{host}:{port}/x?y", "image", NAME) == b"abc"
        assert requests[0].startswith(b"GET /x?y HTTP/1.1\r\n")
        assert f"Host: a.example:{port}\r\n".encode() in requests[0]
        for host in ("c.example", "a.example.org", "x.a.example", "127.0.0.1"):
            reason = await refused(found, f"http://{host}:{port}/")
            assert reason == (
                f"URLs of {host} aren't fetched: --allowed-media-domains names the hosts"
            )
        nothing = MediaFetcher([], LIMIT, resolve=resolver)
        assert "aren't fetched" in await refused(nothing, f"http://a.example:{port}/")
    assert len(requests) == len(resolver.calls) == 3


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["169.254.169.254"], ["93.184.216.34", "10.0.0.1"], ["::ffff:127.0.0.1"], []],
)
async def test_an_address_inside_is_refused(addresses: list[str]) -> None:
    async with serving(OK) as (port, requests):
        found = fetcher(Resolver(addresses), allowed=is_public)
        reason = await refused(found, f"http://a.example:{port}/")
    assert reason == "a.example has no public address"
    assert requests == []


async def test_an_answer_of_the_dns_that_changes_leads_nowhere() -> None:
    resolver = Resolver(["127.0.0.1"], ["127.0.0.2"])
    async with serving(OK) as (port, requests):
        (inside,) = await trio.open_tcp_listeners(port, host="127.0.0.2")
        async with inside:
            found = fetcher(resolver)
            assert await found.fetch(f"http://a.example:{port}/", "image", NAME) == b"abc"
            assert len(requests) == len(resolver.calls) == 1
            reason = await refused(found, f"http://a.example:{port}/")
    assert reason == "a.example has no public address"


async def test_another_address_is_tried_if_one_refuses_the_connection() -> None:
    async with serving(OK) as (port, _):
        found = fetcher(Resolver(["127.0.0.3", "127.0.0.1"]), allowed=lambda address: True)
        assert await found.fetch(f"http://a.example:{port}/", "image", NAME) == b"abc"
        nowhere = fetcher(Resolver(["127.0.0.3"]), allowed=lambda address: True)
        reason = await refused(nowhere, f"http://a.example:{port}/")
        assert reason.startswith("a.example can't be fetched from")


async def test_a_name_that_is_unknown_is_refused() -> None:
    async def unknown(host: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    found = MediaFetcher(["a.example"], LIMIT, resolve=unknown)
    assert await refused(found, "http://a.example/") == "a.example can't be resolved"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
            "redirects to another URL, which isn't followed",
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "answers with the status 404"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
            "sends a compressed answer",
        ),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\nabc",
            "the image has 1000000000000 bytes, more than --limit-mm-bytes (1000) allows",
        ),
        (
            b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT + 1),
            "the image has at least 1001 bytes, more than --limit-mm-bytes (1000) allows",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "can't be fetched from"),
        (b"nonsense\r\n\r\n", "can't be fetched from"),
    ],
)
async def test_an_answer_is_refused(answer: bytes, reason: str) -> None:
    async with serving(answer) as (port, requests):
        found = await refused(fetcher(Resolver(["127.0.0.1"])), f"http://a.example:{port}/")
    assert reason in found
    assert len(requests) == 1


async def test_a_slow_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_SECONDS", 0.2)
    async with serving(b"") as (port, _):
        reason = await refused(fetcher(Resolver(["127.0.0.1"])), f"http://a.example:{port}/")
    assert reason == "a.example takes more than 0.2 s"


async def test_a_certificate_has_to_be_the_names() -> None:
    authority = trustme.CA()
    server, client = (
        ssl.create_default_context(each)
        for each in (ssl.Purpose.CLIENT_AUTH, ssl.Purpose.SERVER_AUTH)
    )
    authority.issue_cert("a.example").configure_cert(server)
    authority.configure_trust(client)
    async with serving(OK, context=server) as (port, requests):
        found = fetcher(Resolver(["127.0.0.1"]), context=client)
        assert await found.fetch(f"https://a.example:{port}/", "image", NAME) == b"abc"
        reason = await refused(found, f"https://b.example:{port}/")
        assert reason.startswith("b.example can't be fetched from")
        untrusting = fetcher(Resolver(["127.0.0.1"]))
        reason = await refused(untrusting, f"https://a.example:{port}/")
        assert reason.startswith("a.example can't be fetched from")
    assert len(requests) == 1

"""The client's connections over real sockets: kept, lost, encrypted, refused."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trustme

from trioserve.load import (
    Target,
    closed_loop,
    figures_of,
    open_loop,
    over_tcp,
    parse_url,
    send,
    tls_context,
)
from trioserve.load.measure import MeasureError
from trioserve.load.server import ask_models


@attrs.define
class Listener:
    """A server of raw bytes: ``answers`` are what each connection is told, then it closes."""

    answers: list[bytes]
    connections: int = 0
    received: bytes = b""

    async def handle(self, stream: trio.abc.Stream) -> None:
        self.connections += 1
        async with contextlib.aclosing(stream):
            for answer in self.answers:
                self.received += bytes(await stream.receive_some(65536))
                await stream.send_all(answer)


@contextlib.asynccontextmanager
async def listening(
    listener: Listener, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    async with trio.open_nursery() as nursery:
        (raw,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = raw.socket.getsockname()[1]
        used: Any = raw if context is None else trio.SSLListener(raw, context)
        nursery.start_soon(trio.serve_listeners, listener.handle, [used])
        yield port
        nursery.cancel_scope.cancel()


BODY = (
    b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)


async def test_a_connection_that_the_server_closes_while_idle_is_not_used_again() -> None:
    listener = Listener([ANSWER, ANSWER])
    async with listening(listener) as port:
        target = Target(connect=over_tcp(f"http://127.0.0.1:{port}"), path="/", fields={})
        run = await open_loop(target, [{}] * 4, [0.0, 0.1, 0.3, 0.4])
    assert [record.error for record in run.records] == [""] * 4
    assert listener.connections == 2
    assert figures_of(run).resent == 0


async def test_a_request_on_which_the_server_hung_up_is_sent_again_and_counted() -> None:
    class HangsUp(Listener):
        async def handle(self, stream: trio.abc.Stream) -> None:
            self.connections += 1
            async with contextlib.aclosing(stream):
                await stream.receive_some(65536)
                await stream.send_all(ANSWER)
                await stream.receive_some(65536)

    listener = HangsUp([])
    async with listening(listener) as port:
        target = Target(connect=over_tcp(f"http://127.0.0.1:{port}"), path="/", fields={})
        run = await closed_loop(target, [{}] * 3, 1)
    assert [record.error for record in run.records] == [""] * 3
    assert [record.resent for record in run.records] == [False, True, True]
    assert figures_of(run).resent == 2


BARE = b"HTTP/1.0 200 OK\r\n\r\n" + BODY


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (BARE, "connection lost"),
        (b"HTTP/1.0 200 OK\r\n\r\n", "connection lost"),
        (BARE + b"data: [DONE]\n\n", ""),
        (BARE.replace(b'"a"', b'"a", "finish_reason": "stop"'), ""),
        (BARE + b'data: {"error": "out of memory"}\n\n', "error in the stream"),
    ],
)
async def test_an_answer_that_ends_with_its_connection_is_whole_if_it_says_so(
    answer: bytes, kind: str
) -> None:
    async with listening(Listener([answer])) as port:
        target = Target(connect=over_tcp(f"http://127.0.0.1:{port}"), path="/", fields={})
        record = await send(target, {})
    assert record.error_kind == kind
    assert bool(record.error) == bool(kind)


async def test_a_connection_that_breaks_in_an_answer_is_told_as_lost() -> None:
    listener = Listener([ANSWER[:-5]])
    async with listening(listener) as port:
        target = Target(connect=over_tcp(f"http://127.0.0.1:{port}"), path="/", fields={})
        run = await closed_loop(target, [{}, {}], 1)
    assert [record.error_kind for record in run.records] == ["connection lost"] * 2
    assert [record.text for record in run.records] == ["a"[:0]] * 2


async def test_nobody_there_is_told_with_the_systems_reason() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        record = await send(Target(connect=over_tcp(address), path="/", fields={}), {})
    assert record.error_kind == "no connection"
    assert record.error.endswith("Connection refused")


async def test_a_request_past_its_time_is_ended() -> None:
    class Silent(Listener):
        async def handle(self, stream: trio.abc.Stream) -> None:
            await trio.sleep_forever()

    async with listening(Silent([])) as port:
        connect = over_tcp(f"http://127.0.0.1:{port}")
        target = Target(connect=connect, path="/", fields={}, timeout=0.05)
        run = await closed_loop(target, [{}], 1)
    assert run.records[0].error == "TooSlowError: not done within 0.05 s"


# -- TLS, headers, URLs


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_context(authority: trustme.CA, name: str = "127.0.0.1") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


async def test_tls_is_checked_with_the_given_authority(
    authority: trustme.CA, tmp_path: Path
) -> None:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    listener = Listener([ANSWER] * 2)
    contexts = {
        "trusted": tls_context(file),
        "unknown": tls_context(),
        "insecure": tls_context(insecure=True),
    }
    async with listening(listener, server_context(authority)) as port:
        address = parse_url(f"https://127.0.0.1:{port}")
        records = {
            name: (
                await closed_loop(
                    Target(connect=address.connect(context), path="/", fields={}), [{}] * 2, 1
                )
            ).records
            for name, context in contexts.items()
            if name != "unknown"
        }
    assert [record.text for name in records for record in records[name]] == ["a"] * 4
    # A listener of trio's ends with the handshake that a client breaks off, so this one is apart.
    with pytest.RaisesGroup(pytest.RaisesExc(trio.BrokenResourceError), flatten_subgroups=True):
        async with listening(listener, server_context(authority)) as port:
            connect = parse_url(f"https://127.0.0.1:{port}").connect(contexts["unknown"])
            record = await send(Target(connect=connect, path="/", fields={}), {})
            await trio.sleep(30)
    assert record.error_kind == "no connection"
    assert "the certificate isn't trusted: " in record.error
    assert record.error.endswith(" (--ca-file, --insecure)")


async def test_tls_to_a_port_without_it_is_told_with_its_reason() -> None:
    async with listening(Listener([ANSWER])) as port:
        connect = parse_url(f"https://127.0.0.1:{port}").connect()
        record = await send(Target(connect=connect, path="/", fields={}), {})
    assert record.error_kind == "no connection"
    assert "TLS failed: " in record.error


def test_headers_of_several_lines_are_refused() -> None:
    target = Target(
        connect=over_tcp("http://x"), path="/v1", fields={"a": 1}, headers={"X-A": "b"}, host="h:1"
    )
    head, _, body = target.request({"b": 2}).partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /v1 HTTP/1.1",
        b"Host: h:1",
        b"Content-Type: application/json",
        b"Accept: text/event-stream",
        b"X-A: b",
        b"Content-Length: %d" % len(body),
    ]
    assert body == b'{"a":1,"b":2,"stream":true}'
    with pytest.raises(ValueError, match="not a header of one line"):
        Target(connect=over_tcp("http://x"), path="/", fields={}, headers={"A": "b\r\nC: d"})


@pytest.mark.parametrize(
    ("url", "tls", "port", "base", "authority"),
    [
        ("http://h", False, 80, "/v1", "h"),
        ("http://127.0.0.1:8000/", False, 8000, "/v1", "127.0.0.1:8000"),
        ("https://api.example/v1", True, 443, "/v1", "api.example"),
        ("https://h:80/openai/v1/chat/completions", True, 80, "/openai/v1", "h:80"),
        ("h:81/v1/completions", False, 81, "/v1", "h:81"),
        ("http://[::1]:5", False, 5, "/v1", "[::1]:5"),
    ],
)
def test_urls_are_taken_as_people_write_them(
    url: str, tls: bool, port: int, base: str, authority: str
) -> None:
    address = parse_url(url)
    assert (address.tls, address.port, address.base_path) == (tls, port, base)
    assert address.authority == authority
    assert address.url == f"http{'s' if tls else ''}://{authority}"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "http://h/?q=1", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as"):
        parse_url(url)


# -- what a server says of itself


async def models(answer: bytes) -> Any:
    listener = Listener([answer])
    async with listening(listener) as port:
        connect = over_tcp(f"http://127.0.0.1:{port}")
        info = await ask_models(connect, "h", "/v1/models", {"A": "b"}, "http://it")
    assert listener.received == (
        b"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\nA: b\r\n\r\n"
    )
    return info


async def test_the_models_of_a_server_are_asked_for() -> None:
    body = b'{"object": "list", "data": [{"id": "one", "x": 1}, {"id": "two"}]}'
    head = b"HTTP/1.1 200 OK\r\nServer: soft/1\r\nContent-Length: %d\r\n\r\n" % len(body)
    info = await models(head + body)
    assert (info.models, info.software) == (("one", "two"), "soft/1")
    for odd in (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", head[:15] + b"\r\n\r\nhello"):
        assert (await models(odd)).models == ()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n", "refuses with 401: give the right"),
        (b"220 smtp ready\r\n\r\n", "gives no valid HTTP answer"),
    ],
)
async def test_servers_that_refuse_are_told(answer: bytes, message: str) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(MeasureError, match=message)):
        await models(answer)  # its nursery's group

"""The server behind TLS: access, negotiation, and the detection of disconnects."""

from __future__ import annotations

import contextlib
import json
import math
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.support.h2_client import H2Client
from tests.support.http_stub import (
    StubEngine,
    captured_logs,
    connect,
    http_client,
    raw_request,
    read_to_end,
    read_until,
    running,
    served,
    server_config,
)
from tests.support.tls_certificates import Authority, make_authority
from trioserve.config import EngineConfig, ServerConfig
from trioserve.front_ends.serving import serve
from trioserve.http.server.listeners import check_address
from trioserve.protocol.errors import InvalidRequest, TrioserveError
from trioserve.requests.stream import Chunk

TEXT = "/v1/completions"
STREAM = json.dumps({"prompt": "x", "stream": True}).encode()
FLOOD = [Chunk("a" * 100_000, (97,)) for _ in range(1000)]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture(scope="module")
def options(authority: Authority) -> dict[str, str]:
    certificate, key = authority.issue("server")
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


@pytest.fixture
def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=authority.file)


@contextlib.asynccontextmanager
async def tls_client(
    url: str, trust: ssl.SSLContext, *protocols: str
) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    """Return a connection after its handshake, with one of ``protocols``."""
    if protocols:
        trust.set_alpn_protocols(list(protocols))
    plain = await connect(url.replace("https", "http"))
    stream = trio.SSLStream(plain, trust, server_hostname="127.0.0.1")
    with contextlib.suppress(trio.ClosedResourceError):  # By a test that has cut it off.
        async with stream:
            await stream.do_handshake()
            yield stream


@pytest.mark.parametrize(("http2", "version"), [(False, "HTTP/1.1"), (True, "HTTP/2")])
async def test_a_request(
    options: dict[str, str], trust: ssl.SSLContext, http2: bool, version: str
) -> None:
    stub = StubEngine()
    with captured_logs() as logs:
        async with served(stub, **options) as url:
            assert url.startswith("https://127.0.0.1:")
            async with http_client(url, verify=trust, http2=http2) as client:
                health = await client.get("/health")
                stream = await client.post(TEXT, content=STREAM)
    assert (health.http_version, health.status_code) == (version, 200)
    assert stream.text.endswith("data: [DONE]\n\n")
    assert [entry.get("client") for entry in logs] == ["127.0.0.1"] * 2


@pytest.mark.parametrize(
    ("protocols", "chosen"),
    [(["h2", "http/1.1"], "h2"), (["http/1.1"], "http/1.1"), ([], None), (["spdy/3"], None)],
)
async def test_the_protocol_is_agreed_on(
    options: dict[str, str], trust: ssl.SSLContext, protocols: list[str], chosen: str | None
) -> None:
    async with served(StubEngine(), **options) as url:
        async with tls_client(url, trust, *protocols) as stream:
            assert stream.selected_alpn_protocol() == chosen


async def test_http2_without_help(options: dict[str, str], trust: ssl.SSLContext) -> None:
    async with served(StubEngine(), **options) as url, tls_client(url, trust, "h2") as stream:
        client = H2Client(stream)
        stream_id = client.post(TEXT, STREAM)
        await client.flush()
        status, content = await client.response(stream_id)
    assert status == "200"
    assert content.endswith(b"data: [DONE]\n\n")


async def test_over_a_unix_socket(
    options: dict[str, str], trust: ssl.SSLContext, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    async with served(StubEngine(), uds=path, **options) as url:
        assert url == f"unix:{path}"
        transport = httpx.AsyncHTTPTransport(uds=path, verify=trust)
        async with http_client("https://127.0.0.1", transport=transport) as client:
            assert (await client.get("/health")).status_code == 200


class TestLeaving:
    @pytest.mark.parametrize("more", [b"", b"\r\n" * 10])
    async def test_a_client_that_leaves(
        self, options: dict[str, str], trust: ssl.SSLContext, more: bytes
    ) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        async with served(stub, **options) as url:
            async with tls_client(url, trust) as client:
                await client.send_all(raw_request(STREAM, path=TEXT) + more)
                while not stub.calls:
                    await trio.sleep(0.01)
            with trio.fail_after(20):
                await stub.calls[0].left.wait()

    async def test_a_client_that_is_cut_off_says_no_goodbye(
        self, options: dict[str, str], trust: ssl.SSLContext
    ) -> None:
        stub = StubEngine(script=lambda _: [math.inf])
        async with served(stub, **options) as url, tls_client(url, trust) as client:
            await client.send_all(raw_request(STREAM, path=TEXT))
            while not stub.calls:
                await trio.sleep(0.01)
            client.transport_stream.socket.shutdown(trio.socket.SHUT_RDWR)
            with trio.fail_after(20):
                await stub.calls[0].left.wait()

    async def test_the_server_says_goodbye(
        self, options: dict[str, str], trust: ssl.SSLContext
    ) -> None:
        """Let a client tell the end of an answer from a connection cut on the way."""
        async with served(StubEngine(), **options) as url, tls_client(url, trust) as client:
            await client.send_all(raw_request(STREAM, path=TEXT, close=True))
            got = b""
            while part := await client.receive_some():  # Raises where there is no close_notify.
                got += part
        assert got.endswith(b"0\r\n\r\n")

    async def test_a_stalled_reader_is_cut_off(
        self, options: dict[str, str], trust: ssl.SSLContext
    ) -> None:
        stub = StubEngine(script=lambda _: list(FLOOD))
        with captured_logs() as logs:
            async with served(stub, send_timeout=0.3, **options) as url:
                async with tls_client(url, trust) as client:
                    await client.send_all(raw_request(STREAM, path=TEXT))
                    while not stub.calls:
                        await trio.sleep(0.01)
                    with trio.fail_after(20):
                        await stub.calls[0].left.wait()
                    while not logs:
                        await trio.sleep(0.01)
        assert (logs[0]["status"], logs[0]["reason"]) == (499, "slow_reader")


class TestHandshake:
    @pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
    async def test_one_that_stalls_is_ended(self, options: dict[str, str], said: bytes) -> None:
        async with served(StubEngine(), request_timeout=0.3, **options) as url:
            async with await connect(url.replace("https", "http")) as client:
                await client.send_all(said)
                with trio.fail_after(20):
                    assert await read_to_end(client) == b""

    async def test_a_client_without_tls_is_told(self, options: dict[str, str]) -> None:
        with captured_logs() as logs:
            async with served(StubEngine(), **options) as url:
                async with await connect(url.replace("https", "http")) as client:
                    await client.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    got = await read_to_end(client)
        assert got.startswith(b"HTTP/1.1 400")
        assert b"use https://" in got
        assert [entry["event"] for entry in logs] == ["a client couldn't set up TLS"]

    async def test_garbage(self, options: dict[str, str], trust: ssl.SSLContext) -> None:
        with captured_logs() as logs:
            async with served(StubEngine(), **options) as url:
                async with await connect(url.replace("https", "http")) as client:
                    await client.send_all(bytes(range(256)))
                    await read_to_end(client)
                async with http_client(url, verify=trust) as other:
                    assert (await other.get("/health")).status_code == 200
        assert "a connection was dropped" not in [entry["event"] for entry in logs]

    async def test_clients_with_a_certificate_alone(
        self, options: dict[str, str], authority: Authority, tmp_path: Path
    ) -> None:
        stranger = make_authority(tmp_path / "stranger").issue("client")
        with captured_logs():
            async with served(StubEngine(), ssl_ca_certs=authority.file, **options) as url:
                for certificate, welcome in [
                    (authority.issue("client"), True),
                    (stranger, False),
                    (None, False),
                ]:
                    trust = ssl.create_default_context(cafile=authority.file)
                    if certificate is not None:
                        trust.load_cert_chain(*certificate)
                    async with http_client(url, verify=trust) as client:
                        if welcome:
                            assert (await client.get("/health")).status_code == 200
                        else:
                            with pytest.raises(httpx.TransportError):
                                await client.get("/health")

    @pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
    async def test_an_old_version_is_refused(
        self, options: dict[str, str], trust: ssl.SSLContext
    ) -> None:
        trust.minimum_version = ssl.TLSVersion.TLSv1
        trust.maximum_version = ssl.TLSVersion.TLSv1_1
        trust.set_ciphers("ALL:@SECLEVEL=0")
        with captured_logs():
            async with served(StubEngine(), **options) as url:
                with pytest.raises(trio.BrokenResourceError):
                    async with tls_client(url, trust):
                        pass


class TestDrain:
    async def test_idle_connections_and_handshakes_are_ended(
        self, options: dict[str, str], trust: ssl.SSLContext
    ) -> None:
        async with running(StubEngine(), **options) as server:
            async with (
                await connect(server.url.replace("https", "http")) as shaking_hands,
                tls_client(server.url, trust) as idle,
            ):
                await idle.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                await read_until(idle, b'"ok"}')  # type: ignore[arg-type]
                server.shutdown.set()
                with trio.fail_after(20):
                    assert await idle.receive_some() == b""
                    assert await read_to_end(shaking_hands) == b""
                    await server.ended.wait()


class TestErrors:
    """Each is one line, told before a model is loaded."""

    async def why(self, **options: Any) -> str:
        config = ServerConfig(engine=EngineConfig("/no/model"), port=0, **options)
        with pytest.raises(TrioserveError) as caught:
            await check_address(config)
        with pytest.raises(TrioserveError) as again:
            await serve(config)
        assert str(again.value) == str(caught.value)
        return str(caught.value)

    async def test_a_file_that_is_not_there(self, options: dict[str, str]) -> None:
        missing = "can't read /no/file: No such file or directory"
        assert await self.why(ssl_certfile="/no/file") == missing
        assert await self.why(**{**options, "ssl_keyfile": "/no/file"}) == missing
        assert await self.why(**options, ssl_ca_certs="/no/file") == missing

    async def test_the_key_of_another(self, options: dict[str, str], authority: Authority) -> None:
        _, key = authority.issue("other")
        why = await self.why(**{**options, "ssl_keyfile": key})
        certificate = options["ssl_certfile"]
        assert why == f"the key in {key} is not that of the certificate in {certificate}"

    async def test_an_encrypted_key(self, options: dict[str, str], authority: Authority) -> None:
        key = authority.encrypt(options["ssl_keyfile"], "sesame")
        encrypted = {**options, "ssl_keyfile": key}
        assert await self.why(**encrypted) == (
            f"the key in {key} is encrypted: give --ssl-keyfile-password"
        )
        assert await self.why(**encrypted, ssl_keyfile_password="simsim") == (
            f"--ssl-keyfile-password doesn't open the key in {key}"
        )
        await check_address(server_config(**encrypted, ssl_keyfile_password="sesame"))

    async def test_certificate_and_key_in_one_file(
        self, options: dict[str, str], tmp_path: Path
    ) -> None:
        both = tmp_path / "both.pem"
        both.write_text("".join(Path(path).read_text() for path in options.values()))
        await check_address(server_config(ssl_certfile=str(both)))

    async def test_no_certificates(self, options: dict[str, str], tmp_path: Path) -> None:
        path = tmp_path / "text"
        path.write_text("not a certificate")
        assert "in PEM format" in await self.why(ssl_certfile=str(path))
        alone = options["ssl_certfile"]
        assert await self.why(ssl_certfile=alone) == (
            f"{alone} holds no certificate with its key, in PEM format (--ssl-keyfile)"
        )
        assert await self.why(**options, ssl_ca_certs=str(path)) == f"{path} holds no certificates"

    @pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"])
    async def test_nothing_without_a_certificate(self, name: str) -> None:
        with pytest.raises(InvalidRequest, match=f"{name} needs a certificate"):
            server_config(**{name: "x"})

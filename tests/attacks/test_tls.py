"""Clients of TLS that don't get to a request, or take long to.

What scales: a server takes up to 4096 connections; here it may have few files open, which lowers
that to 512. Its key has 4096 bits, which makes handshakes expensive.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from tests.attacks.siege import Victim, besieged

NUM_FILES = 1024
GAP = 20.0
"""Seconds that the witness may wait where its own handshake waits for hundreds before it, which is
processor time alone. Streams that run don't wait: the event loop is never busy for long."""


def large_certificate() -> bytes:
    """Return a certificate of its own making and its key of 4096 bits, as PEM."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=4096)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8
    return certificate.public_bytes(form) + key.private_bytes(
        form, private, serialization.NoEncryption()
    )


@pytest.fixture(scope="module")
def tls_victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A server with TLS."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    path.write_bytes(large_certificate())
    options = ("--mock-worker", "5ms", "--ssl-certfile", str(path))
    with besieged(*options, num_files=NUM_FILES) as victim:
        yield victim


def address_of(victim: Victim) -> tuple[str, int]:
    parts = urlsplit(victim.url)
    return parts.hostname or "", parts.port or 0


def client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def hello(context: ssl.SSLContext, name: str = "127.0.0.1") -> bytes:
    """Return what a client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@contextlib.contextmanager
def clients(victim: Victim, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        address = address_of(victim)
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def test_many_handshakes_at_once(tls_victim: Victim) -> None:
    """Each has begun, and all go on in the same moment."""
    first = hello(client_context())
    with tls_victim.withstands(gap=GAP), clients(tls_victim, 150) as all_clients:
        for client in all_clients:
            client.sendall(first[:-1])
        time.sleep(1)
        for client in all_clients:
            client.sendall(first[-1:])
        for client in all_clients:
            assert client.recv(1) == b"\x16"  # The server's part of a handshake.


def test_more_handshakes_than_there_may_be_connections(tls_victim: Victim) -> None:
    first = hello(client_context())
    with tls_victim.withstands(), contextlib.ExitStack() as stack:
        for number in range(NUM_FILES // 2 + 100):
            client = stack.enter_context(socket.create_connection(address_of(tls_victim)))
            client.sendall(first[: number % len(first)])
            time.sleep(0.002)


def test_a_first_word_that_does_not_end(tls_victim: Victim) -> None:
    """OpenSSL would gather 128 KiB of it for each client."""
    length = 130_000
    message = b"\x01" + length.to_bytes(3, "big") + bytes(length)
    pieces = [message[start : start + 16_000] for start in range(0, length - 1000, 16_000)]
    records = b"".join(b"\x16\x03\x01" + len(each).to_bytes(2, "big") + each for each in pieces)
    with tls_victim.withstands(gap=GAP), clients(tls_victim, 100) as all_clients:
        for client in all_clients:
            client.settimeout(30)
            with contextlib.suppress(ConnectionError):
                client.sendall(records[:-5000])
        for client in all_clients:
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""  # Long before the time for a handshake is over.


def test_garbage(tls_victim: Victim) -> None:
    first = hello(client_context())
    with tls_victim.withstands(), contextlib.ExitStack() as stack:
        for number in range(300):
            client = stack.enter_context(socket.create_connection(address_of(tls_victim)))
            damaged = bytearray(first)
            damaged[number % len(first)] ^= 0xFF
            kinds = [os.urandom(1000), bytes(damaged), first + os.urandom(100), first[:5], b"\x80"]
            with contextlib.suppress(ConnectionError):
                client.sendall(kinds[number % len(kinds)])
                if number % 3 == 0:
                    client.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_answers_that_are_left_unread(tls_victim: Victim, version: ssl.TLSVersion) -> None:
    context = client_context()
    context.minimum_version = context.maximum_version = version
    request = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n\r\n"
    with tls_victim.withstands(), contextlib.ExitStack() as stack:
        for _ in range(30):
            plain = socket.socket()
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            plain.connect(address_of(tls_victim))
            client = stack.enter_context(context.wrap_socket(plain))
            client.sendall(4 * request)
            time.sleep(0.02)


@pytest.mark.parametrize("protocols", [["h2"] * 100, ["x" * 255] * 40, ["h2c"], ["http/1.0", "h2"]])
def test_odd_names_and_protocols(tls_victim: Victim, protocols: list[str]) -> None:
    name = "a" * 60 + ".example"
    context = client_context()
    context.set_alpn_protocols(protocols)
    with socket.create_connection(address_of(tls_victim)) as plain:
        with context.wrap_socket(plain, server_hostname=name) as client:
            chosen = client.selected_alpn_protocol()
            assert chosen == ("h2" if "h2" in protocols else None)
            if chosen is None:
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
                assert client.recv(12) == b"HTTP/1.1 200"


def test_after_all_of_it(tls_victim: Victim) -> None:
    assert "a connection was dropped" not in tls_victim.log()
    assert "Traceback" not in tls_victim.log()

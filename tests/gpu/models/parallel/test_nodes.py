"""The meeting of nodes: peers that aren't wanted are dropped or told why, and the others served."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import msgspec
import pytest

from gpu.models.parallel.link import RankLink
from gpu.models.parallel.nodes import (
    NodeGreeting,
    NodeRefused,
    Nodes,
    RankGreeting,
    dial_rank_0,
    join_node,
    pass_on,
)
from tests.support.ports import free_port
from trioserve import EngineConfig
from trioserve.engine.worker_start import start_message
from trioserve.protocol.certificates import ENGINE_FILES, FRONT_END_FILES, WORKER_FILES, Credentials
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import schema_hash
from trioserve.workers.remote.certificates import make_certificates
from trioserve.workers.remote.tls import read_credentials

WANTED = NodeGreeting(1, schema_hash(), "model")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


def worker_of(tls: Path) -> Credentials:
    return read_credentials(str(tls), WORKER_FILES)


@contextlib.contextmanager
def meeting(tls: Path) -> Iterator[str]:
    """Let rank 0 wait for node 1 and its rank, which have to come, and notice its loss."""
    address = f"127.0.0.1:{free_port()}"
    start = attrs.evolve(
        start_message(EngineConfig("m", tensor_parallel_size=2), Path("/models/m")),
        num_nodes=2,
        nodes_listen=address,
        nodes_tls=read_credentials(str(tls), ENGINE_FILES),
        link_timeout=60.0,
    )
    lost = threading.Event()
    nodes = Nodes(start, "model", "group", lost.set)

    def serve() -> None:
        nodes.meet()
        assert nodes.address() == "127.0.0.1"
        (rank,) = nodes.start_ranks(lambda rank: f"order of {rank}".encode(), ["link"])
        RankLink(0, [rank["link"]]).send(b"step")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield address
    thread.join(10)
    assert not thread.is_alive()
    assert lost.wait(10)


def join_as_wanted(address: str, tls: Path) -> None:
    own = worker_of(tls)
    connection, given = join_node(address, own, WANTED)
    assert given.orders == [b"order of 1"]
    with pytest.raises(EOFError):  # of another group
        RankLink(1, [dial_rank_0(address, own, RankGreeting(1, "older"))]).receive()
    link = RankLink(1, [dial_rank_0(address, own, RankGreeting(1, "group"))])
    assert link.receive() == b"step"
    connection.close()


def test_a_node_and_its_rank_join(tls: Path) -> None:
    with meeting(tls) as address:
        join_as_wanted(address, tls)


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        (NodeGreeting(2, schema_hash(), "model"), "--node-rank 2 isn't between 1 and 1"),
        (NodeGreeting(1, "old", "model"), "another version of trioserve"),
        (NodeGreeting(1, schema_hash(), "other"), "its model has the checksum other"),
    ],
)
def test_another_node_is_told_why(tls: Path, greeting: NodeGreeting, message: str) -> None:
    with meeting(tls) as address:
        with pytest.raises(NodeRefused, match=message):
            join_node(address, worker_of(tls), greeting)
        join_as_wanted(address, tls)


def test_what_comes_from_a_stage_is_passed_on_until_a_side_ends() -> None:
    (first, relayed), (onward, second) = socket.socketpair(), socket.socketpair()
    pass_on(relayed, onward)
    sent = bytes(range(256)) * 8192
    sender = threading.Thread(target=first.sendall, args=(sent,))
    sender.start()
    found = b""
    while len(found) < len(sent):
        found += second.recv(1 << 16)
    sender.join(10)
    assert found == sent
    second.close()
    first.settimeout(10)
    with pytest.raises(ConnectionError):
        send_for_ever(first)


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"more")


def connection_to(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def secured(address: str, tls: Path, names: tuple[str, str, str]) -> ssl.SSLSocket:
    authority, certificate, key = (str(tls / name) for name in names)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    return context.wrap_socket(connection_to(address))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 8 + b"x" * 100, msgspec.msgpack.encode({"type": "x"})],
)
def test_garbage_hurts_only_its_own_connection(
    tls: Path, caplog: pytest.LogCaptureFixture, garbage: bytes
) -> None:
    caplog.set_level(logging.WARNING, "gpu.worker")
    with meeting(tls) as address:
        with connection_to(address) as plain:
            plain.sendall(garbage)
        with secured(address, tls, WORKER_FILES) as inside:
            inside.sendall(len(garbage).to_bytes(8, "little") + garbage)
        with secured(address, tls, WORKER_FILES) as long:
            long.sendall((1 << 40).to_bytes(8, "little"))
        with secured(address, tls, FRONT_END_FILES) as other:
            # It is closed at once, and not left to wait.
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                other.sendall(b"x")
                assert other.recv(1) == b""
        join_as_wanted(address, tls)
    dropped = [each for each in caplog.messages if "dropped" in each]
    assert len(dropped) == 4
    assert "at most 4096 are expected" in dropped[2]
    assert "front-end.trioserve.internal, not for worker" in dropped[3]


def test_a_key_of_another_certificate_is_refused(tls: Path) -> None:
    mixed = attrs.evolve(worker_of(tls), key=read_credentials(str(tls), ENGINE_FILES).key)
    start = attrs.evolve(
        start_message(EngineConfig("m", tensor_parallel_size=2), Path("/models/m")),
        num_nodes=2,
        nodes_listen="127.0.0.1:0",
        nodes_tls=mixed,
    )
    with pytest.raises(ModelLoadError, match=r"certificates of nodes .*mismatch"):
        Nodes(start, "model", "group", lambda: None)

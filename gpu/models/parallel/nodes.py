"""The hosts of a worker's ranks, its nodes: how they meet over TLS, and notice a lost one.

Node 0 has rank 0, which listens for the others. Each of them has a process that starts its ranks
and keeps one connection, over which both sides send heartbeats. Each of its ranks has one for each
:data:`Purpose`; rank 0 passes on what stages send each other. All of them end when a node is lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import attrs
import msgspec

from gpu.models.parallel.link import receive_message, send_message
from trioserve.protocol.certificates import ENGINE_NAME, WORKER_NAME, Credentials
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.wire import Start, schema_hash

HEARTBEAT_SECONDS = 0.25
_GREETING_SECONDS = 10.0
"""Time in which a peer has to say what it is."""
_LONGEST_GREETING = 4096
_BEAT = b"."
_PIECE = 1 << 18
_log = logging.getLogger("gpu.worker")


Purpose = Literal["link", "pages", "before", "behind"]
"""The use of a rank's connection: as its link to rank 0, for the content of pages, for what comes
from the stage before it, or for what goes to the one behind.
"""


class NodeGreeting(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node's process."""

    node: int
    schema: str
    """Hash of the messages' types, which must be that of node 0."""
    checksum: str
    """Checksum of the model's files, which must be that of node 0."""


class RankGreeting(msgspec.Struct, frozen=True, tag=True):
    """The first message of each connection of a rank."""

    rank: int
    group: str
    """Name of the present group, from the rank's order."""
    purpose: Purpose = "link"


class NodeOrders(msgspec.Struct, frozen=True):
    """The answer to a node's greeting: what its ranks are to load, or why it isn't wanted."""

    orders: list[bytes]
    link_timeout: float
    """Seconds of silence after which the other side counts as lost."""
    error: str = ""


_greetings = msgspec.msgpack.Decoder(NodeGreeting | RankGreeting)


class NodeRefused(Exception):
    """Node 0 doesn't want this node."""


@attrs.define(eq=False)
class Nodes:
    """The other nodes of a worker, as rank 0 has them.

    Args:
        start: What the worker loads, with the number of nodes and the address to listen at.
        checksum: Checksum of the model's files.
        group: Name of the group that no other one has.
        on_lost: Called in a thread when a node is lost.
    """

    _start: Start
    _checksum: str
    group: str
    _on_lost: Callable[[], None]
    _listener: socket.socket = attrs.field(init=False)
    _tls: ssl.SSLContext = attrs.field(init=False)
    _connections: dict[int, ssl.SSLSocket] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        start = self._start
        assert start.nodes_tls is not None
        self._tls = _context(start.nodes_tls, ssl.PROTOCOL_TLS_SERVER)
        host, port = split_address(start.nodes_listen)
        try:
            self._listener = socket.create_server((host, port), family=family_of(host))
        except OSError as error:
            raise ModelLoadError(
                f"can't listen for other nodes at {start.nodes_listen}: {error.strerror}"
            ) from error

    def ranks_of(self, node: int) -> range:
        """Return the ranks of a node."""
        each = self._start.num_ranks // self._start.num_nodes
        return range(node * each, (node + 1) * each)

    def address(self) -> str:
        """Return this host's address for the others, once they have come."""
        address: str = next(iter(self._connections.values())).getsockname()[0]
        return address

    def meet(self) -> None:
        """Block until a process of each node has come."""
        _log.info(
            "waiting for %d more nodes at %s", self._start.num_nodes - 1, self._start.nodes_listen
        )
        while len(self._connections) < self._start.num_nodes - 1:
            connection, greeting = self._accept()
            if not isinstance(greeting, NodeGreeting):
                connection.close()
            elif (error := self._obstacle(greeting)) is None:
                if greeting.node in self._connections:  # Its process was started again.
                    self._connections[greeting.node].close()
                self._connections[greeting.node] = connection
            else:
                _log.warning("node %d refused: %s", greeting.node, error)
                with contextlib.suppress(OSError), connection:
                    reply = NodeOrders([], self._start.link_timeout, error)
                    send_message(connection, msgspec.msgpack.encode(reply))

    def _obstacle(self, greeting: NodeGreeting) -> str | None:
        if not 0 < greeting.node < self._start.num_nodes:
            return f"--node-rank {greeting.node} isn't between 1 and {self._start.num_nodes - 1}"
        if greeting.schema != schema_hash():
            return "it has another version of trioserve than node 0"
        if greeting.checksum != self._checksum:
            return (
                f"its model has the checksum {greeting.checksum}, that of node 0 {self._checksum}: "
                "put the same files there"
            )
        return None

    def start_ranks(
        self, order_of: Callable[[int], bytes], purposes: Sequence[Purpose]
    ) -> list[dict[Purpose, ssl.SSLSocket]]:
        """Have the nodes start their ranks, and return the connections of each, in their order.

        From here on the loss of a node is noticed.
        """
        for node, connection in self._connections.items():
            orders = NodeOrders(list(map(order_of, self.ranks_of(node))), self._start.link_timeout)
            send_message(connection, msgspec.msgpack.encode(orders))
            threading.Thread(target=self._watch, args=(node, connection), daemon=True).start()
        ranks = range(len(self.ranks_of(0)), self._start.num_ranks)
        found: dict[int, dict[Purpose, ssl.SSLSocket]] = {rank: {} for rank in ranks}
        while any(len(each) < len(purposes) for each in found.values()):
            connection, greeting = self._accept()
            if isinstance(greeting, RankGreeting) and greeting.group == self.group:
                found[greeting.rank][greeting.purpose] = connection
            else:
                connection.close()
        self._listener.close()
        return list(found.values())

    def _accept(self) -> tuple[ssl.SSLSocket, NodeGreeting | RankGreeting]:
        """Return the next connection with its greeting; drop others."""
        while True:
            plain, peer = self._listener.accept()
            connection = plain
            try:
                plain.settimeout(_GREETING_SECONDS)
                connection = secured = self._tls.wrap_socket(plain, server_side=True)
                _check_name(secured)
                message = receive_message(secured, _LONGEST_GREETING)
                greeting = _greetings.decode(message)
            except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
                _log.warning("peer %s dropped: %s", peer[0], error)
                connection.close()
            else:
                secured.settimeout(None)
                return secured, greeting

    def _watch(self, node: int, connection: ssl.SSLSocket) -> None:
        """Call ``on_lost`` once a node is lost."""
        try:
            _exchange_heartbeats(connection, self._start.link_timeout)
        except (OSError, EOFError) as failure:
            _log.error("node %d of the worker is lost: %s", node, failure)
        self._on_lost()


def purposes_of(start: Start, is_compiled: bool) -> list[Purpose]:
    """Return the purposes of the connections of each rank of another node, in their order."""
    pages: list[Purpose] = ["pages"] if is_compiled else []
    ways: list[Purpose] = ["before", "behind"] if start.pipeline_parallel_size > 1 else []
    return ["link", *pages, *ways]


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on, in a thread, until one side ends; then the other one does, too."""

    def run() -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=run, daemon=True).start()


def _exchange_heartbeats(connection: ssl.SSLSocket, timeout: float) -> None:
    """Send heartbeats and wait for their answers until the other side is lost.

    Raises:
        OSError: It is lost, or hasn't answered for ``timeout`` seconds.
        EOFError: It has closed the connection.
    """
    connection.settimeout(timeout)
    while True:
        connection.sendall(_BEAT)
        if not connection.recv(1):
            raise EOFError("it has closed the connection")
        time.sleep(HEARTBEAT_SECONDS)


def answer_heartbeats(connection: ssl.SSLSocket, timeout: float) -> None:
    """Answer heartbeats until rank 0 is lost, or nothing has come for ``timeout`` seconds."""
    connection.settimeout(timeout + HEARTBEAT_SECONDS)
    with contextlib.suppress(OSError):
        while beat := connection.recv(1):
            connection.sendall(beat)


def join_node(
    address: str, tls: Credentials, greeting: NodeGreeting
) -> tuple[ssl.SSLSocket, NodeOrders]:
    """Return the connection of a node's process to rank 0, and the orders of its ranks.

    Blocks until all nodes have come.

    Raises:
        OSError: Rank 0 can't be reached; as :class:`EOFError`, it has ended.
        NodeRefused: It doesn't want this node.
    """
    connection = _dial(address, tls, msgspec.msgpack.encode(greeting))
    orders = msgspec.msgpack.decode(receive_message(connection), type=NodeOrders)
    if orders.error:
        raise NodeRefused(orders.error)
    return connection, orders


def dial_rank_0(address: str, tls: Credentials, greeting: RankGreeting) -> ssl.SSLSocket:
    """Return the connection of a rank to rank 0.

    Raises:
        OSError: Rank 0 can't be reached.
    """
    return _dial(address, tls, msgspec.msgpack.encode(greeting))


def _dial(address: str, tls: Credentials, greeting: bytes) -> ssl.SSLSocket:
    context = _context(tls, ssl.PROTOCOL_TLS_CLIENT)
    connection = socket.create_connection(split_address(address), timeout=_GREETING_SECONDS)
    secured = context.wrap_socket(connection, server_hostname=ENGINE_NAME)
    send_message(secured, greeting)
    secured.settimeout(None)
    return secured


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address to listen at."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; a host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _context(own: Credentials, side: int) -> ssl.SSLContext:
    """Return the TLS of one side, which demands the other one's certificate.

    Raises:
        ModelLoadError: They are no certificates, or the key is another one's.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    # The library reads a key from a file only. This one is in memory and has no name.
    descriptor = os.memfd_create("trioserve-certificate")
    try:
        os.write(descriptor, f"{own.certificate}\n{own.key}".encode())
        context.load_verify_locations(cadata=own.authority)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise ModelLoadError(
            f"the certificates of nodes can't be used ({error}): trioserve worker-certificates "
            "makes them"
        ) from error
    finally:
        os.close(descriptor)
    return context


def _check_name(connection: ssl.SSLSocket) -> None:
    """Check that the peer has a worker's certificate.

    Raises:
        ValueError: It has another one.
    """
    certificate = connection.getpeercert() or {}
    names = set(_names(certificate.get("subject", ())))
    if names != {WORKER_NAME}:
        raise ValueError(f"it has a certificate for {', '.join(names)}, not for {WORKER_NAME}")


def _names(subject: object) -> Iterator[str]:
    assert isinstance(subject, tuple)
    for part in subject:
        for name, value in part:
            if name == "commonName":
                yield value

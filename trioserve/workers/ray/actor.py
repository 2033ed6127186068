"""The actor of Ray that runs the agent of a worker, or of one of its nodes.

It needs the same trioserve on its host.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import trio

from trioserve.model_files import locate, open_model
from trioserve.observability.logs import setup_logging
from trioserve.protocol.addresses import host_and_port
from trioserve.protocol.errors import TrioserveError
from trioserve.protocol.node_setup import NodeSetup
from trioserve.workers.ray.messages import AgentSetup
from trioserve.workers.remote.agent import Agent
from trioserve.workers.remote.node_agent import NodeAgent
from trioserve.workers.remote.tls import worker_tls_of


class WorkerActor:
    """The class that Ray makes an actor of."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None
        """Holds the port at which other nodes join."""

    def hold_address(self) -> str:
        """Return an address of this host at which other nodes can join, for as long as it runs."""
        import ray as typed

        ray: Any = typed  # Parts of it have no types.
        self._held = hold_port(ray.util.get_node_ip_address())
        return _address_of(self._held)

    def run(self, setup: bytes) -> str:
        """Serve the engine until it doesn't want the worker any more; return why.

        Args:
            setup: An :class:`AgentSetup` as JSON.
        """
        known = msgspec.json.decode(setup, type=AgentSetup)
        setup_logging(log_format="json")  # Ray keeps stderr in its logs.
        try:
            path = locate(known.model, revision=known.revision).resolve()
            trio.run(self._agent(known, str(path), open_model(path).checksum()).run)
        except TrioserveError as error:
            return f"the worker on {socket.gethostname()} ended: {error}"
        raise AssertionError("the agent has left by itself")

    def _agent(self, known: AgentSetup, model: str, checksum: str) -> Agent | NodeAgent:
        if known.node:
            setup = NodeSetup(
                node=known.node,
                address=known.join,
                tls=known.tls,
                model=model,
                checksum=checksum,
                num_threads=known.num_threads or 0,
                cores=[],
            )
            return NodeAgent(setup=setup)
        return Agent(
            id=known.id,
            engine=known.join,
            tls=worker_tls_of(known.tls),
            model=model,
            checksum=checksum,
            device=known.device,
            num_threads=known.num_threads,
            num_nodes=known.num_nodes,
            nodes_listen="" if self._held is None else _address_of(self._held),
            nodes_tls=known.nodes_tls,
        )


def hold_port(host: str) -> socket.socket:
    """Return a socket that holds a free port of ``host``, at which another socket can listen.

    A worker process listens there, and so does the next one. The system gives the port to no other
    program meanwhile.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Linux lets two sockets have a port if both have this option, and at most one listens.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def _address_of(held: socket.socket) -> str:
    return host_and_port(*held.getsockname()[:2])

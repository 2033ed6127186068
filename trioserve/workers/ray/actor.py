"""The actor of Ray that runs the agent of one worker. It needs the same trioserve on its host."""

from __future__ import annotations

import socket

import msgspec
import trio

from trioserve.model_files import locate, open_model
from trioserve.observability.logs import setup_logging
from trioserve.protocol.errors import TrioserveError
from trioserve.workers.ray.messages import AgentSetup
from trioserve.workers.remote.agent import Agent
from trioserve.workers.remote.tls import worker_tls_of


class WorkerActor:
    """The class that Ray makes an actor of. Ray starts it again if its process or node dies."""

    def run(self, setup: bytes) -> str:
        """Serve the engine until it doesn't want the worker any more; return why.

        Args:
            setup: An :class:`AgentSetup` as JSON.
        """
        known = msgspec.json.decode(setup, type=AgentSetup)
        setup_logging(log_format="json")  # Ray keeps stderr in its logs.
        try:
            path = locate(known.model, revision=known.revision).resolve()
            agent = Agent(
                id=known.id,
                engine=known.engine,
                tls=worker_tls_of(known.authority, known.certificate, known.key),
                model=str(path),
                checksum=open_model(path).checksum(),
                device=known.device,
                num_threads=known.num_threads,
            )
            trio.run(agent.run)
        except TrioserveError as error:
            return f"the worker on {socket.gethostname()} ended: {error}"
        raise AssertionError("the agent has left by itself")

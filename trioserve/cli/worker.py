"""``trioserve worker``: the agent of a worker for an engine on another host."""

from __future__ import annotations

from typing import cast

import trio

from trioserve.cli.signals import SignalledProcess
from trioserve.cli.worker_options import WorkerOptions
from trioserve.model_files import ENCODING, locate, open_model, task_of
from trioserve.protocol.certificates import ENGINE_FILES, WORKER_FILES
from trioserve.protocol.devices import split_device
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.joining import WorkerRole
from trioserve.protocol.node_setup import NodeSetup
from trioserve.workers.remote.agent import LEAVE_GRACE, Agent
from trioserve.workers.remote.node_agent import NodeAgent
from trioserve.workers.remote.tls import read_credentials, worker_tls


async def run_agent(options: WorkerOptions, model: str) -> int:
    """Serve an engine until a signal ends the worker, and return the process's exit code.

    The first signal has the engine move the worker's requests, the second ends it at once.

    Raises:
        TrioserveError: The model or the certificates can't be used, or the engine has refused the
            worker.
    """
    assert options.tls is not None
    tls = worker_tls(options.tls)
    path, checksum = await trio.to_thread.run_sync(find_model, model, abandon_on_cancel=True)
    process = SignalledProcess(LEAVE_GRACE, serving=True)
    if options.node_rank:
        return await process.run(_node_agent(options, path, checksum, process.shutdown).run)
    assert options.join is not None
    agent = Agent(
        engine=options.join,
        tls=tls,
        model=path,
        checksum=checksum,
        device=options.device,
        num_threads=options.num_threads,
        computes=cast("WorkerRole", options.role),
        num_nodes=options.nnodes,
        nodes_listen=options.dist_init_addr or "",
        nodes_tls=read_credentials(options.tls, ENGINE_FILES) if options.nnodes > 1 else None,
        leaving=process.shutdown,
    )
    return await process.run(agent.run)


def _node_agent(options: WorkerOptions, path: str, checksum: str, leaving: trio.Event) -> NodeAgent:
    assert options.dist_init_addr is not None
    assert options.tls is not None
    setup = NodeSetup(
        node=options.node_rank,
        address=options.dist_init_addr,
        tls=read_credentials(options.tls, WORKER_FILES),
        model=path,
        checksum=checksum,
        num_threads=options.num_threads or 0,
        cores=split_device(options.device or "cpu")[1],
    )
    return NodeAgent(setup=setup, leaving=leaving)


def find_model(model: str) -> tuple[str, str]:
    """Return the path of an engine's model on this host, and the checksum of its files.

    Blocks on the disk, and where the model is fetched.

    Raises:
        ModelLoadError: There is none, or it is an encoder.
    """
    path = locate(model).resolve()
    if task_of(path) in ENCODING:
        raise ModelLoadError(f"{model} is an encoder, which can't be served over several hosts")
    return str(path), open_model(path).checksum()

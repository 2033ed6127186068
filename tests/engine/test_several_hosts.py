"""A worker whose ranks are on several hosts: the answers of one process, and every way to lose it.

The hosts are processes of this one; their connections go through a network that can be cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trio

from tests.support.cut_network import Network, open_network
from tests.support.engines import assert_idle, open_tiny_engine
from tests.support.other_hosts import ENGINE_OPTIONS, agent_for, running
from tests.support.ports import free_port
from tests.support.rank_engines import answers, logprobs_of, prompt, tokens_of
from tests.support.tiny_models import make_tiny
from trioserve import Engine
from trioserve.model_files import open_model
from trioserve.protocol.certificates import ENGINE_FILES, WORKER_FILES
from trioserve.protocol.node_setup import NodeSetup
from trioserve.workers.remote.certificates import make_certificates
from trioserve.workers.remote.node_agent import NodeAgent
from trioserve.workers.remote.tls import read_credentials

ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder)
    return folder


def setup_of(address: str, tls: Path, model: Path, node: int = 1) -> NodeSetup:
    return NodeSetup(
        node=node,
        address=address,
        tls=read_credentials(str(tls), WORKER_FILES),
        model=str(model),
        checksum=open_model(model).checksum(),
        num_threads=1,
        cores=[],
    )


@contextlib.asynccontextmanager
async def joining(setup: NodeSetup) -> AsyncIterator[None]:
    """Run the agent of a node for the block."""
    agent = NodeAgent(setup=setup)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(agent.run)
        yield
        agent.leave()


@contextlib.asynccontextmanager
async def over_hosts(
    model: Path, tls: Path, count: int = 2, **options: Any
) -> AsyncIterator[tuple[Engine, Network]]:
    """Open an engine with one worker on ``count`` other hosts, and the network between these."""
    listen, port = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    options = {**ENGINE_OPTIONS, "worker_tls": str(tls), "worker_listen": listen, **options}
    nodes: dict[str, Any] = {"num_nodes": count, "nodes_listen": port}
    nodes["nodes_tls"] = read_credentials(str(tls), ENGINE_FILES)
    async with contextlib.AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network(port))
        for node in range(1, count):
            setup = setup_of(network.address, tls, model, node)
            await stack.enter_async_context(joining(setup))
        await stack.enter_async_context(running(agent_for(listen, tls, model, **nodes)))
        engine = await stack.enter_async_context(open_tiny_engine(model, **options))
        yield engine, network


def rank_processes() -> list[psutil.Process]:
    """Return the processes of ranks behind rank 0 below this one."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--rank" in each.cmdline():
                found.append(each)
    return found


async def test_outputs_are_those_of_one_process(tiny: Path, tls: Path) -> None:
    """A stage of two ranks on each host."""
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    async with open_tiny_engine(tiny) as engine:
        alone = await answers(engine)
    async with over_hosts(tiny, tls, **ranks) as (engine, network):
        together = await answers(engine)
        assert len(rank_processes()) == 3
        assert network.num_connections >= 7  # One of the node, and three of each of its ranks.
        await assert_idle(engine)
    for one, other in zip(alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), abs=1e-4)


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("rank killed", {"tensor_parallel_size": 2}),
        ("network silent", {"pipeline_parallel_size": 2, "dtype": "auto"}),
    ],
)
async def test_what_is_lost_there_is_the_workers_loss(
    tiny: Path, tls: Path, loss: str, options: dict[str, Any]
) -> None:
    async with over_hosts(tiny, tls, **options) as (engine, network):
        expected = await engine.complete(prompt(1), **ASKED)
        found: list[int] = []
        async with engine.generate(prompt(1), **ASKED) as stream:
            async for delta in stream:
                found += delta.token_ids
                if len(found) != 10:
                    continue
                match loss:
                    case "rank killed":
                        rank_processes()[0].kill()
                    case "network silent":
                        network.hold()
                        with trio.fail_after(60):
                            while engine.statistics().worker_restarts == 0:
                                await trio.sleep(0.01)
                        network.flow()
        assert found == list(expected.token_ids)
        assert engine.statistics().worker_restarts == 1
        await assert_idle(engine)

"""The process of a node behind the first one: it starts the node's ranks, and ends with them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys

import attrs
import msgspec

from gpu._util.logs import set_up_logging
from gpu._util.parent import exit_with_stdin
from gpu.cpu.rank_memory import open_shared_file
from gpu.cpu.rank_processes import RankOrder, start_rank
from gpu.loading.loaded_model import choose_num_threads
from gpu.models.parallel.nodes import NodeGreeting, NodeRefused, answer_heartbeats, join_node
from trioserve.protocol.node_setup import NodeSetup
from trioserve.protocol.wire import schema_hash

EXIT_NODE_LOST = 5
"""Status once node 0 is lost, or can't be reached."""
_log = logging.getLogger("gpu.worker")


def run() -> None:
    """Start the ranks that node 0 wants here, and end once it is lost; the ranks end as well.

    Standard input has a :class:`NodeSetup` as a line of JSON; the process ends with it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeSetup)
    exit_with_stdin(0)
    if setup.cores:
        os.sched_setaffinity(0, setup.cores)
    greeting = NodeGreeting(setup.node, schema_hash(), setup.checksum)
    try:
        connection, given = join_node(setup.address, setup.tls, greeting)
    except NodeRefused as refusal:
        _log.error("node 0 refused this node: %s", refusal)
        sys.exit(EXIT_NODE_LOST)
    except (OSError, EOFError) as error:
        _log.warning("can't join node 0 at %s: %s", setup.address, error)
        sys.exit(EXIT_NODE_LOST)
    threads = max(choose_num_threads(setup.num_threads) // max(len(given.orders), 1), 1)
    orders = [msgspec.msgpack.decode(order, type=RankOrder) for order in given.orders]
    with contextlib.ExitStack() as stack:
        memories: dict[int, int] = {}
        for order in orders:
            stage = order.rank // order.start.tensor_parallel_size
            if order.memory_bytes and stage not in memories:
                memories[stage] = stack.enter_context(open_shared_file(order.memory_bytes))
            order = attrs.evolve(order, memory=memories.get(stage, -1))
            start_rank(_for_this_host(order, setup, threads))
    _log.info("%d ranks of %s start", len(given.orders), setup.address)
    answer_heartbeats(connection, given.link_timeout)
    _log.warning("node 0 is lost")
    logging.shutdown()
    os._exit(EXIT_NODE_LOST)


def _for_this_host(order: RankOrder, setup: NodeSetup, threads: int) -> RankOrder:
    start = attrs.evolve(
        order.start,
        model=setup.model,
        nodes_listen=setup.address,
        nodes_tls=setup.tls,
        rank_cores=[],
    )
    return attrs.evolve(order, parent=os.getpid(), start=start, num_threads=threads)

"""The processes of the ranks behind rank 0, which is the worker itself.

They are its children. One that ends, or that a signal stops, ends the worker, and they end with it,
stopped ones as well: to the engine the group is one worker, lost at once, in the way in which the
rank was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import attrs
import msgspec

from gpu.models.parallel.link import EXIT_RANK_LOST, RankLink, connect_ranks
from gpu.models.parallel.nodes import Nodes, family_of, pass_on, purposes_of
from trioserve.protocol.addresses import host_and_port
from trioserve.protocol.child_state import wait_ended_or_stopped
from trioserve.protocol.wire import Start

_LENGTH = struct.Struct("<Q")
_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Signals that a worker ignores."""
_log = logging.getLogger("gpu.worker")
_processes: list[subprocess.Popen[bytes]] = []


@attrs.frozen(kw_only=True)
class RankOrder:
    """The order that a rank gets through its standard input: its number, and what it loads."""

    rank: int
    parent: int
    """Process id of the worker, or of its node's process."""
    sockets: list[int]
    """Descriptors of the sockets to rank 0, of one more if ``is_compiled``, for pages, and of those
    to the stages before and behind.
    """
    dtype: str
    num_threads: int
    start: Start
    is_compiled: bool
    """False if torch computes."""
    memory: int = -1
    """Descriptor of the memory that the compiled kernels' ranks of a stage share, if several do."""
    memory_bytes: int = 0
    """Size of that memory, for the process of another node, which makes it."""
    rendezvous: str = ""
    """URL through which the ranks of torch, or of GPUs, find each other."""
    group: str = ""
    """Name with which a rank of another node dials rank 0; it has no sockets then."""
    device: str = ""
    """Its GPU, such as ``cuda:1``; empty for a CPU."""


def write_order(order: RankOrder) -> bytes:
    """Return ``order`` with its length in front."""
    message = msgspec.msgpack.encode(order)
    return _LENGTH.pack(len(message)) + message


def read_order(descriptor: int) -> RankOrder:
    """Return the order that comes through ``descriptor``, which stays open.

    Raises:
        EOFError: It ended before.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return msgspec.msgpack.decode(_read(descriptor, length), type=RankOrder)


def _read(descriptor: int, length: int) -> bytes:
    found = b""
    while len(found) < length:
        piece = os.read(descriptor, length - len(found))
        if not piece:
            raise EOFError("the worker has ended")
        found += piece
    return found


def start_ranks(
    start: Start,
    dtype: str,
    num_threads: int,
    *,
    memories: Sequence[int] | None = None,
    memory_bytes: int = 0,
    rendezvous: Rendezvous,
    device: str = "",
) -> RankLink:
    """Start the other ranks of the worker of ``start``, and return the link of rank 0.

    From here on the process ends once a rank has ended.

    Args:
        start: What all ranks load.
        dtype: bfloat16, float16 or float32.
        num_threads: Number of threads of each.
        memories: Descriptors of what the compiled kernels' ranks share, by stage; empty if a stage
            is one rank. None if torch computes.
        memory_bytes: Size of each, for the stages of other nodes.
        rendezvous: The place at which the ranks find each other; it has the other nodes.
        device: GPU of rank 0, such as ``cuda:4``; the others have those behind it. Empty for a CPU.
    """
    kind, _, first = device.partition(":")
    size, num_stages = start.tensor_parallel_size, start.pipeline_parallel_size
    links = connect_ranks(num_stages, size, with_pages=memories is not None)
    here = start.num_ranks // start.num_nodes
    own, *others = links[:here]
    common = RankOrder(
        rank=0,
        parent=os.getpid(),
        sockets=[],
        dtype=dtype,
        num_threads=num_threads,
        start=attrs.evolve(start, nodes_tls=None),  # They have no use for rank 0's key.
        is_compiled=memories is not None,
        rendezvous=rendezvous.url,
        memory_bytes=memory_bytes,
    )
    for link in others:
        order = attrs.evolve(
            common,
            rank=link.rank,
            sockets=[each.fileno() for each in link.sockets],
            memory=memories[link.rank // start.tensor_parallel_size] if memories else -1,
            device=f"{kind}:{int(first) + link.rank}" if device else "",
        )
        start_rank(order, rendezvous.folder)
        for each in link.sockets:
            each.close()
    if rendezvous.nodes is None:
        return own
    order = attrs.evolve(common, group=rendezvous.nodes.group)
    return _start_on_nodes(order, links, rendezvous.nodes)


def _start_on_nodes(order: RankOrder, links: Sequence[RankLink], nodes: Nodes) -> RankLink:
    """Have other nodes start their ranks, and return the link of rank 0 to all.

    ``links`` are those of all ranks, as if they were here. The ends of other nodes' ranks are
    replaced by their connections, or passed on to these.
    """
    own, here = links[0], len(nodes.ranks_of(0))
    purposes = purposes_of(order.start, order.is_compiled)
    connections = nodes.start_ranks(functools.partial(_encoded, order), purposes)
    for link, outer in zip(links[here:], connections, strict=True):
        if link.stages is not None:
            before, behind = link.stages.sockets
            pass_on(before, outer["before"])
            pass_on(outer["behind"], behind)
    return RankLink(
        0,
        [*own.sockets[: here - 1], *(each["link"] for each in connections)],
        own.stages,
        [*own.pages[: here - 1], *(each["pages"] for each in connections if "pages" in each)],
    )


def _encoded(order: RankOrder, rank: int) -> bytes:
    return msgspec.msgpack.encode(attrs.evolve(order, rank=rank))


@attrs.frozen
class Rendezvous:
    """The place at which the ranks of a worker find each other."""

    url: str = ""
    """As ``torch.distributed`` has it; the compiled kernels' ranks need none."""
    folder: Path | None = None
    """Folder to be removed once they have; None if there is none."""
    nodes: Nodes | None = None
    """The other hosts."""


def meet_nodes(start: Start, checksum: Callable[[], str]) -> Nodes | None:
    """Return the other nodes of a worker once all have come; None if it is on one.

    Args:
        start: What all ranks load.
        checksum: Returns the checksum of the model's files, which must be that of all nodes.

    Raises:
        ModelLoadError: The nodes can't meet here.
    """
    if start.num_nodes == 1:
        return None
    nodes = Nodes(start, checksum(), secrets.token_hex(16), _end_worker)
    nodes.meet()
    return nodes


@contextlib.contextmanager
def open_rendezvous(start: Start, checksum: Callable[[], str]) -> Iterator[Rendezvous]:
    """Have a place at which torch's ranks find each other; see :func:`meet_nodes`."""
    nodes = meet_nodes(start, checksum)
    if nodes is not None:
        address = nodes.address()
        with socket.create_server((address, 0), family=family_of(address)) as free:
            port = free.getsockname()[1]
        yield Rendezvous(f"tcp://{host_and_port(address, port)}", nodes=nodes)
        return
    with tempfile.TemporaryDirectory(prefix="trioserve-ranks-") as name:
        folder = Path(name).resolve()
        yield Rendezvous((folder / "rendezvous").as_uri(), folder)


def rank_pids() -> list[int]:
    """Return the process ids of the ranks that this process has started, in their order."""
    return [process.pid for process in _processes]


def start_rank(order: RankOrder, folder: Path | None = None) -> None:
    """Start a rank on this host; the process ends once it ends, and removes ``folder`` then."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpu", "--rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[each for each in (*order.sockets, order.memory) if each >= 0],
    )
    assert process.stdin is not None
    process.stdin.write(write_order(order))
    process.stdin.flush()
    _processes.append(process)
    threading.Thread(target=_end_with, args=(process, order.rank, folder), daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], rank: int, folder: Path | None) -> None:
    """Wait until ``process`` ends or is stopped, which ends it.

    Then end this process, by the same signal if it was one.
    """
    if wait_ended_or_stopped(process.pid):
        _log.error("rank %d of the worker was stopped by a signal", rank)
        process.kill()
    status = process.wait()
    _log.error("rank %d of the worker has ended with status %d", rank, status)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    if status < 0:
        logging.shutdown()
        number = signal.Signals(-status)
        os.kill(os.getpid(), signal.SIGKILL if number in _IGNORED else number)
    _end_worker()


def _end_worker() -> None:
    logging.shutdown()
    os._exit(EXIT_RANK_LOST)

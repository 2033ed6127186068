"""A rank behind rank 0: loads its part of the model, and does what rank 0 does."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time

from gpu._util.logs import set_up_logging
from gpu._util.parent import exit_with_stdin
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import give_cache, load_compiled, make_compiled
from gpu.cpu.compiled_ranks import FollowingCompiledModel
from gpu.cpu.following_steps import FollowingSteps
from gpu.cpu.rank_memory import RankMemory
from gpu.cpu.rank_processes import RankOrder, read_order
from gpu.loading.loaded_model import unseen
from gpu.models.parallel.link import SECONDS_TO_END, RankLink, agreed, end_cut_off
from gpu.models.parallel.nodes import RankGreeting, dial_rank_0, purposes_of
from gpu.models.parallel.stage_link import StageLink
from gpu.models.parallel.steps import GiveCache, decode_step
from gpu.weights.replacement import open_files
from trioserve.model_files import ModelFiles
from trioserve.protocol.errors import ModelLoadError

_SET_PARENT_DEATH_SIGNAL = 1


def run() -> None:
    """Run as the rank that standard input says, until the worker ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    order = read_order(sys.stdin.fileno())
    if order.start.rank_cores:
        # Before there are threads, and in place of rank 0's cores, which it was started with.
        os.sched_setaffinity(0, order.start.rank_cores[order.rank])
    watch = end_with(order.parent)
    try:
        _serve(order)
    except ModelLoadError:
        watch.join()  # rank 0 has said why, and ends
    except EOFError:
        end_cut_off()
    except Exception:
        time.sleep(SECONDS_TO_END)  # if another rank was lost, the worker ends as that did
        raise


def end_with(parent: int) -> threading.Thread:
    """Let this process end when ``parent`` does, even if it is stopped then.

    Return the thread that waits for it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)

    return exit_with_stdin(0)


def _serve(order: RankOrder) -> None:
    start = order.start
    files = open_files(start)
    to_rank_0, *others = _connections(order)
    pages, ways = others[: order.is_compiled], others[order.is_compiled :]
    stages = None
    if ways:
        size, num_stages = start.tensor_parallel_size, start.pipeline_parallel_size
        stages = StageLink(order.rank, size, num_stages, ways)
    link = RankLink(order.rank, [to_rank_0], stages, pages)
    if order.device:
        from gpu.cuda.following import serve_cuda  # needs CuPy

        serve_cuda(order, link, files)
    elif order.is_compiled:
        _serve_compiled(order, link, files)
    else:
        from gpu.cpu.torch_following import serve_torch

        serve_torch(order, link, files)


def _connections(order: RankOrder) -> list[socket.socket]:
    """Return the connections to rank 0, which may be on another host, and those to other stages."""
    if not order.group:
        return [socket.socket(fileno=each) for each in order.sockets]
    start = order.start
    assert start.nodes_tls is not None
    purposes = purposes_of(start, order.is_compiled)
    greetings = [RankGreeting(order.rank, order.group, each) for each in purposes]
    return [dial_rank_0(start.nodes_listen, start.nodes_tls, each) for each in greetings]


def _serve_compiled(order: RankOrder, link: RankLink, files: ModelFiles) -> None:
    start = order.start

    def load() -> CompiledModel:
        model = make_compiled(
            start, files.native, order.dtype, order.num_threads, unseen, order.rank
        )
        load_compiled(model, files, unseen)
        return model

    model = agreed(link, load)
    given = decode_step(link.receive())
    assert isinstance(given, GiveCache)
    memory = None
    if order.memory >= 0:
        memory = RankMemory.of_file(order.memory)
        os.close(order.memory)
    agreed(link, lambda: give_cache(model, start, given.num_pages, given.num_host_pages, memory))
    FollowingSteps(link, FollowingCompiledModel(model), files).follow()

"""A rank behind rank 0: loads its part of the model, and does what rank 0 does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch

from gpu._util.logs import set_up_logging
from gpu._util.parent import exit_with_stdin
from gpu.attention import Attention
from gpu.cpu.rank_processes import RankOrder, read_order
from gpu.cpu.torch_loading import load_part, make_attention
from gpu.loading.loaded_model import unseen
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    CopyPages,
    GiveCache,
    LoadOnRanks,
    UnloadOnRanks,
    decode_step,
    layout_of,
)
from trioserve.model_files import open_model
from trioserve.protocol.errors import ModelLoadError

_SET_PARENT_DEATH_SIGNAL = 1


def run() -> None:
    """Run as the rank that standard input says, until the worker ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    order = read_order(sys.stdin.fileno())
    watch = end_with(order.parent)
    try:
        _serve(order)
    except ModelLoadError:
        watch.join()  # rank 0 says why, and ends


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
    assert not start.weights, "the weights of several ranks aren't exchanged"
    group = RankGroup(Path(order.rendezvous), order.rank, start.tensor_parallel_size)
    files = open_model(Path(start.model), start.model_impl)
    part = ModelPart(files.native, order.rank, group.size, start.enable_expert_parallel)
    decoder = load_part(files, order.dtype, order.num_threads, unseen, part, group)
    given = decode_step(group.receive())
    assert isinstance(given, GiveCache)
    attention = make_attention(start, decoder, given.num_pages, given.num_host_pages)
    with torch.inference_mode():
        follow(group, decoder, attention, FollowingAdapters(part, decoder.dtype))


def follow(
    group: RankGroup, decoder: Decoder, attention: Attention, adapters: FollowingAdapters
) -> None:
    """Do what rank 0 does, step by step."""
    while True:
        match decode_step(group.receive()):
            case Compute() as step:
                attention.begin(layout_of(step))
                tokens = torch.from_numpy(np.frombuffer(step.tokens, dtype=np.int64).copy())
                decoder.forward(tokens, attention, adapters.groups(step.adapted))
            case ComputeLogits(hidden=raw, num_rows=rows):
                hidden = torch.frombuffer(bytearray(raw), dtype=decoder.dtype)
                decoder.logits(hidden.view(rows, -1))
            case LoadOnRanks() as step:
                adapters.load(step)
            case UnloadOnRanks() as step:
                adapters.unload(step)
            case CopyPages(copies=pairs):
                attention.copy_pages(np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2))

"""A rank behind rank 0: loads its part of the model, and does what rank 0 does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from gpu._util.logs import set_up_logging
from gpu.attention import Attention
from gpu.cpu.loading import rope_table
from gpu.cpu.rank_processes import read_order
from gpu.cpu.torch_loading import load_decoder, make_attention
from gpu.loading.loaded_model import unseen
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters
from gpu.models.parallel.group import RankGroup
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    CopyPages,
    DropAdapter,
    GiveCache,
    HoldAdapter,
    decode_step,
    layout_of,
)
from trioserve.model_files import open_model

_SET_PARENT_DEATH_SIGNAL = 1


def run() -> None:
    """Run as the rank that standard input says, until the worker ends."""
    die_with(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    order = read_order(sys.stdin.fileno())
    start = order.start
    group = RankGroup(Path(order.meeting), order.rank, start.tensor_parallel_size)
    files = open_model(Path(start.model), start.model_impl)
    part = ModelPart(files.native, order.rank, group.size, start.enable_expert_parallel)
    decoder = load_decoder(files, order.dtype, order.num_threads, unseen, part, group)
    given = decode_step(group.receive())
    assert isinstance(given, GiveCache)
    attention = make_attention(
        decoder,
        start.page_size,
        given.num_pages + given.num_host_pages,
        rope_table(start, decoder.config, given.num_pages),
    )
    with torch.inference_mode():
        follow(group, decoder, attention, FollowingAdapters(part, decoder.dtype))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, even if it is stopped then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


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
            case HoldAdapter() as step:
                adapters.hold(step)
            case DropAdapter() as step:
                adapters.drop(step)
            case CopyPages(copies=pairs):
                attention.copy_pages(np.frombuffer(pairs, dtype=np.int32).reshape(-1, 2))

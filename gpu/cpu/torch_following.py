"""A rank behind rank 0 that torch computes on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gpu.attention import Attention
from gpu.cpu.following_stages import StageSteps
from gpu.cpu.rank_processes import RankOrder
from gpu.cpu.torch_loading import load_decoder, make_attention, own_part
from gpu.loading.loaded_model import unseen
from gpu.models.decoder import Decoder
from gpu.models.parallel.adapters import FollowingAdapters
from gpu.models.parallel.layouts import layout_of
from gpu.models.parallel.link import RankLink, agreed
from gpu.models.parallel.pipeline import PipelineGroup, join_group
from gpu.models.parallel.steps import (
    Compute,
    ComputeLogits,
    CopyPages,
    GiveCache,
    LoadOnRanks,
    UnloadOnRanks,
    decode_step,
)
from trioserve.model_files import open_model


def serve_torch(order: RankOrder, link: RankLink) -> None:
    """Load this rank's part of the model, and do what rank 0 does, until the worker ends.

    Raises:
        ModelLoadError: A rank can't load its part.
    """
    start = order.start
    group = join_group(start, Path(order.rendezvous), order.rank)
    files = open_model(Path(start.model), start.model_impl)
    part = own_part(start, files, group)
    ranks = group if group.size > 1 else None
    decoder = agreed(
        link,
        lambda: load_decoder(files, order.dtype, order.num_threads, unseen, part, ranks),
    )
    given = decode_step(link.receive())
    assert isinstance(given, GiveCache)
    attention = make_attention(start, decoder, given.num_pages, given.num_host_pages)
    adapters = FollowingAdapters(part, decoder.dtype)
    with torch.inference_mode():
        if isinstance(group, PipelineGroup):
            vocab_size = part.whole.vocab_size
            StageSteps(link, group, decoder, attention, adapters, vocab_size).follow()
        follow(link, decoder, attention, adapters)


def follow(
    link: RankLink, decoder: Decoder, attention: Attention, adapters: FollowingAdapters
) -> None:
    """Do what rank 0 does, step by step."""
    while True:
        match decode_step(link.receive()):
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

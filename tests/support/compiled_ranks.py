"""Ranks of the compiled kernels as threads of one process, over the memory that processes share."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from gpu.cpu.compiled import CompiledModel, read_as
from gpu.cpu.compiled_part import CompiledPart, choose_slices
from gpu.cpu.compiled_ranks import LeadingCompiledModel, follow_compiled
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.rank_memory import RankMemory, open_shared_file
from gpu.lora.store import AdapterStore
from gpu.models.parallel.adapter_parts import SentAdapters
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.rope import cos_sin_table
from gpu.weights import read_weights
from trioserve.model_files import open_model

__all__ = ["compiled_ranks"]


@contextlib.contextmanager
def compiled_ranks(
    path: Path,
    size: int,
    *,
    slices: int = 0,
    quantization: str = "none",
    threads: int = 1,
    by_expert: bool = False,
    page_size: int = 4,
    num_pages: int = 128,
    max_tokens: int = 256,
) -> Iterator[CpuModel]:
    """Open the model in ``path`` on ``size`` ranks of some ``threads`` each; yield that of rank 0.

    An error on another rank ends the process, as it ends a worker.
    """
    files = open_model(path)
    models = []
    for rank in range(size):
        part = ModelPart(files.native, rank, size, by_expert)
        chosen = choose_slices(part, slices)
        assert chosen is not None
        model = CompiledModel(
            load_library(),
            files.native,
            quantization,
            threads,
            max_rank=64,
            part=CompiledPart(part, chosen),
            store=AdapterStore if rank else SentAdapters,
        )
        dtype, keep = read_as(quantization)
        model.load(read_weights(files, dtype, lambda done, total: None, keep))
        models.append(model)
    with open_shared_file(models[0].shared_bytes(max_tokens)) as descriptor:
        for model in models:
            model.finish(
                cos_sin_table(files.native, files.native.max_position_embeddings),
                page_size=page_size,
                num_pages=num_pages,
                max_tokens=max_tokens,
                memory=RankMemory.of_file(descriptor),
            )
    with _followed(models[1:]) as link:
        yield LeadingCompiledModel(models[0], link)


@contextlib.contextmanager
def _followed(others: list[CompiledModel]) -> Iterator[RankLink]:
    """Yield the link of rank 0 to the other ranks, which follow until the block ends."""
    pairs = [socket.socketpair() for _ in others]
    threads = [
        threading.Thread(target=_follow, args=(RankLink(rank, [far]), model), daemon=True)
        for rank, ((_, far), model) in enumerate(zip(pairs, others, strict=True), 1)
    ]
    for thread in threads:
        thread.start()
    try:
        yield RankLink(0, [near for near, _ in pairs])
    finally:
        for near, _ in pairs:
            near.close()
        for thread in threads:
            thread.join(10)
        for _, far in pairs:
            far.close()
    assert not any(thread.is_alive() for thread in threads)


def _follow(link: RankLink, model: CompiledModel) -> None:
    with link.in_step(), contextlib.suppress(EOFError):
        follow_compiled(link, model)

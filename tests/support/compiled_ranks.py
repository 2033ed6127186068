"""Ranks of the compiled kernels as threads of one process, over the memory that processes share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_loading import load_compiled
from gpu.cpu.compiled_part import CompiledPart, choose_slices
from gpu.cpu.compiled_ranks import FollowingCompiledModel, LeadingCompiledModel
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuModel
from gpu.cpu.rank_memory import RankMemory, open_shared_file
from gpu.loading.loaded_model import unseen
from gpu.lora.store import AdapterStore
from gpu.models.parallel.adapter_parts import SentAdapters
from gpu.models.parallel.link import RankLink, connect_ranks
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.stages import stages_of
from gpu.models.rope import cos_sin_table
from tests.support.following_threads import followed
from trioserve.model_files import open_model

__all__ = ["compiled_ranks", "compiled_stages"]


@contextlib.contextmanager
def compiled_ranks(path: Path, size: int, **options: Any) -> Iterator[CpuModel]:
    """Open the model in ``path`` on ``size`` ranks; yield that of rank 0.

    Options are those of :func:`compiled_stages`.
    """
    with compiled_stages(path, 1, size, **options) as (model, _):
        yield model


@contextlib.contextmanager
def compiled_stages(
    path: Path,
    num_stages: int,
    size: int = 1,
    *,
    slices: int = 0,
    quantization: str = "none",
    threads: int = 1,
    by_expert: bool = False,
    page_size: int = 4,
    num_pages: int = 128,
    max_tokens: int = 256,
) -> Iterator[tuple[LeadingCompiledModel, RankLink]]:
    """Open the model in ``path`` in stages of ``size`` ranks with some ``threads`` each.

    Yield that of rank 0, and its link.
    """
    files = open_model(path)
    config = files.native
    stages = stages_of(config, num_stages) if num_stages > 1 else [None]
    parts = [
        ModelPart(config, number % size, size, by_expert, stages[number // size])
        for number in range(num_stages * size)
    ]
    models = []
    for number, part in enumerate(parts):
        chosen = choose_slices(part, slices) if size > 1 or slices else 0
        assert chosen is not None
        model = CompiledModel(
            load_library(),
            config,
            quantization,
            threads,
            max_rank=64,
            part=CompiledPart(part, chosen),
            store=AdapterStore if number else SentAdapters,
        )
        load_compiled(model, files, unseen)
        models.append(model)
    for first in range(0, num_stages * size, size):
        with contextlib.ExitStack() as stack:
            memory = None
            if size > 1:
                shared = models[0].shared_bytes(max_tokens)
                memory = stack.enter_context(open_shared_file(shared))
            for model in models[first : first + size]:
                model.finish(
                    cos_sin_table(config, config.max_position_embeddings),
                    page_size=page_size,
                    num_pages=num_pages,
                    max_tokens=max_tokens,
                    memory=None if memory is None else RankMemory.of_file(memory),
                )
    others = [FollowingCompiledModel(model) for model in models[1:]]
    links = connect_ranks(num_stages, size, with_pages=True)
    with followed(links, others, files) as link:
        yield LeadingCompiledModel(models[0], link, parts), link

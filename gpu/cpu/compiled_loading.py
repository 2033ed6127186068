"""Loading a model that the compiled kernels compute, or the part of one that a rank has."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.compiled import CompiledModel
from gpu.cpu.compiled_part import CompiledPart, choose_slices
from gpu.cpu.formats import obstacle_in, read_as
from gpu.cpu.library import load_library
from gpu.cpu.rank_memory import RankMemory
from gpu.loading.loaded_model import OnProgress, of_weights, unseen
from gpu.lora.store import AdapterStore
from gpu.models.parallel.adapter_parts import SentAdapters
from gpu.models.parallel.model_part import part_of_rank
from gpu.models.rope import cos_sin_table_for
from gpu.weights import read_weights
from gpu.weights.blocks import Weight
from trioserve.model_files import ModelConfig, ModelFiles
from trioserve.protocol.shipped_kernels import kernels_obstacle
from trioserve.protocol.wire import Start


class NotCompiled(Exception):
    """Why the compiled kernels don't compute a model."""


class NoKernels(NotCompiled):
    """Why compiled kernels aren't there for a model that they compute elsewhere, or otherwise."""


def make_compiled(
    start: Start,
    config: ModelConfig,
    dtype: str,
    threads: int,
    on_progress: OnProgress,
    rank: int = 0,
) -> CompiledModel:
    """Return a model, or the part of it that process ``rank`` of several has, without its weights.

    Raises:
        NotCompiled: torch has to compute it.
        ModelLoadError: The model can't be split as asked for.
    """
    if start.pipeline_parallel_size % start.num_nodes:
        raise NotCompiled("the compiled kernels' ranks of a stage share the memory of one host")
    obstacle = obstacle_in(config)
    if obstacle is not None:
        raise NotCompiled(f"the compiled kernels aren't made for {obstacle}")
    if dtype != "bfloat16":
        lacking = kernels_obstacle()
        if start.dtype == "auto" and lacking is not None:
            raise NoKernels(lacking)
        raise NotCompiled("the compiled kernels compute in bfloat16 only")
    part = _part_of_rank(start, config, rank)
    try:
        library = load_library(
            start.cpu_isa, lambda done, total: on_progress("kernels", done, total)
        )
    except LibraryBuildError as error:
        raise NoKernels(str(error)) from error
    quantization = start.quantization
    if quantization == "auto" and start.dtype != "auto":
        quantization = "none"
    leads = start.num_ranks > 1 and rank == 0
    return CompiledModel(
        library,
        config,
        quantization,
        threads,
        max_rank=start.max_lora_rank,
        part=part,
        store=SentAdapters if leads else AdapterStore,
    )


def _part_of_rank(start: Start, config: ModelConfig, rank: int) -> CompiledPart | None:
    """Return what a rank computes; None for the whole model in one slice."""
    size, asked = start.tensor_parallel_size, start.tensor_parallel_slices
    part = part_of_rank(start, config, rank)
    if size == 1 and asked <= 1:
        return None if part.stage is None else CompiledPart(part, slices=0)
    slices = choose_slices(part, asked)
    if slices is None:
        raise NoKernels(
            "the compiled kernels compute blocks of 32 numbers, of which "
            f"{size} ranks of this model don't have whole ones"
        )
    return CompiledPart(part, slices)


def load_compiled(model: CompiledModel, files: ModelFiles, on_progress: OnProgress) -> None:
    """Give ``model`` the weights of ``files``.

    Raises:
        ModelLoadError: The files are damaged, or another model's, or there is no memory.
    """
    model.load(_weights_of(model, files, on_progress))


def read_other(model: CompiledModel, files: ModelFiles) -> CompiledModel:
    """Return ``model`` with the weights of ``files``, and with an empty KV cache.

    Raises:
        ModelLoadError: As :func:`load_compiled`.
    """
    return model.with_weights(_weights_of(model, files, unseen))


def _weights_of(
    model: CompiledModel, files: ModelFiles, on_progress: OnProgress
) -> Iterator[tuple[str, Weight]]:
    dtype, keep = read_as(model.quantization)
    return read_weights(files, dtype, of_weights(on_progress), keep, model.wants)


def give_cache(
    model: CompiledModel,
    start: Start,
    num_pages: int,
    num_host_pages: int,
    memory: RankMemory | None = None,
) -> None:
    """Give ``model`` a KV cache; ``memory`` is that of a stage's ranks, if there are several.

    Raises:
        ModelLoadError: There is no memory for it.
    """
    model.finish(
        cos_sin_table_for(model.config, start.max_model_len, num_pages * start.page_size),
        page_size=start.page_size,
        num_pages=num_pages + num_host_pages,
        max_tokens=start.max_num_batched_tokens,
        memory=memory,
    )

"""Loading a model on a GPU, as the only rank or as rank 0; :mod:`.loading_parts` has the steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from gpu.cpu.rank_loading import threads_of_rank
from gpu.cpu.rank_processes import open_rendezvous, start_ranks
from gpu.cuda.assembly import ServingLimits, assemble
from gpu.cuda.device import Gpu
from gpu.cuda.draft_model import CudaDraftModel
from gpu.cuda.executor import CudaExecutor
from gpu.cuda.loading_parts import (
    capture,
    join_group,
    load_parts,
    make_adapter_slots,
    open_gpu,
)
from gpu.cuda.model_to_load import ModelToLoad, explaining
from gpu.cuda.ranks import CudaRank, SoleRank
from gpu.cuda.speculation import SpeculativeExecutor
from gpu.cuda.stage_loading import load_stages, make_host_sampler
from gpu.executor import PagedExecutor
from gpu.loading.loaded_model import (
    Loaded,
    OnProgress,
    choose_num_threads,
    of_weights,
    unseen,
    warm_up,
)
from gpu.loading.memory import cache_doesnt_fit
from gpu.loading.step_measuring import measure_steps
from gpu.loading.weight_swap import keep_weights
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.models.parallel.link import agreed
from gpu.models.parallel.model_part import part_of_rank, parts_in_words
from gpu.sampling.adjustments import Adjuster
from gpu.sampling.drafting.draft_model import DraftModelSource
from gpu.sampling.drafting.drafter import Drafter
from gpu.slots import SlotTable
from gpu.weights.tensors import load_weights
from trioserve.model_files import ModelFiles
from trioserve.protocol.wire import Start


def load_on_gpu(
    start: Start,
    files: ModelFiles,
    dtype: str,
    device: str,
    on_progress: OnProgress,
    adjuster: Adjuster,
) -> Loaded:
    """Load a model on ``device``, such as ``cuda:0``; see :func:`load_model`.

    With several ranks each of the others has one of the devices behind it.
    """
    threads = threads_of_rank(start, choose_num_threads(start.num_threads))
    torch_dtype = getattr(torch, dtype)
    if start.num_ranks == 1:
        gpu = open_gpu(device, threads)
        return load_model(gpu, start, files, torch_dtype, on_progress, adjuster)
    gpu, rank = _lead(start, files, dtype, device, threads)
    common = (gpu, start, files, torch_dtype, on_progress, adjuster, rank)
    if start.pipeline_parallel_size == 1:
        loaded = load_model(*common)
    else:
        sampler = make_host_sampler(start, files.native.vocab_size, threads, on_progress)
        loaded = load_stages(*common, sampler)
    rank.serves = True
    return loaded


def _lead(
    start: Start, files: ModelFiles, dtype: str, device: str, threads: int
) -> tuple[Gpu, CudaRank]:
    """Start the other ranks, and return the place of this one, rank 0."""
    part = part_of_rank(start, files.native, 0)
    with open_rendezvous(start, files.checksum) as rendezvous:
        link = start_ranks(start, dtype, threads, rendezvous=rendezvous, device=device)
        gpu = agreed(link, lambda: open_gpu(device, threads))
        group = join_group(start, 0, rendezvous.url, device)
    return gpu, CudaRank(link, group, part)


def load_model(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    on_progress: OnProgress,
    adjuster: Adjuster | None = None,
    rank: SoleRank | None = None,
) -> Loaded:
    """Load a model and give it all that it may have of the GPU's memory.

    Args:
        gpu: where to.
        start: limits, all chosen but the number of pages.
        files: of the model.
        dtype: bfloat16 or float16.
        on_progress: called often, with a stage, how much of it is done and of how much.
        adjuster: says what is done to logits before a token is drawn; nothing if it is None.
        rank: rank 0 of several, each of which loads its part; None for the only one.

    Raises:
        ModelLoadError: the model can't be served so; one line says why and what to do.
    """
    rank = rank or SoleRank()

    def prepare(
        model: Decoder, limits: ServingLimits, lengths: Sequence[int]
    ) -> tuple[object, Callable[[], None]]:
        executor, slots = assemble(gpu.loader, model, limits, gpu.timeline(), rank=rank)

        def run() -> None:
            warm_up(executor, slots, lengths, limits.page_size)
            rank.end_steps()

        return executor, run

    models, decoders, free = load_parts(gpu, start, files, dtype, rank, on_progress, prepare)
    executors, slots, loras = rank.agreed(
        lambda: _assemble(gpu, start, models, decoders, adjuster, rank)
    )
    if not start.enforce_eager:
        capture(gpu, models, executors, on_progress)
    ranks = parts_in_words(start, files.native)
    return Loaded(
        executor=_drafting(start, models, executors, slots),
        slots=slots,
        num_pages=models[0].limits.num_pages,
        num_host_pages=models[0].limits.num_host_pages,
        device_name=gpu.name,
        computing=f"CUDA kernels, weights in {str(dtype).removeprefix('torch.')}{ranks}",
        lends_pages=not ranks,
        free_memory=free,
        read_weights=keep_weights if ranks else functools.partial(_read_again, decoders[0], dtype),
        adapters=None if loras is None else loras.store,
        max_row_tokens=slots.max_row_tokens,
    )


def _assemble(
    gpu: Gpu,
    start: Start,
    models: Sequence[ModelToLoad],
    decoders: Sequence[Decoder],
    adjuster: Adjuster | None,
    rank: SoleRank,
) -> tuple[list[CudaExecutor], SlotTable, AdapterSlots | None]:
    """Return an executor for each model, and the slots and the adapters of the first one."""
    limits = models[0].limits
    with explaining(lambda: cache_doesnt_fit(limits.num_pages)):
        loras = make_adapter_slots(gpu, decoders[0], start, rank)
        timeline = gpu.timeline()
        executor, slots = assemble(
            gpu.loader, decoders[0], limits, timeline, adjuster, loras, rank=rank
        )
        others = [
            assemble(gpu.loader, decoder, each.limits, timeline, slots=slots)[0]
            for each, decoder in zip(models[1:], decoders[1:], strict=True)
        ]
    return [executor, *others], slots, loras


def _drafting(
    start: Start,
    models: Sequence[ModelToLoad],
    executors: Sequence[CudaExecutor],
    slots: SlotTable,
) -> PagedExecutor:
    """Return an executor that drafts tokens, if ``start`` asks for drafts; else the only one."""
    if start.speculative is None:
        return executors[0]
    slots.max_row_tokens = start.speculative.max_row_tokens
    sizes = [each.max_decode_rows for each in models]
    times = [
        measure_steps(executor, slots, start.page_size, size)
        for executor, size in zip(executors, sizes, strict=True)
    ]
    if len(models) == 1:
        return SpeculativeExecutor(executors[0], Drafter(start.speculative, times[0]), sizes[0])
    slots.kv_format = None  # The draft model would lack an adapter's keys and values.
    draft_model, limits = CudaDraftModel(executors[1], sizes[1]), models[1].limits
    source = DraftModelSource(
        draft_model,
        slots,
        vocab_size=min(each.config.vocab_size for each in models),
        page_size=limits.page_size,
        num_pages=limits.num_pages + limits.num_host_pages,
        max_tokens=limits.max_num_batched_tokens,
        step_times=times[1],
    )
    drafter = Drafter(start.speculative, times[0], source)
    return SpeculativeExecutor(executors[0], drafter, sizes[0], draft_model)


def _read_again(model: Decoder, dtype: torch.dtype, files: ModelFiles) -> Callable[[], None]:
    """Read all weights into the host's memory: on the GPU there is room for one set only."""
    weights = list(load_weights(files, dtype, of_weights(unseen)))

    def swap() -> None:
        model.overwrite(weights)
        # Steps to come are launched from other streams than the copies.
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)

    return swap

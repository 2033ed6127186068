"""Loading the first of several stages on a GPU, as rank 0; the others load theirs meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from gpu.cpu.build import LibraryBuildError
from gpu.cpu.library import load_library
from gpu.cpu.model import CpuSampler
from gpu.cpu.sampling import CompiledSampler
from gpu.cpu.torch_loading import make_sampler
from gpu.cuda.assembly import ServingLimits, assemble_forward, slot_table
from gpu.cuda.device import Gpu
from gpu.cuda.leading_stage import LeadingCudaExecutor, LeadingCudaStage
from gpu.cuda.loading_parts import capture, load_parts, make_adapter_slots
from gpu.cuda.model_to_load import explaining
from gpu.cuda.ranks import CudaRank
from gpu.cuda.stage_forward import StageForward
from gpu.loading.loaded_model import Loaded, OnProgress, warm_up
from gpu.loading.memory import cache_doesnt_fit
from gpu.loading.weight_swap import keep_weights
from gpu.lora.adapter_slots import AdapterSlots
from gpu.models.decoder import Decoder
from gpu.models.parallel.model_part import parts_in_words, stages_of_worker
from gpu.models.parallel.stage_times import StageTimes
from gpu.sampling.adjustments import Adjuster
from gpu.slots import SlotTable
from trioserve.model_files import ModelFiles
from trioserve.protocol.wire import Start


def load_stages(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    dtype: torch.dtype,
    on_progress: OnProgress,
    adjuster: Adjuster | None,
    rank: CudaRank,
    sampler: CpuSampler,
) -> Loaded:
    """Load the first stage, as :func:`gpu.cuda.loading.load_model` loads a whole model.

    ``sampler`` draws on the host from the logits of the last stage.

    Raises:
        ModelLoadError: The model can't be served so; one line says why and what to do.
    """
    assemble = functools.partial(_assemble, gpu, start, files, rank, sampler)

    def prepare(
        model: Decoder, limits: ServingLimits, lengths: Sequence[int]
    ) -> tuple[object, Callable[[], None]]:
        executor, slots, _ = assemble(model, limits)

        def run() -> None:
            warm_up(executor, slots, lengths, limits.page_size)
            rank.end_steps()

        return executor, run

    models, decoders, free = load_parts(gpu, start, files, dtype, rank, on_progress, prepare)
    limits = models[0].limits

    def assemble_all() -> tuple[LeadingCudaExecutor, SlotTable, StageForward]:
        with explaining(lambda: cache_doesnt_fit(limits.num_pages)):
            loras = make_adapter_slots(gpu, decoders[0], start, rank)
            return assemble(decoders[0], limits, adjuster, loras)

    executor, slots, forward = rank.agreed(assemble_all)
    if not start.enforce_eager:
        capture(gpu, models, [forward], on_progress)
    words = f"CUDA kernels, weights in {str(dtype).removeprefix('torch.')}"
    return Loaded(
        executor=executor,
        slots=slots,
        num_pages=limits.num_pages,
        num_host_pages=limits.num_host_pages,
        device_name=gpu.name,
        computing=words + parts_in_words(start, files.native),
        lends_pages=False,
        free_memory=free,
        read_weights=keep_weights,
        adapters=executor.model.adapters,
        num_stages=start.pipeline_parallel_size,
    )


def _assemble(
    gpu: Gpu,
    start: Start,
    files: ModelFiles,
    rank: CudaRank,
    sampler: CpuSampler,
    model: Decoder,
    limits: ServingLimits,
    adjuster: Adjuster | None = None,
    loras: AdapterSlots | None = None,
) -> tuple[LeadingCudaExecutor, SlotTable, StageForward]:
    """Return the executor of the first stage, the slots that it reads, and its forward pass."""
    forward = assemble_forward(gpu.loader, model, limits, rank, loras)
    assert isinstance(forward, StageForward)
    slots = slot_table(limits, model.vocab_size)
    store = None if loras is None else loras.store
    if store is not None:
        slots.adapters = store
    stage = LeadingCudaStage(forward, rank, store)
    size, times = model.config.hidden_size, StageTimes(stages_of_worker(start, files.native))
    executor = LeadingCudaExecutor(stage, sampler, slots, rank.link, size, adjuster, times.add)
    return executor, slots, forward


def make_host_sampler(
    start: Start, vocab_size: int, threads: int, on_progress: OnProgress
) -> CpuSampler:
    """Return a sampler by the compiled kernels of the CPU, or by torch if there are none here."""
    try:
        library = load_library(
            start.cpu_isa, lambda done, total: on_progress("kernels", done, total)
        )
    except LibraryBuildError:
        return make_sampler(start, vocab_size)
    processed = start.logprobs_mode == "processed"
    return CompiledSampler(library, vocab_size, threads, processed_logprobs=processed)
